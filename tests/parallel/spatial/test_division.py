"""How volumes are divided into slabs."""

import pytest

from unet3d.errors import DeviceError
from unet3d.model import Topology
from unet3d.parallel.spatial.division import SlabRule, divide

STANDARD = Topology(
    in_channels=1,
    num_classes=3,
    channels=(32, 64, 128, 256, 320, 320),
    strides=((1, 1, 1), *[(2, 2, 2)] * 5),
)


def rule_of(num_shards, **options):
    return SlabRule(topology=Topology(**{**vars(STANDARD), **options}), num_shards=num_shards)


@pytest.mark.parametrize("num_divided", [1, 2, 3, 4])
def test_slabs_cover_every_level_once(num_divided):
    for num_shards in (1, 2, 3, 4, 5, 7):
        division = divide(64, num_shards, (1, 2, 4, 8), num_divided)
        for level in range(num_divided):
            planes = [plane for shard in range(num_shards) for plane in division.slab(shard, level)]
            assert planes == list(range(64 // 2**level)) == list(range(division.planes(level)))
        sizes = [len(division.slab(shard)) for shard in range(num_shards)]
        assert max(sizes) - min(sizes) <= 2 ** (num_divided - 1)
        assert division.most_planes() == max(sizes)


@pytest.mark.parametrize(
    ("size", "num_shards", "num_divided"),
    [
        ((256, 256, 256), 2, 4),  # 320 x 16^3 is 1.3 million elements
        ((32, 32, 32), 2, 1),  # small volumes are divided, too
        ((256, 256, 256), 20, 4),
        ((256, 256, 256), 40, 3),  # level 3 has 32 planes
    ],
)
def test_low_levels_stay_whole(size, num_shards, num_divided):
    assert rule_of(num_shards).divide(size).num_divided == num_divided


def test_levels_with_a_head_are_divided():
    assert rule_of(4, deep_supervision=True).divide((32, 32, 32)).num_divided == 4
    with pytest.raises(DeviceError, match="4 planes.* at the lowest level with a head.*at most 4"):
        rule_of(5, deep_supervision=True).divide((32, 32, 32))


def test_too_few_planes_name_the_most_devices():
    with pytest.raises(DeviceError, match="32x64x64 voxels has 32 planes.*33 devices.*at most 32"):
        rule_of(33).divide((32, 64, 64))
    assert rule_of(32).divide((32, 64, 64)).bounds == tuple(range(33))
