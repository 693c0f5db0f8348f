"""The voxels on which patches are centred, compared with SciPy's components."""

from collections import Counter

import numpy as np
import pytest
from scipy import ndimage

from unet3d.preparation import foreground as foreground_module
from unet3d.preparation.foreground import foreground_voxels


def components_of(found, index):
    """Return the voxels of each component of a class."""
    components = np.split(found.voxels, found.ends)[:-1]
    first = sum(found.num_components[:index])
    return components[first : first + found.num_components[index]]


def test_voxels_are_those_of_each_component():
    label = np.random.default_rng(0).choice(5, (20, 18, 22), p=[0.9, 0.04, 0.03, 0.0, 0.03])
    found = foreground_voxels(label.astype(np.uint8), 4)
    assert components_of(found, 0) == components_of(found, 3) == []
    for value in (1, 2):
        numbered, count = ndimage.label(label == value, structure=np.ones((3, 3, 3)))
        expected = {tuple(np.flatnonzero(numbered == n)) for n in range(1, count + 1)}
        components = components_of(found, value)
        assert {tuple(voxels) for voxels in components} == expected
        assert len(components) == count == found.num_components[value]


@pytest.mark.parametrize(("size", "dtype"), [(255, np.uint8), (256, np.uint16), (2**16, np.uint32)])
def test_they_are_of_the_smallest_type_that_holds_them(size, dtype):
    label = np.zeros((1, 1, size), np.uint8)
    label[0, 0, -1] = 1
    found = foreground_voxels(label, 2)
    assert found.voxels.dtype == dtype and found.voxels.tolist() == [size - 1]


def test_of_a_large_component_its_share_is_kept(monkeypatch):
    monkeypatch.setattr(foreground_module, "MAX_FOREGROUND_VOXELS", 30)
    label = np.zeros((30, 30, 30), np.uint8)
    label[:10] = 1  # 9,000 voxels
    label[20, :2, :2] = 1  # 4 voxels
    label[25, 15, 10:22] = 1  # 12 voxels, 10 of which are kept
    sizes = sorted(len(voxels) for voxels in components_of(foreground_voxels(label, 2), 1))
    assert sizes == [4, 10, 10]
    specks = np.zeros((30, 30, 30), np.uint8)
    specks[::2, ::2, ::2] = 1  # 3,375 components of one voxel
    kept, again = (components_of(foreground_voxels(specks, 2), 1) for _ in range(2))
    assert [len(voxels) for voxels in kept] == [1] * 30
    assert (specks.flat[np.concatenate(kept)] == 1).all()
    np.testing.assert_array_equal(np.concatenate(kept), np.concatenate(again))


def test_a_small_lesion_is_drawn_as_often_as_a_large_one():
    label = np.zeros((30, 30, 30), np.uint8)
    label[:10] = 1  # 9,000 voxels of the class
    label[20, 5, 5] = 1
    label[25, 15, 15:20] = 1
    label[15] = 3  # another class, of one component
    found = foreground_voxels(label, 4)
    rng = np.random.default_rng(0)
    drawn = [found.draw(rng) for _ in range(6000)]
    planes = Counter(voxel // 900 for voxel in drawn if voxel is not None)
    assert 2850 < planes[15] < 3150, "half of them, with a standard deviation of 39"
    large = sum(planes[plane] for plane in range(10))
    for count in (large, planes[20], planes[25]):
        assert 900 < count < 1100, "a sixth of them, with a standard deviation of 29"


def test_nothing_is_drawn_of_the_background():
    found = foreground_voxels(np.zeros((4, 4, 4), np.uint8), 3)
    assert found.num_components == (0, 0, 0)
    assert found.draw(np.random.default_rng(0)) is None
    other = np.full((4, 4, 4), 3, np.uint8)  # no class of a data set with classes 0 to 2
    assert foreground_voxels(other, 3).draw(np.random.default_rng(0)) is None
