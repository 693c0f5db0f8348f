"""The planes through the largest structure, against SciPy and plain counts."""

import numpy as np
import pytest
from scipy import ndimage

from unet3d.reports.planes import Structure, cut, survey, visible_box

A, B = Structure(name="a", values=(3,)), Structure(name="b", values=(7,))


def made(shape: tuple[int, int, int] = (20, 30, 12), dtype: type = np.uint8) -> np.ndarray:
    """Return two boxes: of 3 with 4x6x5 voxels, of 7 with 2x2x2."""
    labels = np.zeros(shape, dtype)
    labels[5:9, 10:16, 3:8] = 3
    labels[15:17, 20:22, 1:3] = 7
    return labels


def test_counts_and_box_are_those_of_the_whole_array():
    labels = np.random.default_rng(0).integers(0, 6, (9, 8, 7)).astype(np.int16)
    labels[:2] = labels[:, 6:] = 0
    structures = [Structure(name=str(value), values=(value,)) for value in (1, 2, 5, 9)]
    found = survey(labels, structures)
    assert found.num_voxels == tuple((labels == value).sum() for value in (1, 2, 5, 9))
    (expected,) = ndimage.find_objects(np.isin(labels, (1, 2, 5)).astype(int))
    assert found.box == tuple((one.start, one.stop) for one in expected)


def test_each_plane_has_the_largest_area_of_the_largest_structure():
    labels = made()
    labels[7, 10:18, 3:8] = 3  # the largest area across X
    labels[5:10, 12, 3:8] = 3  # across Y
    labels[5:9, 9:17, 6] = 3  # across Z
    found = survey(labels, [B, A])
    areas = [(labels == 3).sum(axis=others) for others in ((1, 2), (0, 2), (0, 1))]
    assert found.largest == 1
    assert found.position == tuple(int(area.argmax()) for area in areas) == (7, 12, 6)


def test_of_equal_planes_the_middle_one_is_taken():
    assert survey(made(), [A, B]).position == (7, 13, 5)


def test_regions_count_all_their_values_and_may_overlap():
    whole = Structure(name="whole", values=(3, 7))
    found = survey(made(), [A, whole])
    assert found.num_voxels == (120, 128) and found.largest == 1


def test_what_is_not_named_counts_nowhere():
    labels = made(dtype=np.int32)
    labels[0] = 70_000
    labels[-1] = -1
    found = survey(labels, [B])
    assert found.num_voxels == (8,)
    assert found.box == ((15, 17), (20, 22), (1, 3))


def test_nothing_is_found_in_the_middle():
    found = survey(np.zeros((5, 4, 1), np.uint8), [A, B])
    assert (found.largest, found.box, found.num_voxels) == (None, None, (0, 0))
    assert found.position == (2, 2, 0)
    assert visible_box([found], (5, 4, 1)) == ((0, 5), (0, 4), (0, 1))


def test_a_file_on_the_disk_is_read_plane_by_plane(tmp_path):
    mapped = np.lib.format.open_memmap(tmp_path / "labels.npy", "w+", np.uint8, (20, 30, 12))
    mapped[:] = made()
    assert survey(mapped, [A, B]) == survey(made(), [A, B])


def test_small_structures_are_shown_with_a_third_of_the_volume():
    found = survey(made(), [B])
    shown = visible_box([found], (20, 30, 12))
    assert [last - first for first, last in shown] == [7, 10, 4]
    for (first, last), (begin, end) in zip(shown, found.box or (), strict=True):
        assert first <= begin < end <= last


def test_everything_is_shown_of_several_maps():
    shape = (20, 30, 12)
    shown = visible_box([survey(made(), [A]), survey(made(), [B])], shape)
    for axis, (first, last) in enumerate(shown):
        filled = np.flatnonzero((made() > 0).any(axis=tuple({0, 1, 2} - {axis})))
        assert 0 <= first <= filled[0] and filled[-1] < last <= shape[axis]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_cut_is_numpys(axis):
    labels = made()
    np.testing.assert_array_equal(cut(labels, axis, 2), labels.take(2, axis))
