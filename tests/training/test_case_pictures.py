"""The cases that are drawn after a training, and the places of predicted and true outlines."""

from dataclasses import replace

import nibabel as nib
import numpy as np
import pytest
from matplotlib.contour import QuadContourSet

from tests.images.samples import write_volume
from unet3d.datasets.dataset import Case
from unet3d.datasets.labels import ScoredLabels
from unet3d.inference.evaluation import Evaluation, evaluate
from unet3d.training import final_validation
from unet3d.training.final_validation import draw_extremes

SHAPE, SPACING_MM = (24, 20, 16), (1.0, 1.0, 2.0)
TRUE = (slice(4, 12), slice(6, 15), slice(3, 9))


def made(folder, shifts, ignore=None):
    """Write cases whose prediction is shifted along X by some voxels, and score them."""
    scored = ScoredLabels(names={1: "liver"}, ignore=ignore)
    cases, scores = [], []
    for number, shift in enumerate(shifts):
        name = f"sub/case_{number}"
        label, prediction = np.zeros((2, *SHAPE), np.uint8)
        label[TRUE] = 1
        prediction[TRUE[0].start + shift : TRUE[0].stop + shift, *TRUE[1:]] = 1
        if ignore is not None:
            label[:2] = ignore
            prediction[:2] = 1
        image = np.random.default_rng(number).normal(size=SHAPE).astype(np.float32)
        case = Case(
            name=name,
            images=(write_volume(folder / f"images/{number}.nii.gz", image, SPACING_MM),),
            label=write_volume(folder / f"labels/{name}.nii.gz", label, SPACING_MM),
        )
        path = write_volume(folder / f"run/{name}_seg.nii.gz", prediction, SPACING_MM)
        (found,) = evaluate(path, case.label, scored=scored).cases
        cases.append(case)
        scores.append(replace(found, name=name, prediction=path.relative_to(folder / "run")))
    worst_first = sorted(scores, key=lambda case: case.mean_dice)
    return Evaluation.of(worst_first, scored), cases


@pytest.fixture
def figures(monkeypatch):
    """The figures that are written, by file name."""
    written = {}
    write = final_validation.write_figure

    def note(figure, path):
        written[path.name] = figure
        write(figure, path)

    monkeypatch.setattr(final_validation, "write_figure", note)
    return written


def extents_mm(figure, view):
    """Return the horizontal extent of each outline in a view."""
    (axes,) = (one for one in figure.axes if one.get_title(loc="left").startswith(view))
    contours = [
        one for one in axes.collections if isinstance(one, QuadContourSet) and not one.filled
    ]
    across = [one.get_paths()[0].vertices[:, 0] for one in contours]
    return [(float(places.min()), float(places.max())) for places in across]


def test_the_worst_and_the_best_case_are_drawn_with_both_outlines(tmp_path, figures):
    evaluation, cases = made(tmp_path, [1, 4, 0, 2])
    draw_extremes(tmp_path / "run", evaluation, cases)
    assert {path.name for path in (tmp_path / "run").glob("*.png")} == {"worst.png", "best.png"}
    titles = [figures[name].texts[0].get_text() for name in ("worst.png", "best.png")]
    assert titles == [
        "Worst of 4 cases, mean Dice 0.500: sub/case_1",
        "Best of 4 cases, mean Dice 1.000: sub/case_2",
    ]
    assert extents_mm(figures["worst.png"], "axial") == [(8, 16), (4, 12)]
    assert extents_mm(figures["best.png"], "axial") == [(4, 12), (4, 12)]
    line = figures["worst.png"].axes[-1].texts[1].get_text()
    assert line.split() == ["liver", "0.864", "mL", "0.864", "mL", "0.500"]


def test_a_single_case_has_one_picture_and_one_without_any_label_none(tmp_path, figures):
    evaluation, cases = made(tmp_path, [2])
    (case,) = evaluation.cases
    nothing = replace(evaluation, cases=(replace(case, scores={}),))
    draw_extremes(tmp_path, nothing, cases)
    assert not figures
    draw_extremes(tmp_path / "run", evaluation, cases)
    assert [path.name for path in (tmp_path / "run").glob("*.png")] == ["worst.png"]
    (figure,) = figures.values()
    assert figure.texts[0].get_text() == "The only case, mean Dice 0.750: sub/case_0"


def test_ignored_voxels_are_of_neither_map_and_files_may_be_stored_in_other_orientations(
    tmp_path, figures
):
    evaluation, cases = made(tmp_path, [2], ignore=255)
    label = nib.load(cases[0].label)
    turned = label.as_reoriented(nib.orientations.axcodes2ornt(("P", "S", "L")))
    assert turned.shape != label.shape
    nib.save(turned, cases[0].label)
    draw_extremes(tmp_path / "run", evaluation, cases)
    assert extents_mm(figures["worst.png"], "axial") == [(6, 14), (4, 12)]
    assert extents_mm(figures["worst.png"], "sagittal") == [(6, 15), (6, 15)]
