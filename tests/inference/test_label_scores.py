import json
import subprocess
import sys

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.metrics import compute_dice
from scipy.spatial.transform import Rotation

from tests.images.orientations import turn_to
from tests.inference.distances import cube, hd95_by_hand, nearest_mm, tilted
from tests.products import each_value
from unet3d.config import Reading
from unet3d.datasets.labels import EVERY_VALUE, ScoredLabels, values_of
from unet3d.errors import VolumeError
from unet3d.images import image
from unet3d.images.image import image_of
from unet3d.images.labels import read_label
from unet3d.images.nifti import open_array
from unet3d.inference import label_scores
from unet3d.inference.evaluation import evaluate
from unet3d.inference.label_scores import (
    LabelScore,
    dice_per_class,
    open_pair,
    overlaps_in,
    read_pair,
    score_labels,
    surface_dice,
    surface_distances,
)
from unet3d.memory import host

AFFINE = np.diag([1.0, 1.0, 2.0, 1.0])


def score_maps(prediction, label, affine, scored, tolerance_mm=1.0):
    pair = image_of([open_array(array, affine) for array in (label, prediction)])
    return score_labels(pair, overlaps_in(pair, scored), scored, tolerance_mm)


def test_dice_per_class_is_twice_the_overlap_over_the_sum():
    prediction = torch.tensor([0, 0, 1, 1, 1, 2]).reshape(1, 2, 3)
    target = torch.tensor([0, 1, 1, 1, 0, 3]).reshape(1, 2, 3)
    # background: 1 of 2 and 2; class 1: 2 of 3 and 3; 2 and 3: no overlap; 4: nowhere
    expected = [0.5, 2 / 3, 0.0, 0.0, None]
    assert dice_per_class(prediction, target, 5) == pytest.approx(expected)
    masks = torch.from_numpy(np.random.default_rng(0).random((2, 1, 1, 9, 10, 11)) < 0.4)
    assert dice_per_class(*masks, 2)[1] == compute_dice(*masks).item()
    for dtype in (np.uint8, np.uint16, np.int64):
        arrays = prediction.numpy().astype(dtype), target.numpy().astype(dtype)
        arrays[0].setflags(write=False)  # like a memory-mapped label map
        assert dice_per_class(*arrays, 5) == pytest.approx(expected)


def test_a_shift_has_the_scores_of_the_hand():
    # A cube of 6 x 6 x 6 voxels, shifted by one voxel along Z, which is 2 mm.
    prediction, label = cube((2, 2, 2), (8, 8, 8)), cube((2, 2, 3), (8, 8, 9))
    (score,) = score_maps(prediction, label, AFFINE, EVERY_VALUE, tolerance_mm=0.5).values()
    assert score.dice == pytest.approx(5 / 6)
    assert score.hd95_mm == pytest.approx(2.0)
    # Of the 152 surface voxels of a cube, the 36 of one face lie 2 mm off, and the inner 16 of the
    # opposite face lie inside the other cube. Of these, 12 are 1 mm from its sides.
    assert score.nsd == pytest.approx(1 - (36 + 16) / 152)
    near = score_maps(prediction, label, AFFINE, EVERY_VALUE, tolerance_mm=1.0)[1]
    assert near.nsd == pytest.approx(1 - (36 + 4) / 152)
    wide = score_maps(prediction, label, AFFINE, EVERY_VALUE, tolerance_mm=2.0)[1]
    assert wide.nsd == 1.0
    assert (score.prediction_ml, score.label_ml) == pytest.approx((0.432, 0.432))


def test_a_label_that_one_side_lacks_has_no_distance():
    empty = np.zeros((20, 20, 20), np.uint8)
    for pair in ((cube((2, 2, 2), (8, 8, 8)), empty), (empty, cube((2, 2, 2), (8, 8, 8)))):
        (score,) = score_maps(*pair, AFFINE, EVERY_VALUE).values()
        assert (score.dice, score.hd95_mm, score.nsd) == (0.0, None, 0.0)
    assert score_maps(empty, empty, AFFINE, EVERY_VALUE) == {}


def test_ignored_voxels_count_nowhere():
    """The scores equal those of maps from which the ignored part was cut off."""
    rng = np.random.default_rng(0)
    prediction, label = (rng.integers(0, 3, (12, 12, 12)).astype(np.uint8) for _ in "pl")
    ignored = np.zeros_like(label, dtype=bool)
    ignored[:, :, 7:] = True
    marked = np.where(ignored, 9, label).astype(np.uint8)
    before = prediction.copy(), marked.copy()
    scored = ScoredLabels(ignore=9)
    ours = score_maps(prediction, marked, AFFINE, scored)
    cut = score_maps(prediction[:, :, :7], label[:, :, :7], AFFINE, EVERY_VALUE)
    assert ours == cut and set(ours) == {1, 2}
    assert np.array_equal(prediction, before[0]) and np.array_equal(marked, before[1])
    # Without the option it is a label like any other.
    assert set(score_maps(prediction, marked, AFFINE, EVERY_VALUE)) == {1, 2, 9}


def test_a_region_is_scored_as_the_union_of_its_values():
    rng = np.random.default_rng(1)
    prediction, label = (rng.integers(0, 5, (9, 9, 9)).astype(np.uint8) for _ in "pl")
    scored = ScoredLabels(names={(1, 2, 3): "whole", (2, 3): "core", 3: "enhancing"})
    ours = score_maps(prediction, label, AFFINE, scored)
    assert list(ours) == [(1, 2, 3), (2, 3), 3, 4]  # 4 is in no region
    for region in ((1, 2, 3), (2, 3)):
        union = [np.isin(array, region).astype(np.uint8) for array in (prediction, label)]
        assert ours[region] == score_maps(*union, AFFINE, EVERY_VALUE)[1]
    assert isinstance(ours[4], LabelScore)


# Surfaces


SPACING_MM = (0.5, 1.0, 3.0)


def masks(density, shape=(9, 10, 11)):
    rng = np.random.default_rng(0)
    return [rng.random(shape) < density for _ in range(2)]


@pytest.mark.parametrize("density", [0.01, 0.2, 0.6, 0.9])
def test_scores_are_those_of_all_distances_between_the_places_of_surface_voxels(density):
    affine = tilted(20.0, SPACING_MM)
    pair = masks(density)
    both = np.concatenate(nearest_mm(*pair, affine))
    distances = surface_distances(*pair, affine)
    assert max(np.percentile(one, 95) for one in distances) == pytest.approx(
        hd95_by_hand(*pair, affine), rel=1e-5
    )
    for tolerance_mm in (0.0, 0.6, 1.1):
        share = np.mean(both <= tolerance_mm)
        assert surface_dice(distances, tolerance_mm) == pytest.approx(share)
    assert surface_dice(distances, 100.0) == 1


@pytest.mark.parametrize("spacing_mm", [0.1, 0.3, 0.7, 1.0, 1.1])
@pytest.mark.parametrize("degrees", [0.0, 33.0])
def test_a_neighbour_at_the_tolerance_is_within_it(spacing_mm, degrees):
    one = np.zeros((6, 6, 6), bool)
    one[2:4, 2:4, 2:4] = True
    affine = np.eye(4)
    rotation = Rotation.from_euler("xyz", [degrees] * 3, degrees=True).as_matrix()
    # As a header stores it.
    affine[:3, :3] = (rotation * spacing_mm).astype(np.float32)
    distances = surface_distances(one, np.roll(one, 1, axis=2), affine)
    assert surface_dice(distances, spacing_mm) == 1.0
    assert surface_dice(distances, 0.99 * spacing_mm) == 0.5


def test_labels_whose_boxes_are_too_large_have_no_distances_and_one_line_says_so(
    monkeypatch, caplog
):
    prediction, label = (cube((0, 0, 0), (20, 20, edge)) for edge in (19, 20))
    for array, start in ((prediction, 4), (label, 5)):
        array[4:8, 4:8, start:8] = 2
    scored = ScoredLabels(names={1: "large", (1, 2): "both", 2: "small"})
    complete = score_maps(prediction, label, AFFINE, scored)
    monkeypatch.setattr(host, "SMALL_BYTES", 0)
    monkeypatch.setattr(host, "available_bytes", lambda: 15 * 20**3)
    found = score_maps(prediction, label, AFFINE, scored)
    assert list(found) == [1, (1, 2), 2] and found[2] == complete[2]
    for region in (1, (1, 2)):
        assert found[region].hd95_mm is None and found[region].nsd is None
        assert found[region].dice == complete[region].dice > 0.9
        assert found[region].label_ml == complete[region].label_ml
    (line,) = (record.getMessage() for record in caplog.records)
    assert "HD95 and NSD of large, both are left out: the first one's box of 20x20x20" in line
    assert "takes 125 KiB of memory" in line and line.endswith(
        "coarser levels of pyramids (--level)"
    )


# Maps in files, read in boxes


SHAPE = (30, 44, 50)
"""Voxels along Z, Y, X."""


def write(path, array, chunks):
    zarr = pytest.importorskip("zarr")
    zarr.create_array(path, shape=array.shape, chunks=chunks, dtype=array.dtype)[...] = array
    return path


def blocks(seed, values, dtype):
    """Return blocks of 5x4x5 voxels, each of one of the values; most are 0."""
    rng = np.random.default_rng(seed)
    coarse = rng.choice([0, 0, 0, *values], (6, 11, 10)).astype(dtype)
    return coarse.repeat(5, 0).repeat(4, 1).repeat(5, 2)


def pair_of(folder, values, dtypes, chunks):
    return [
        write(folder / f"{name}.zarr", blocks(seed, values, dtype), side)
        for seed, (name, dtype, side) in enumerate(zip("pl", dtypes, chunks, strict=True))
    ]


@each_value(
    values_dtypes_and_scored=[
        ((1, 2, 3), (np.uint8, np.int64), ScoredLabels(names={(1, 3): "a", 3: "b"}, ignore=2)),
        ((1, 300, 4000), (np.uint16, ">i2"), EVERY_VALUE),
        ((5, 70_000, 2**31 - 1), (np.uint64, np.int32), EVERY_VALUE),
        ((-7, 9), (np.int16, np.int16), ScoredLabels(ignore=9, left_out=frozenset([-7]))),
        ((1,), (bool, np.uint8), ScoredLabels(names={(1, 2): "both"})),
    ],
    chunks=[((8, 8, 8), (16, 8, 4)), ((7, 9, 11), (1, 44, 50))],
    voxels_of_a_box=[3000, 2**20],
)
def test_counts_and_boxes_are_numpys(
    tmp_path, values_dtypes_and_scored, chunks, voxels_of_a_box, monkeypatch
):
    values, dtypes, scored = values_dtypes_and_scored
    monkeypatch.setattr(image, "PIECE_VOXELS", voxels_of_a_box)
    paths = pair_of(tmp_path, values, dtypes, chunks)
    found = overlaps_in(open_pair(*paths), scored)
    prediction, label = (read_label(path).array for path in paths)
    assert found.values == tuple({*np.unique(array).tolist()} for array in (label, prediction))
    kept = label != (0 if scored.ignore is None else scored.ignore)
    kept |= scored.ignore is None
    there = {*prediction[kept].tolist(), *label[kept].tolist()}
    assert list(found.labels) == scored.among(there)
    for one, overlap in found.labels.items():
        predicted, labelled = (np.isin(a, values_of(one)) & kept for a in (prediction, label))
        counts = predicted.sum(), labelled.sum(), (predicted & labelled).sum()
        assert (overlap.predicted, overlap.labelled, overlap.both) == counts
        places = np.argwhere(predicted | labelled)
        ends = [(part.start, part.stop) for part in overlap.box]
        np.testing.assert_array_equal(np.transpose(ends), [places.min(0), places.max(0) + 1])


@pytest.mark.parametrize("codes", ["LPS", "PIR"])
@pytest.mark.nightly
def test_a_pair_of_two_formats_has_the_axes_of_the_label_map(tmp_path, codes, monkeypatch):
    monkeypatch.setattr(image, "PIECE_VOXELS", 500)
    prediction, label = blocks(0, (1, 2), np.uint8), blocks(1, (1, 2), np.float32)
    affine = np.diag([2.0, 3.0, 4.0, 1.0])
    turned = nib.Nifti1Image(label, affine).as_reoriented(turn_to(codes))
    nib.save(turned, tmp_path / "l.nii.gz")
    nib.save(nib.Nifti1Image(prediction, affine), tmp_path / "p.nii")
    pair = read_pair(tmp_path / "p.nii", tmp_path / "l.nii.gz")
    for found, array in zip(pair, (prediction, label), strict=True):
        np.testing.assert_array_equal(found.array, array)
        assert found.array.dtype == np.uint8 and found.geometry.spacing_mm == (2, 3, 4)
    score = evaluate(tmp_path / "p.nii", tmp_path / "l.nii.gz").cases[0].scores[2]
    masks = prediction == 2, label == 2
    assert score.hd95_mm == pytest.approx(hd95_by_hand(*masks, affine), rel=1e-6)
    both = (masks[0] & masks[1]).sum()
    assert score.dice == pytest.approx(2 * both / (masks[0].sum() + masks[1].sum()), rel=1e-6)


def test_distances_in_boxes_are_those_of_the_whole_volume(tmp_path, monkeypatch):
    paths = pair_of(tmp_path, (1, 2), (np.uint8, np.uint8), ((8, 8, 8), (16, 8, 4)))
    reading = Reading(spacing_mm=(1.0, 2.0, 3.0))
    prediction, label = read_pair(*paths)
    whole = [nib.Nifti1Image(one.array, np.diag([1, 2, 3, 1.0])) for one in (prediction, label)]
    for name, one in zip("pl", whole, strict=True):
        nib.save(one, tmp_path / f"{name}.nii.gz")
    expected = evaluate(tmp_path / "p.nii.gz", tmp_path / "l.nii.gz").cases[0].scores
    monkeypatch.setattr(image, "PIECE_VOXELS", 500)
    found = evaluate(*paths, tolerance_mm=1.0, reading=reading).cases[0].scores
    assert found == expected and found[1].hd95_mm > 0


def test_too_many_values_are_refused_before_all_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(label_scores, "MAX_VALUES", 50)
    monkeypatch.setattr(image, "PIECE_VOXELS", 500)
    image_like = np.arange(np.prod(SHAPE), dtype=np.uint32).reshape(SHAPE)
    paths = [write(tmp_path / f"{name}.zarr", image_like, (8, 8, 8)) for name in "pl"]
    (tmp_path / "p.zarr" / "c" / "3" / "5" / "6").write_bytes(b"damaged")
    with pytest.raises(VolumeError, match=r"l\.zarr holds more than 50 different values"):
        evaluate(*paths)
    with pytest.raises(VolumeError, match="a chunk is damaged"):
        read_pair(*paths)


CHILD = """
import json, sys
from pathlib import Path
from unet3d.inference.evaluation import evaluate
from unet3d.memory import host

host.available_bytes = lambda: 2**27
found = evaluate(*map(Path, sys.argv[1:])).to_dict()["cases"][0]["labels"]
lines = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
print(json.dumps([peak * 1024, found]))
"""
"""Scores two files as if little memory were available, and prints its peak memory in bytes."""


def peak_bytes(folder, depth):
    """Return the peak for maps of 1024x1024 voxels and some planes, and the scores."""
    zarr = pytest.importorskip("zarr")
    folder.mkdir()
    boxes = {1: (10, 10, 10, depth - 10, 1000, 990), 2: (3, 500, 20, 9, 520, 130)}
    for name, shift, chunk in (("p", 1, 128), ("l", 0, 64)):
        size = (depth, 1024, 1024)
        array = zarr.create_array(folder / name, shape=size, chunks=(chunk,) * 3, dtype="u1")
        for first in range(0, depth, 128):
            planes = np.zeros((128, 1024, 1024), np.uint8)
            for value, (z, y, x, z_end, y_end, x_end) in boxes.items():
                part = slice(max(0, z - first), max(0, z_end - first))
                planes[part, y + shift : y_end + shift, x:x_end] = value
            array[first : first + 128] = planes
    child = [sys.executable, "-c", CHILD, str(folder / "p"), str(folder / "l")]
    ended = subprocess.run(child, capture_output=True, text=True, check=True)
    assert "HD95 and NSD of 1 are left out" in ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_memory_does_not_grow_with_the_size_of_two_maps(tmp_path):
    (small, _), (large, found) = (peak_bytes(tmp_path / str(z), z) for z in (128, 640))
    assert large - small < 2**27  # of 1.3 GB; threads take some megabytes now and then
    assert found["1"]["hd95_mm"] is None and found["1"]["nsd"] is None
    assert found["1"]["dice"] == pytest.approx(989 / 990)
    assert found["1"]["label_ml"] == pytest.approx(620 * 990 * 980 / 1000)
    assert found["2"]["dice"] == pytest.approx(19 / 20) and found["2"]["hd95_mm"] == 1.0
