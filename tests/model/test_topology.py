import math
from dataclasses import replace

import numpy as np
import pytest

from unet3d.config import ModelSettings
from unet3d.errors import ConfigError
from unet3d.inputs.plain_data import validated
from unet3d.model import Topology, plan_topology

ISOTROPIC = (1.0, 1.0, 1.0)


def plan(
    size: tuple[int, int, int],
    spacing_mm: tuple[float, float, float] = ISOTROPIC,
    **options: object,
) -> Topology:
    return plan_topology(
        ModelSettings(**{"deep_supervision": False, **options}), size, spacing_mm, 1, 2
    )


def test_an_isotropic_patch_is_halved_evenly_up_to_six_levels():
    topology = plan((128, 128, 128))
    assert topology.strides == ((1, 1, 1), *[(2, 2, 2)] * 5)
    assert topology.channels == (32, 64, 128, 256, 320, 320)
    assert topology.num_levels == 6
    assert topology.total_stride == (32, 32, 32)
    assert plan((1024, 1024, 1024)).num_levels == 6


def test_thick_slices_are_halved_within_until_voxels_are_about_cubes():
    # 1 x 1 x 5 mm, 2 x 2 x 5, 4 x 4 x 5: only then is 5 at most twice the finest.
    topology = plan((128, 128, 32), (1.0, 1.0, 5.0))
    assert topology.strides[:4] == ((1, 1, 1), (2, 2, 1), (2, 2, 1), (2, 2, 2))


def test_a_spacing_of_exactly_twice_the_finest_is_halved():
    assert plan((64, 64, 32), (1.0, 1.0, 2.0)).strides[1] == (2, 2, 2)
    assert plan((64, 64, 32), (1.0, 1.0, 2.01)).strides[1] == (2, 2, 1)


@pytest.mark.parametrize(
    "size", [(64, 64, 6), (40, 56, 40), (31, 40, 24), (200, 9, 30), (64, 1, 7)]
)
def test_no_axis_falls_below_four_voxels(size):
    topology = plan(size)
    voxels = size
    for stride in topology.strides[1:]:
        assert max(stride) == 2
        lower = tuple(math.ceil(n / step) for n, step in zip(voxels, stride, strict=True))
        for n, below, step in zip(voxels, lower, stride, strict=True):
            assert step == 1 or n >= 8, (n, below)
        voxels = lower
    if topology.num_levels < 6:  # nothing was left to halve
        assert all(n < 8 for n in voxels)


def test_seven_voxels_are_not_padded_to_eight():
    """Of the median hippocampus, 35x50x36 voxels, nnU-Net's patch is 40x56x40."""
    topology = plan((35, 50, 36))
    assert topology.total_stride == (8, 8, 8)
    assert plan((40, 56, 40)).strides == topology.strides  # the padded patch has the same network


def test_levels_channels_and_strides_can_be_chosen():
    by_number = plan((64, 64, 64), num_levels=3, base_channels=10, max_channels=25)
    assert by_number.channels == (10, 20, 25)
    chosen = plan((64, 64, 64), channels=(8, 12, 20))
    assert chosen.channels == (8, 12, 20)
    assert len(chosen.strides) == 3
    assert plan((1024, 1024, 1024), num_levels=8).num_levels == 8
    topology = plan((64, 64, 64), (1.0, 1.0, 5.0), strides=((1, 2, 2), (2, 2, 1)))
    assert topology.strides == ((1, 1, 1), (1, 2, 2), (2, 2, 1))
    assert topology.channels == (32, 64, 128)


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        ((16, 16, 10), {"num_levels": 4}, "4 levels but a patch of 16x16x10 voxels gives 3"),
        ((16, 16, 10), {"channels": (4,) * 4}, "4 levels but a patch of 16x16x10 voxels gives 3"),
        ((6, 6, 5), {}, "2 levels but a patch of 6x6x5 voxels gives 1, .*larger"),
        ((6, 6, 5), {"num_levels": 2}, "2 levels but a patch of 6x6x5 voxels gives 1, .*larger"),
        ((4, 3, 2), {"strides": ((2, 2, 2),) * 2}, "strides are 4x4x4 in all, which leaves one"),
    ],
)
def test_patches_that_are_too_small_are_refused(size, options, message):
    with pytest.raises(ConfigError, match=message):
        plan(size, **options)


def kernels_of(topology: Topology) -> list[tuple[int, int, int]]:
    return [topology.kernel(level) for level in range(topology.num_levels)]


CUBE = (3, 3, 3)


def nnunet_kernels(
    spacing_mm: tuple[float, float, float], strides: tuple[tuple[int, int, int], ...]
) -> list[tuple[int, ...]]:
    """nnU-Net's rule: 3 once a spacing is below twice the finest; the lowest level has 3x3x3."""
    kernels, wide = [], np.zeros(3, bool)
    for level in range(len(strides) - 1):
        spacing = np.array(spacing_mm) * np.prod(strides[: level + 1], axis=0)
        wide |= spacing / spacing.min() < 2
        kernels.append(tuple(np.where(wide, 3, 1).tolist()))
    return [*kernels, CUBE]


def test_anisotropic_kernels_are_those_of_nnunet():
    """Along thick slices one voxel, until voxels are about cubes; twice as thick is thick."""
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
    # Of exactly twice the finest it is halved at once, so that no voxel is skipped.
    for thickness, number in ((2.0, 1), (5.0, 2)):
        topology = plan((128, 128, 128), (1.0, 1.0, thickness), kernels="anisotropic")
        assert kernels_of(topology) == [(3, 3, 1)] * number + [CUBE] * (6 - number)


def test_an_axis_that_is_used_up_does_not_hold_back_the_others():
    # Z is the finest, but cannot be halved; X and Y, three times as coarse, are halved all the
    # same, judged among themselves, and no stride skips voxels.
    topology = plan((64, 64, 6), (3.0, 3.0, 1.0), kernels="anisotropic")
    assert topology.strides == ((1, 1, 1), *[(2, 2, 1)] * 4)
    assert kernels_of(topology) == [(1, 1, 3), *[CUBE] * 4]


def test_a_network_of_few_levels_sees_across_slices_at_the_lowest():
    topology = plan((64, 64, 32), (1.0, 1.0, 20.0), kernels="anisotropic", num_levels=2)
    assert kernels_of(topology) == [(3, 3, 1), CUBE]


def test_round_trip_through_plain_values():
    topology = plan((128, 128, 32), (1.0, 1.0, 5.0), encoder="residual", kernels="anisotropic")
    values = topology.to_dict()
    values = {**values, "strides": [list(stride) for stride in values["strides"]]}
    assert validated(Topology, values) == topology


NEW_FIELDS = {
    "units": (1, 3, 2, 1),
    "decoder_units": (1, 3, 2),
    "upsampling_bias": True,
    "norm_eps": 1e-3,
    "negative_slope": 0.0,
}


def units_of(topology: Topology) -> tuple[list[int], list[int]]:
    levels = range(topology.num_levels)
    of_decoder = [topology.num_decoder_units(level) for level in levels[:-1]]
    return [topology.num_units(level) for level in levels], of_decoder


def test_what_earlier_files_lack_is_what_they_meant():
    topology = plan((32, 32, 32), encoder="plain", num_levels=4)
    values = topology.to_dict()
    for name in ("kernels", *NEW_FIELDS):
        del values[name]
    assert validated(Topology, values) == topology
    assert (topology.norm_eps, topology.negative_slope) == (1e-5, 0.01)
    assert not topology.upsampling_bias
    assert units_of(topology) == ([2] * 4, [2] * 3)
    assert kernels_of(topology) == [CUBE] * 4


def test_a_residual_encoder_has_nnunets_units_at_any_number_of_levels():
    values = {**plan((32, 32, 32), encoder="residual").to_dict(), "channels": [4] * 16}
    topology = validated(Topology, {**values, "strides": [[1, 1, 1]] * 16})
    assert units_of(topology) == ([1, 3, 4, *[6] * 13], [1] * 15)


@pytest.mark.parametrize("encoder", ["plain", "residual"])
def test_options_and_units_are_those_that_are_named(encoder):
    options = {"encoder": encoder, "norm": "instance", "deep_supervision": True, **NEW_FIELDS}
    topology = plan((32, 32, 32), num_levels=4, **options)
    assert topology.to_dict().items() >= options.items()
    assert units_of(topology) == ([1, 3, 2, 1], [1, 3, 2])
    assert plan((32, 32, 32), norm="group").norm == "group"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"channels": 3}, "channels must be a valid tuple, but is 3"),
        ({"channels": []}, "names channels of 0 levels but 4 strides"),
        ({"channels": [4, -8, 4]}, "channels.1 must be greater than 0, but is -8"),
        ({"channels": [4, 8.0, 4]}, "channels.1 must be a valid integer, but is 8.0"),
        ({"channels": ["4", 8, 8]}, "channels.0 must be a valid integer, but is '4'"),
        ({"channels": [4, 10**30, 4]}, "channels.1 must be at most 65536, but is 1" + 30 * "0"),
        ({"channels": [4] * 10**6}, "channels has 1,000,000 entries, and may have 16"),
        ({"strides": [[1, 1]]}, "strides.0.2 is missing"),
        ({"strides": [[1, 1, 1]]}, "channels of 4 levels but 1 strides"),
        ({"strides": [[2, 2, 2]] * 4}, "the first must be (1, 1, 1)"),
        ({"strides": [[1, 1, 1], [2, 0, 2]]}, "strides.1.1 must be at least 1, but is 0"),
        ({"kernels": [[3, 3, 3]]}, "channels of 4 levels but 1 kernels"),
        ({"kernels": [[3, 3, 2]] * 4}, "kernels.0.2 must be 1 or 3, but is 2"),
        ({"kernels": [[3, 3, 3]] * 3 + [[3, 1, 3]]}, "skip voxels of kernels (3, 1, 3)"),
        ({"units": [2, 2]}, "channels of 4 levels but 2 units"),
        ({"units": [2, 2, 0, 2]}, "units.2 must be at least 1, but is 0"),
        ({"units": [2, 2, 2, 65]}, "units.3 must be at most 64, but is 65"),
        ({"units": [1] * 10**6}, "units has 1,000,000 entries, and may have 16"),
        ({"units": [2, 2, 2, 2.0]}, "units.3 must be a valid integer, but is 2.0"),
        ({"decoder_units": [2] * 4}, "channels of 4 levels but 4 decoder_units, not 3"),
        ({"decoder_units": [2, 0, 2]}, "decoder_units.1 must be at least 1, but is 0"),
        ({"norm_eps": 0.0}, "norm_eps must be greater than 0, but is 0.0"),
        ({"norm_eps": 2.0}, "norm_eps must be at most 1, but is 2.0"),
        ({"norm_eps": float("nan")}, "norm_eps must be a finite number, but is nan"),
        ({"negative_slope": -0.01}, "negative_slope must be at least 0, but is -0.01"),
        ({"negative_slope": 1.5}, "negative_slope must be at most 1, but is 1.5"),
        ({"negative_slope": True}, "negative_slope must be a valid number, but is True"),
        ({"upsampling_bias": 1}, "upsampling_bias must be a valid boolean, but is 1"),
        (
            {"upsampling_bias": True, "norm": "group"},
            "has an upsampling_bias with norm group; it is known with instance only",
        ),
        ({"norm": "layer"}, "norm must be 'instance', 'group' or 'batch', but is 'layer'"),
        ({"deep_supervision": 1}, "deep_supervision must be a valid boolean, but is 1"),
        ({"another": 1}, "another is unknown"),
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
