"""The planes through the largest structure, compared with SciPy and simple counts."""

import numpy as np
from scipy import ndimage

from tests.resident import resident_kib
from unet3d.images.scratch import Scratch
from unet3d.reports.planes import Structure, plane_of, survey, visible_box

SHAPE = (20, 30, 12)
A, B = Structure(name="a", values=(3,)), Structure(name="b", values=(7,))


def made():
    """Return two boxes: value 3 with 4x6x5 voxels, value 7 with 2x2x2 voxels."""
    labels = np.zeros(SHAPE, np.uint8)
    labels[5:9, 10:16, 3:8] = 3
    labels[15:17, 20:22, 1:3] = 7
    return labels


def test_counts_and_box_are_those_of_the_whole_array():
    labels = np.random.default_rng(0).integers(0, 6, (9, 8, 7)).astype(np.int32)
    labels[:2] = labels[:, 6:] = 0
    labels[0], labels[-1, 0, 0] = 70_000, -1  # values without a name, which count nowhere
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


def test_of_equal_planes_the_middle_one_is_taken_and_regions_count_all_their_values(tmp_path):
    whole = Structure(name="whole", values=(3, 7))
    found = survey(made(), [A, whole])
    assert found.num_voxels == (120, 128) and found.largest == 1
    np.save(tmp_path / "labels.npy", made())
    mapped = np.load(tmp_path / "labels.npy", mmap_mode="r")
    assert survey(mapped, [A, B]).position == survey(made(), [A, B]).position == (7, 13, 5)


def test_few_pages_of_a_mapped_map_are_in_memory(tmp_path):
    labels = Scratch(tmp_path).empty((300, 256, 128), "u1", "labels", "F")
    labels[...] = np.arange(128) % 5
    survey(labels, [A])
    for axis in range(3):
        np.testing.assert_array_equal(
            plane_of(labels, axis, 7), np.moveaxis(np.asarray(labels), axis, 0)[7]
        )
        plane_of(labels, axis, 8)
        assert resident_kib(tmp_path) < 1000


def test_nothing_is_found_in_the_middle():
    found = survey(np.zeros((5, 4, 1), np.uint8), [A, B])
    assert (found.largest, found.box, found.num_voxels) == (None, None, (0, 0))
    assert found.position == (2, 2, 0)
    assert visible_box([found], (5, 4, 1)) == ((0, 5), (0, 4), (0, 1))


def test_small_structures_are_shown_with_a_third_of_the_volume_and_all_of_several_maps():
    found = survey(made(), [B])
    shown = visible_box([found], SHAPE)
    assert [last - first for first, last in shown] == [7, 10, 4]
    for (first, last), (begin, end) in zip(shown, found.box, strict=True):
        assert first <= begin < end <= last
    for axis, (first, last) in enumerate(visible_box([survey(made(), [A]), found], SHAPE)):
        filled = np.flatnonzero((made() > 0).any(axis=tuple({0, 1, 2} - {axis})))
        assert 0 <= first <= filled[0] and filled[-1] < last <= SHAPE[axis]
