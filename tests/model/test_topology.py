import math

import pytest

from unet3d.config import ModelSettings
from unet3d.errors import ConfigError
from unet3d.model import Topology, plan_topology
from unet3d.plain_data import validated

ISOTROPIC = (1.0, 1.0, 1.0)


def plan(
    size: tuple[int, int, int],
    spacing_mm: tuple[float, float, float] = ISOTROPIC,
    **options: object,
) -> Topology:
    return plan_topology(ModelSettings(**options), size, spacing_mm, 1, 2)


def test_an_isotropic_patch_is_halved_evenly_up_to_six_levels() -> None:
    topology = plan((128, 128, 128))
    assert topology.strides == ((1, 1, 1), *[(2, 2, 2)] * 5)
    assert topology.channels == (32, 64, 128, 256, 320, 320)
    assert topology.num_levels == 6
    assert topology.total_stride == (32, 32, 32)
    assert plan((1024, 1024, 1024)).num_levels == 6


def test_thick_slices_are_halved_within_until_voxels_are_about_cubes() -> None:
    # 1 x 1 x 5 mm, 2 x 2 x 5, 4 x 4 x 5: only then is 5 at most twice the finest.
    topology = plan((128, 128, 32), (1.0, 1.0, 5.0))
    assert topology.strides[:4] == ((1, 1, 1), (2, 2, 1), (2, 2, 1), (2, 2, 2))


def test_a_spacing_of_exactly_twice_the_finest_is_halved() -> None:
    assert plan((64, 64, 32), (1.0, 1.0, 2.0)).strides[1] == (2, 2, 2)
    assert plan((64, 64, 32), (1.0, 1.0, 2.01)).strides[1] == (2, 2, 1)


@pytest.mark.parametrize(
    "size", [(64, 64, 6), (40, 56, 40), (31, 40, 24), (200, 9, 30), (64, 1, 7)]
)
def test_no_axis_falls_below_four_voxels(size: tuple[int, int, int]) -> None:
    topology = plan(size)
    voxels = size
    for stride in topology.strides[1:]:
        assert max(stride) == 2
        lower = tuple(math.ceil(n / step) for n, step in zip(voxels, stride, strict=True))
        for n, below, step in zip(voxels, lower, stride, strict=True):
            assert step == 1 or below >= 4, (n, below)
        voxels = lower
    if topology.num_levels < 6:  # nothing was left to halve
        assert all(math.ceil(n / 2) < 4 for n in voxels)


def test_an_axis_that_is_used_up_does_not_hold_back_the_others() -> None:
    # Z is the finest, but cannot be halved; X and Y are judged among themselves.
    topology = plan((64, 64, 6), (3.0, 3.0, 1.0))
    assert {stride[2] for stride in topology.strides} == {1}
    assert topology.strides[-1] == (2, 2, 1)
    assert topology.num_levels == 5


def test_levels_and_channels_can_be_chosen() -> None:
    assert plan((64, 64, 64), num_levels=3, base_channels=10, max_channels=25).channels == (
        10,
        20,
        25,
    )
    chosen = plan((64, 64, 64), channels=(8, 12, 20))
    assert chosen.channels == (8, 12, 20)
    assert len(chosen.strides) == 3
    assert plan((1024, 1024, 1024), num_levels=8).num_levels == 8


@pytest.mark.parametrize("options", [{"num_levels": 4}, {"channels": (4, 8, 16, 32)}], ids=str)
def test_more_levels_than_the_patch_gives_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"4 levels but a patch of 16x16x10 voxels gives 3"):
        plan((16, 16, 10), **options)


@pytest.mark.parametrize("options", [{}, {"num_levels": 2}], ids=str)
def test_a_patch_that_cannot_be_halved_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(
        ConfigError, match=r"2 levels but a patch of 6x6x5 voxels gives 1, .*larger"
    ):
        plan((6, 6, 5), **options)


def test_options_are_carried_over() -> None:
    topology = plan((32, 32, 32), encoder="residual", norm="group", deep_supervision=True)
    assert (topology.encoder, topology.norm, topology.deep_supervision) == (
        "residual",
        "group",
        True,
    )


def test_round_trip_through_plain_values() -> None:
    topology = plan((128, 128, 32), (1.0, 1.0, 5.0), encoder="residual")
    values = topology.to_dict()
    values = {**values, "strides": [list(stride) for stride in values["strides"]]}
    assert validated(Topology, values) == topology


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"channels": 3}, "channels must be a valid tuple, but is 3"),
        ({"channels": []}, "channels Tuple should have at least 1 item"),
        ({"channels": [4, -8, 4]}, "channels.1 must be greater than 0, but is -8"),
        ({"channels": [4, 8.0, 4]}, "channels.1 must be a valid integer, but is 8.0"),
        ({"channels": [4, 8, True]}, "channels.2 must be a valid integer, but is True"),
        ({"channels": ["4", 8, 8]}, "channels.0 must be a valid integer, but is '4'"),
        ({"channels": [4, 10**30, 4]}, "channels.1 must be at most 65536, but is 1" + 30 * "0"),
        ({"channels": [4] * 10**6}, "channels has 1,000,000 entries, and may have 8"),
        ({"strides": [[1, 1]]}, "strides.0.2 is missing"),
        ({"strides": [1, 2]}, "strides.0 must be a valid tuple, but is 1"),
        ({"strides": [[1, 1, 1]]}, "channels of 4 levels but 1 strides"),
        ({"strides": [[2, 2, 2]] * 4}, "the first must be (1, 1, 1)"),
        ({"strides": [[1, 1, 1], [2, 0, 2]]}, "strides.1.1 must be at least 1, but is 0"),
        ({"norm": "layer"}, "norm must be 'instance', 'group' or 'batch', but is 'layer'"),
        ({"deep_supervision": 1}, "deep_supervision must be a valid boolean, but is 1"),
        ({"another": 1}, "another is unknown"),
        ({"\x1b[2J": 1}, r"\x1b[2J is unknown"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_values_of_something_else_are_refused(damage: dict[str, object], message: str) -> None:
    values = plan((32, 32, 32)).to_dict()
    with pytest.raises(ValueError) as caught:
        validated(Topology, {**values, **damage})
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400
    del values["strides"]
    with pytest.raises(ValueError, match="strides is missing"):
        validated(Topology, values)
