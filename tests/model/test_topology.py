from dataclasses import replace

import numpy as np
import pytest

from unet3d.config import ModelSettings
from unet3d.errors import ConfigError
from unet3d.inputs.plain_data import validated
from unet3d.model import Topology, plan_topology
from unet3d.model.topology import topology_like

ISOTROPIC = (1.0, 1.0, 1.0)
HALF, CUBE = (2, 2, 2), (3, 3, 3)
WITHIN = (2, 2, 1)
"""The stride for thick slices, which halves within the slices only."""


def plan(size, spacing_mm=ISOTROPIC, **options):
    settings = ModelSettings(**{"deep_supervision": False, **options})
    return plan_topology(settings, size, spacing_mm, 1, 2)


@pytest.mark.parametrize(
    ("size", "spacing_mm", "strides"),
    [
        ((128, 128, 128), ISOTROPIC, [HALF] * 5),
        ((1024, 1024, 1024), ISOTROPIC, [HALF] * 5),  # up to six levels
        # Spacings of 1 x 1 x 5 mm, 2 x 2 x 5, 4 x 4 x 5: only the last has 5 at most twice the
        # finest.
        ((128, 128, 32), (1.0, 1.0, 5.0), [WITHIN] * 2 + [HALF] * 3),
        ((64, 64, 32), (1.0, 1.0, 2.0), [HALF] * 3 + [WITHIN]),
        ((64, 64, 32), (1.0, 1.0, 2.01), [WITHIN] + [HALF] * 3),
        # No axis falls below four voxels, and seven voxels are not padded to eight. For the median
        # hippocampus, nnU-Net's patch is the second size; it has the same network.
        ((35, 50, 36), ISOTROPIC, [HALF] * 3),
        ((40, 56, 40), ISOTROPIC, [HALF] * 3),
        ((200, 9, 30), ISOTROPIC, [HALF] + [(2, 1, 2)] * 2 + [(2, 1, 1)] * 2),
        ((64, 1, 7), ISOTROPIC, [(2, 1, 1)] * 4),
    ],
)
def test_axes_are_halved_that_are_long_and_not_much_coarser_than_the_finest(
    size, spacing_mm, strides
):
    assert plan(size, spacing_mm).strides == ((1, 1, 1), *strides)


def test_levels_channels_and_strides_can_be_chosen():
    usual = plan((128, 128, 128))
    assert (usual.channels, usual.num_levels) == ((32, 64, 128, 256, 320, 320), 6)
    assert usual.total_stride == (32, 32, 32)
    by_number = plan((64, 64, 64), num_levels=3, base_channels=100)
    assert by_number.channels == (100, 200, 320)
    chosen = plan((64, 64, 64), channels=(8, 12, 20))
    assert chosen.channels == (8, 12, 20) and len(chosen.strides) == 3
    assert plan((1024, 1024, 1024), num_levels=8).num_levels == 8


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        ((16, 16, 10), {"num_levels": 4}, "4 levels but a patch of 16x16x10 voxels gives 3"),
        ((16, 16, 10), {"channels": (4,) * 4}, "4 levels but a patch of 16x16x10 voxels gives 3"),
        ((6, 6, 5), {}, "2 levels but a patch of 6x6x5 voxels gives 1, .*larger"),
    ],
)
def test_patches_that_are_too_small_are_refused(size, options, message):
    with pytest.raises(ConfigError, match=message):
        plan(size, **options)


def test_a_trained_network_is_taken_for_other_images_and_labels():
    trained = replace(plan((32, 32, 32), num_levels=4), **NEW_FIELDS)
    assert topology_like(trained, (16, 16, 8), 2, 5, False) == replace(
        trained, in_channels=2, num_classes=5, deep_supervision=False
    )
    with pytest.raises(ConfigError, match="a patch of 8x8x4 to one voxel, because it divid"):
        topology_like(trained, (8, 8, 4), 2, 5, False)


def kernels_of(topology):
    return [topology.kernel(level) for level in range(topology.num_levels)]


def nnunet_kernels(spacing_mm, strides):
    """nnU-Net's rule: 3 once a spacing is below twice the finest; the lowest level has 3x3x3."""
    kernels, wide = [], np.zeros(3, bool)
    for level in range(len(strides) - 1):
        spacing = np.array(spacing_mm) * np.prod(strides[: level + 1], axis=0)
        wide |= spacing / spacing.min() < 2
        kernels.append(tuple(np.where(wide, 3, 1).tolist()))
    return [*kernels, CUBE]


def test_anisotropic_kernels_are_those_of_nnunet():
    """Kernels have one voxel across slices twice as thick, until voxels are almost cubes."""
    rng = np.random.default_rng(0)
    spacings = [tuple(np.exp(rng.uniform(0, 3, 3)).tolist()) for _ in range(200)]
    seen = set()
    for spacing in [(1.0, 1.0, 1.99), (6.0, 1.0, 1.0), *spacings]:
        topology = plan((512, 512, 512), spacing, kernels="anisotropic")
        kernels = kernels_of(topology)
        assert kernels == nnunet_kernels(spacing, topology.strides)
        assert plan((512, 512, 512), spacing) == replace(topology, kernels=())
        seen.add(len(set(kernels)))
    assert seen >= {1, 2, 3}


@pytest.mark.parametrize(
    ("size", "spacing_mm", "options", "kernels"),
    [
        # At exactly twice the finest spacing an axis is halved at once, so that no voxel is
        # skipped.
        ((128, 128, 128), (1.0, 1.0, 2.0), {}, [(3, 3, 1), *[CUBE] * 5]),
        ((128, 128, 128), (1.0, 1.0, 5.0), {}, [(3, 3, 1)] * 2 + [CUBE] * 4),
        # Z is the finest, but cannot be halved. X and Y, three times as coarse, are still halved,
        # compared with each other only, and no stride skips voxels.
        ((64, 64, 6), (3.0, 3.0, 1.0), {}, [(1, 1, 3), *[CUBE] * 4]),
        # A network of few levels has kernels across slices at the lowest level.
        ((64, 64, 32), (1.0, 1.0, 20.0), {"num_levels": 2}, [(3, 3, 1), CUBE]),
    ],
)
def test_anisotropic_kernels_where_nnunets_rule_says_too_little(size, spacing_mm, options, kernels):
    topology = plan(size, spacing_mm, kernels="anisotropic", **options)
    assert kernels_of(topology) == kernels
    assert size[2] != 6 or topology.strides == ((1, 1, 1), *[WITHIN] * 4)


UNITS = {"units": (1, 3, 2, 1), "decoder_units": (1, 3, 2)}
NEW_FIELDS = {**UNITS, "upsampling_bias": True, "norm_eps": 1e-3, "negative_slope": 0.0}


def units_of(topology):
    levels = range(topology.num_levels)
    of_decoder = [topology.num_decoder_units(level) for level in levels[:-1]]
    return [topology.num_units(level) for level in levels], of_decoder


def test_topologies_are_read_from_plain_values_and_earlier_files():
    topology = plan((128, 128, 32), (1.0, 1.0, 5.0), encoder="residual", kernels="anisotropic")
    values = topology.to_dict()
    values = {**values, "strides": [list(stride) for stride in values["strides"]]}
    assert validated(Topology, values) == topology
    topology = plan((32, 32, 32), encoder="plain", num_levels=4)
    values = topology.to_dict()
    for name in ("kernels", *NEW_FIELDS):
        del values[name]
    assert validated(Topology, values) == topology  # defaults mean what earlier files mean
    assert (topology.norm_eps, topology.negative_slope) == (1e-5, 0.01)
    assert not topology.upsampling_bias
    assert units_of(topology) == ([2] * 4, [2] * 3)
    assert kernels_of(topology) == [CUBE] * 4


@pytest.mark.parametrize("encoder", ["plain", "residual"])
def test_options_and_units_are_those_that_are_named(encoder):
    options = {"encoder": encoder, "norm": "instance", "deep_supervision": True}
    topology = plan((32, 32, 32), num_levels=4, **options)
    assert topology.to_dict().items() >= options.items()
    topology = replace(topology, **NEW_FIELDS)
    assert units_of(topology) == ([1, 3, 2, 1], [1, 3, 2])
    assert plan((32, 32, 32), norm="group").norm == "group"
    # A residual encoder has nnU-Net's numbers of units for any number of levels.
    values = {**plan((32, 32, 32), encoder="residual").to_dict(), "channels": [4] * 16}
    topology = validated(Topology, {**values, "strides": [[1, 1, 1]] * 16})
    assert units_of(topology) == ([1, 3, 4, *[6] * 13], [1] * 15)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"channels": []}, "names channels of 0 levels but 4 strides"),
        ({"channels": [4, -8, 4]}, "channels.1 must be greater than 0, but is -8"),
        ({"channels": [4] * 10**6}, "channels has 1,000,000 entries, and may have 16"),
        ({"strides": [[1, 1, 1]]}, "channels of 4 levels but 1 strides"),
        ({"strides": [[2, 2, 2]] * 4}, "the first must be (1, 1, 1)"),
        ({"kernels": [[3, 3, 3]]}, "channels of 4 levels but 1 kernels"),
        ({"kernels": [[3, 3, 2]] * 4}, "kernels.0.2 must be 1 or 3, but is 2"),
        ({"kernels": [[3, 3, 3]] * 3 + [[3, 1, 3]]}, "skip voxels of kernels (3, 1, 3)"),
        ({"units": [2, 2]}, "channels of 4 levels but 2 units"),
        ({"units": [2, 2, 2, 65]}, "units.3 must be at most 64, but is 65"),
        ({"decoder_units": [2] * 4}, "channels of 4 levels but 4 decoder_units, not 3"),
        ({"norm_eps": float("nan")}, "norm_eps must be a finite number, but is nan"),
        ({"negative_slope": 1.5}, "negative_slope must be at most 1, but is 1.5"),
        (
            {"upsampling_bias": True, "norm": "group"},
            "an upsampling_bias with norm group; it needs",
        ),
        ({"norm": "layer"}, "norm must be 'instance', 'group' or 'batch', but is 'layer'"),
        ({"deep_supervision": 1}, "deep_supervision must be a valid boolean, but is 1"),
        ({"\x1b[2J": 1}, r"\x1b[2J is unknown"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_values_of_something_else_are_refused(damage, message):
    values = plan((32, 32, 32)).to_dict()
    with pytest.raises(ValueError) as caught:
        validated(Topology, {**values, **damage})
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400
    del values["strides"]
    with pytest.raises(ValueError, match="strides is missing"):
        validated(Topology, values)
