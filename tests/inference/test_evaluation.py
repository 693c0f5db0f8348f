import json

import nibabel as nib
import numpy as np
import pytest

from tests.images.orientations import turn_to
from tests.inference.distances import cube, hd95_by_hand, tilted
from unet3d.datasets.labels import ScoredLabels
from unet3d.errors import DatasetError, VolumeError
from unet3d.inference.evaluation import evaluate

SPACING_MM = (0.5, 1.0, 3.0)


def write(path, array, spacing_mm=SPACING_MM, origin_mm=0.0):
    affine = np.diag([*spacing_mm, 1.0])
    affine[0, 3] = origin_mm
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(array, affine), path)
    return path


def test_any_label_values_and_labels_that_one_side_lacks(tmp_path):
    first, second = cube((1, 1, 1), (5, 5, 5), value=127), cube((8, 8, 8), (10, 10, 10), value=255)
    write(tmp_path / "p" / "a_seg.nii.gz", first)
    write(tmp_path / "l" / "a.nii.gz", first + second)
    write(tmp_path / "p" / "b_seg.nii.gz", first)
    write(tmp_path / "l" / "b.nii.gz", first)
    evaluation = evaluate(tmp_path / "p", tmp_path / "l")
    assert evaluation.labels == (127, 255)
    a, b = (case.scores for case in evaluation.cases)
    assert (a[127].dice, a[255].dice, b[127].dice, b[255].dice) == (1.0, 0.0, 1.0, None)
    assert a[255].hd95_mm is None and b[255].hd95_mm is None
    assert evaluation.num_cases(127) == (2, 2)
    assert evaluation.num_cases(255) == (1, 0)
    assert (evaluation.mean(255).dice, evaluation.mean(255).hd95_mm) == (0.0, None)
    assert evaluation.mean(255).label_ml == pytest.approx(8 * 1.5 / 1000 / 2)
    assert evaluation.mean_dice == 0.5


@pytest.mark.parametrize(
    ("prediction", "label"),
    [
        ("case_seg.nii.gz", "case.nii.gz"),
        ("case_0000_seg.nii.gz", "case.nii.gz"),
        ("case_0000_seg.nii.gz", "case_0000.nii"),
        ("case_seg.nii.gz", "case_seg.nii.gz"),
    ],
)
def test_pairs_by_name(tmp_path, prediction, label):
    array = cube((5, 5, 5), (15, 15, 15))
    write(tmp_path / "p" / prediction, array)
    write(tmp_path / "l" / label, array)
    (tmp_path / "p" / "statistics.json").write_text("{}")
    (tmp_path / "l" / f"._{label}").write_text("what some systems leave behind")
    (case,) = evaluate(tmp_path / "p", tmp_path / "l").cases
    assert case.name == label.removesuffix(".gz").removesuffix(".nii")


@pytest.mark.parametrize(
    ("predictions", "labels", "message"),
    [
        (["b"], ["a"], r"b\.nii\.gz has no label map in .*looked for b; "),
        (["a", "b", "c"], ["a"], r"b\.nii\.gz has no .*for b, nor have 1 more segmentations; "),
        (["a", "a_seg"], ["a"], r"a\.nii\.gz and .*a_seg\.nii\.gz both belong to .*a\.nii\.gz"),
        ([], ["a"], "holds no volume to compare; name the folder"),
        (["a"], ["a", "a.nii"], "have the same name; keep one"),
        (["a"], None, "there is no file or folder .*/l"),
    ],
)
def test_predictions_without_partner_are_refused(tmp_path, predictions, labels, message):
    for folder, names in (("p", predictions), ("l", labels)):
        if names is not None:
            (tmp_path / folder).mkdir()
        for name in names or ():
            file = name if name.endswith(".nii") else f"{name}.nii.gz"
            write(tmp_path / folder / file, cube((1, 1, 1), (5, 5, 5)))
    with pytest.raises(DatasetError, match=message) as caught:
        evaluate(tmp_path / "p", tmp_path / "l")
    assert "\n" not in str(caught.value)


def test_names_the_label_maps_of_a_data_set(tmp_path):
    write(tmp_path / "data/labelsTr/a.nii.gz", cube((1, 1, 1), (5, 5, 5)))
    with pytest.raises(DatasetError, match="to compare; name .*/data/labelsTr$"):
        evaluate(tmp_path / "data/labelsTr", tmp_path / "data")


def test_what_one_side_alone_has_does_not_count(tmp_path):
    array = cube((1, 1, 1), (5, 5, 5))
    for name in ("p/a", "p/b_seg", "l/a", "l/b", "l/c"):
        write(tmp_path / f"{name}.nii.gz", array)
    # If it counted, its label 9 would have a Dice of 0.
    write(tmp_path / "l/d.nii.gz", cube((1, 1, 1), (5, 5, 5), value=9))
    evaluation = evaluate(tmp_path / "p", tmp_path / "l")
    assert [case.name for case in evaluation.cases] == ["a", "b"]
    assert (evaluation.labels, evaluation.mean_dice) == ((1,), 1.0)
    one = evaluate(tmp_path / "p/b_seg.nii.gz", tmp_path / "l")
    assert [case.name for case in one.cases] == ["b"]
    assert one.without_prediction == ()  # the other cases were not requested
    write(tmp_path / "p/z.nii.gz", array)
    with pytest.raises(DatasetError, match="z.nii.gz has no label map .*--leave-out"):
        evaluate(tmp_path / "p", tmp_path / "l")
    record = evaluate(tmp_path / "p", tmp_path / "l", leave_out=True).to_dict()
    assert [case["case"] for case in record["cases"]] == ["a", "b"]
    assert (record["without_prediction"], record["without_label"]) == (["c", "d"], ["z"])
    (tmp_path / "p/a.nii.gz").unlink()
    (tmp_path / "p/b_seg.nii.gz").unlink()
    with pytest.raises(DatasetError, match="z.nii.gz has no label map"):
        evaluate(tmp_path / "p", tmp_path / "l", leave_out=True)


def test_too_little_memory_is_explained(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise MemoryError

    path = write(tmp_path / "p.nii.gz", cube((1, 1, 1), (5, 5, 5)))
    monkeypatch.setattr("monai.metrics.get_mask_edges", fail)
    with pytest.raises(VolumeError, match="cannot compare .*p.nii.gz with .*: too little memory"):
        evaluate(path, path)


@pytest.mark.parametrize(
    ("shape", "origin_mm", "message"),
    [((20, 20, 21), 0.0, "shapes .* differ"), ((20, 20, 20), 4.0, "4 mm apart")],
)
def test_other_grids_are_refused(tmp_path, shape, origin_mm, message):
    write(tmp_path / "p.nii.gz", cube((1, 1, 1), (5, 5, 5)))
    write(tmp_path / "l.nii.gz", cube((1, 1, 1), (5, 5, 5), shape), origin_mm=origin_mm)
    with pytest.raises(VolumeError, match=message):
        evaluate(tmp_path / "p.nii.gz", tmp_path / "l.nii.gz")


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (
            np.float32,
            r"image\.nii\.gz has \d+ voxels that are not integer labels.*it an image\?",
        ),
        (np.int16, r"image\.nii\.gz is an image, not a label map: it holds \d{3} different values"),
    ],
)
def test_an_image_in_place_of_a_label_map_is_refused(tmp_path, dtype, message, swapped):
    grey = np.random.default_rng(0).normal(200, 60, (20, 20, 20)).astype(dtype)
    pair = (
        write(tmp_path / "image.nii.gz", grey),
        write(tmp_path / "l.nii.gz", cube((1, 1, 1), (5, 5, 5))),
    )
    with pytest.raises(VolumeError, match=message) as caught:
        evaluate(*(reversed(pair) if swapped else pair))
    assert "\n" not in str(caught.value)


@pytest.mark.nightly
def test_an_atlas_of_many_labels_is_no_image(tmp_path):
    path = write(tmp_path / "a.nii", np.arange(5**3, dtype=np.uint8).reshape(5, 5, 5))
    assert len(evaluate(path, path).labels) == 124


def test_instances_are_not_scored_one_by_one(tmp_path):
    path = write(tmp_path / "a.nii", np.arange(22**3, dtype=np.uint16).reshape(22, 22, 22))
    with pytest.raises(VolumeError, match="holds more than 10000 different values; name a label"):
        evaluate(path, path)


@pytest.mark.parametrize(
    ("ignore", "message"),
    [(None, "nothing to compare"), (1, "outside of the ignore label 1; there is nothing to")],
)
def test_nothing_to_compare_is_refused(tmp_path, ignore, message):
    value = 0 if ignore is None else ignore
    path = write(tmp_path / "a.nii.gz", cube((1, 1, 1), (5, 5, 5), value=value))
    with pytest.raises(DatasetError, match=message):
        evaluate(path, path, scored=ScoredLabels(ignore=ignore))


def test_a_pair_of_files_is_one_label_map(tmp_path):
    array = cube((5, 5, 5), (15, 15, 15))
    write(tmp_path / "p" / "a_seg.NII.GZ", array)
    (tmp_path / "l").mkdir()
    nib.save(nib.Nifti1Pair(array, np.diag([*SPACING_MM, 1.0])), tmp_path / "l" / "a.hdr")
    for label in (tmp_path / "l", tmp_path / "l" / "a.img"):
        (case,) = evaluate(tmp_path / "p", label).cases
        assert case.scores[1].dice == 1


def ball(affine, centre_mm, radius_mm, shape=(60, 60, 40)):
    places = np.moveaxis(np.indices(shape), 0, -1) @ affine[:3, :3].T
    return np.linalg.norm(places - centre_mm, axis=-1) < radius_mm


@pytest.mark.parametrize(("degrees", "codes"), [(0, "PSL"), (15, "RAS"), (30, "PSL")])
def test_a_tilted_gantry_changes_neither_volumes_nor_distances(tmp_path, degrees, codes):
    affine = tilted(degrees, (0.8, 0.8, 2.0))
    centre = affine[:3, :3] @ [30, 30, 20]
    masks = [ball(affine, centre, 12.0), ball(affine, centre + [0, 0, 4.0], 12.0)]
    for name, mask, axes in zip("pl", masks, (codes, "RAS"), strict=True):
        image = nib.Nifti1Image(mask.astype(np.uint8), affine)
        nib.save(image.as_reoriented(turn_to(axes, affine)), tmp_path / f"{name}.nii.gz")
    score = evaluate(tmp_path / "p.nii.gz", tmp_path / "l.nii.gz").cases[0].scores[1]

    assert score.prediction_ml == pytest.approx(4 / 3 * np.pi * 1.2**3, rel=0.02)
    voxel_ml = abs(np.linalg.det(affine[:3, :3])) / 1000
    assert score.label_ml == pytest.approx(masks[1].sum() * voxel_ml, rel=1e-6)
    assert score.hd95_mm == pytest.approx(hd95_by_hand(*masks, affine), rel=1e-5)


def test_regions_and_names_are_in_the_json(tmp_path):
    label = cube((2, 2, 2), (8, 8, 8)) + cube((4, 4, 4), (6, 6, 6))  # label 1, with label 2 inside
    write(tmp_path / "p" / "a.nii.gz", np.minimum(label, 1))
    write(tmp_path / "l" / "a.nii.gz", label + cube((15, 15, 15), (18, 18, 18), value=7))
    write(tmp_path / "p" / "b.nii.gz", label)
    write(tmp_path / "l" / "b.nii.gz", label)
    scored = ScoredLabels(names={(1, 2): "whole", 2: "core", 3: "nowhere"}, ignore=7)
    evaluation = evaluate(tmp_path / "p", tmp_path / "l", scored=scored, tolerance_mm=0.75)
    assert evaluation.labels == ((1, 2), 2)
    record = json.loads(json.dumps(evaluation.to_dict(), allow_nan=False))
    assert (record["ignore"], record["tolerance_mm"]) == (7, 0.75)
    a, b = record["cases"]
    paths = [str(tmp_path / folder / "a.nii.gz") for folder in "pl"]
    assert [a["case"], a["prediction"], a["label"], b["case"]] == ["a", *paths, "b"]
    first, second = a["labels"], b["labels"]
    assert first.keys() == {"1,2", "2"}
    assert (first["1,2"]["name"], first["1,2"]["dice"], first["1,2"]["nsd"]) == ("whole", 1.0, 1.0)
    assert (first["2"]["name"], first["2"]["dice"], first["2"]["hd95_mm"]) == ("core", 0.0, None)
    assert (first["2"]["nsd"], second["2"]["nsd"]) == (0.0, 1.0)
    assert (first["2"]["prediction_ml"], first["2"]["label_ml"]) == (0, pytest.approx(0.012))
    mean = record["mean"]["2"]
    assert (mean["name"], mean["dice"], mean["hd95_mm"], mean["nsd"]) == ("core", 0.5, 0.0, 0.5)
    assert (mean["num_cases_dice"], mean["num_cases_hd95"]) == (2, 1)
    assert record["mean_dice"] == 0.75
