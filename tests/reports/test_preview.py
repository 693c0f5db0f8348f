"""Outlines and letters of previews, the names beside them, and scans that cannot be drawn."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.contour import QuadContourSet
from mpl_toolkits.axes_grid1.anchored_artists import AnchoredSizeBar

from tests.reports.records import assert_is_picture
from unet3d.images.image import image_of
from unet3d.images.nifti import open_array
from unet3d.reports.figures import LABELS, write_figure
from unet3d.reports.planes import Structure
from unet3d.reports.preview import MAX_ROWS, Preview, preview_figure

SPACING_MM = (1.0, 2.0, 3.0)
SHAPE = (20, 16, 12)
BOX = ((4, 9), (5, 11), (6, 10))
"""First and end voxel of a structure along X, Y and Z."""
SIDES = {"coronal": (0, 2), "sagittal": (1, 2), "axial": (0, 1)}
"""The axes across and up each view."""


def box_of(ends=BOX):
    labels = np.zeros(SHAPE, np.uint8)
    labels[tuple(slice(*pair) for pair in ends)] = 1
    return labels


def image(array, spacing_mm=SPACING_MM, is_anatomical=True):
    found = image_of([open_array(array, np.diag([*spacing_mm, 1]))])
    found.geometry = replace(found.geometry, is_anatomical=is_anatomical)
    return found


def made(labels=None, spacing_mm=SPACING_MM, is_anatomical=True, **changes):
    labels = box_of() if labels is None else labels
    array = np.arange(labels.size, dtype=np.float32).reshape(labels.shape)
    values = {
        "title": "scan.nii.gz",
        "image": image(array, spacing_mm, is_anatomical),
        "labels": labels,
        "structures": [Structure(name="liver", values=(1,)), Structure(name="spleen", values=(2,))],
    }
    return Preview(**values | changes)


def panels(figure):
    return {axes.get_title(loc="left").split(",")[0]: axes for axes in figure.axes[:-1]}


def outlines(axes):
    return [one for one in axes.collections if isinstance(one, QuadContourSet) and not one.filled]


def extent_mm(contour):
    """Return left, right, bottom and top of an outline in the coordinates of its plane."""
    (path,) = contour.get_paths()
    (left, bottom), (right, top) = path.vertices.min(axis=0), path.vertices.max(axis=0)
    return left, right, bottom, top


def legend(figure):
    """Return the lines of the legend, without padding."""
    lines = [" ".join(text.get_text().split()) for text in figure.axes[-1].texts]
    return [line for line in lines if line not in ("■", "□")]


def scale(figure):
    (bar,) = (one for one in figure.axes[2].artists if isinstance(one, AnchoredSizeBar))
    return bar.txt_label.get_text()


def test_a_structure_is_outlined_where_it_is_on_the_intensities_of_the_plane():
    preview = made()
    figure = preview_figure(preview)
    assert set(panels(figure)) == set(SIDES)
    middle = {0: 6, 1: 8, 2: 8}  # the middle one of planes with equal areas
    for name, axes in panels(figure).items():
        (contour,) = outlines(axes)
        expected = [end * SPACING_MM[axis] for axis in SIDES[name] for end in BOX[axis]]
        assert extent_mm(contour) == pytest.approx(expected)
        np.testing.assert_allclose(contour.get_edgecolor()[0][:3], to_rgb(LABELS[0]))
        (across,) = {0, 1, 2} - set(SIDES[name])
        (drawn,) = axes.images
        plane = preview.image.read()[0].take(middle[across], across)
        np.testing.assert_array_equal(drawn.get_array(), plane.T)
        width, height = (SHAPE[axis] * SPACING_MM[axis] for axis in SIDES[name])
        assert drawn.get_extent() == [0, width, 0, height] and drawn.origin == "lower"
        title = f"{name}, {middle[across] + 1} of {SHAPE[across]}"
        assert axes.get_title(loc="left") == title


def test_of_a_large_plane_every_few_voxels_are_drawn_in_the_same_place(monkeypatch):
    monkeypatch.setattr("unet3d.reports.preview.MAX_PIXELS", 10)
    figure = preview_figure(made())
    steps = (2, 2, 2)
    for name, axes in panels(figure).items():
        (contour,) = outlines(axes)
        expected = [end * SPACING_MM[axis] for axis in SIDES[name] for end in BOX[axis]]
        assert extent_mm(contour) == pytest.approx(expected, abs=2 * max(SPACING_MM))
        (drawn,) = axes.images
        width, height = (SHAPE[axis] * SPACING_MM[axis] for axis in SIDES[name])
        assert drawn.get_extent() == [0, width, 0, height]
        shape = [-(-SHAPE[axis] // steps[axis]) for axis in SIDES[name]]
        assert drawn.get_array().T.shape == tuple(shape)


def test_letters_say_which_way_axes_run():
    """X grows to the right, Y to the front and Z to the top, and the largest places are known."""
    largest, smallest = "RAS", "LPI"
    figure = preview_figure(made())
    for name, axes in panels(figure).items():
        places, (across, up) = {text.get_text(): text.xy for text in axes.texts}, SIDES[name]
        assert len(places) == 4
        for axis, limits, index in ((across, axes.get_xlim(), 0), (up, axes.get_ylim(), 1)):
            end = 1 if limits[1] > limits[0] else 0  # the edge with the largest coordinate
            assert places[largest[axis]][index] == end
            assert places[smallest[axis]][index] == 1 - end
        assert places["R" if name != "sagittal" else "A"] == (0, 0.5)
        assert places["S" if name != "axial" else "A"] == (0.5, 1)
    assert "Radiological view: the patient's right is on the left." in legend(figure)


def test_where_left_is_unknown_axes_run_as_in_the_file():
    figure = preview_figure(made(is_anatomical=False))
    assert set(panels(figure)) == {"XY", "XZ", "YZ"}
    for name, axes in panels(figure).items():
        places = {text.get_text(): text.xy for text in axes.texts if text.get_text()}
        assert places == {name[0]: (1, 0.5), name[1]: (0.5, 0)}
        assert np.diff(axes.get_xlim()) > 0 > np.diff(axes.get_ylim())  # as in ImageJ and napari
    words = " ".join(legend(figure))
    assert "does not say where left and right are" in words and "Radiological" not in words


def test_an_image_of_a_microscope_has_its_units():
    figure = preview_figure(made(spacing_mm=(1e-5, 2e-5, 3e-5)))  # 10 x 20 x 30 nm
    assert legend(figure)[1] == "liver 0.000720 µm³"  # 120 voxels of 6000 nm3
    assert scale(figure) == "20 nm" and "left and right" not in " ".join(legend(figure))
    figure = preview_figure(made(spacing_mm=(1e-4, 2e-4, 3e-4)))
    assert legend(figure)[1] == "liver 0.720 µm³" and scale(figure) == "0.2 µm"


def test_names_and_volumes_stand_beside_their_colours():
    labels = box_of()
    labels[0, 0, 0] = 2
    figure = preview_figure(made(labels))
    assert legend(figure)[:3] == ["volume", "liver 0.720 mL", "spleen 0.00600 mL"]
    marks = [text for text in figure.axes[-1].texts if text.get_text() in ("■", "□")]
    assert [(one.get_text(), one.get_color()) for one in marks] == [
        ("■", LABELS[0]),
        ("□", LABELS[1]),
    ]
    assert "Labels in grey are not in these planes." in legend(figure)
    assert "Planes with the largest area of liver," in legend(figure)
    assert figure.texts[0].get_text() == "scan.nii.gz"


def test_of_many_structures_the_largest_are_named():
    structures = [Structure(name=f"s{value}", values=(value,)) for value in range(1, 101)]
    labels = np.zeros((100, 10, 10), np.uint8)
    for value in range(1, 51):
        labels[value, :, :1] = labels[value, 0, : value // 10 + 1] = value
    labels[50] = 50
    figure = preview_figure(made(labels, (10.0, 10.0, 10.0), structures=structures))
    shown = legend(figure)
    assert shown[1] == "s50 100 mL"
    counts = sorted((int((labels == value).sum()) for value in range(1, 51)), reverse=True)
    rest = sum(counts[MAX_ROWS:])
    assert shown[1 + MAX_ROWS] == f"and {50 - MAX_ROWS} more {rest} mL"


def test_a_truth_is_dashed_and_says_which_planes_are_drawn():
    truth = box_of(((4, 14), (5, 11), (6, 10)))
    figure = preview_figure(made(truth=truth, dice=(2 / 3, None)))
    for name in ("axial", "coronal"):
        solid, dashed = outlines(panels(figure)[name])
        assert extent_mm(solid)[:2] == pytest.approx((4, 9))
        assert extent_mm(dashed)[:2] == pytest.approx((4, 14))
        assert solid.get_linestyle()[0][1] is None and dashed.get_linestyle()[0][1] is not None
    assert panels(figure)["sagittal"].get_title(loc="left") == "sagittal, 10 of 20"
    assert legend(figure)[:3] == [
        "segmented true Dice",
        "liver 0.720 mL 1.44 mL 0.667",
        "spleen 0 mL 0 mL –",
    ]


def test_an_empty_segmentation_says_so(tmp_path):
    empty = np.zeros(SHAPE, np.uint8)
    figure = preview_figure(made(empty, image=image(np.zeros(SHAPE))))
    assert not any(outlines(axes) for axes in panels(figure).values())
    assert "Nothing was segmented." in legend(figure)
    write_figure(figure, tmp_path / "empty.png")
    missed = preview_figure(made(empty, truth=box_of(), dice=(0.0, None)))
    assert "Nothing was segmented." in legend(missed)
    assert len(outlines(panels(missed)["axial"])) == 1


def test_planes_of_a_single_row_can_be_drawn(tmp_path):
    for shape in ((9, 8, 1), (1, 9, 1), (1, 1, 1)):
        figure = preview_figure(made(np.ones(shape, np.uint8)))
        assert all(len(outlines(axes)) == 1 for axes in panels(figure).values())
        write_figure(figure, tmp_path / "flat.png")


def test_any_name_and_spacing_can_be_drawn(tmp_path):
    names = ("$x_1$", "_hidden", "\ud800", "肝臓", "a" * 300)
    structures = [Structure(name=name, values=(1 + n,)) for n, name in enumerate(names)]
    for spacing_mm in ((1e-4, 1e-4, 1e-3), (1.0, 1.0, 500.0)):
        preview = made(structures=structures, spacing_mm=spacing_mm, title="$" * 200)
        write_figure(preview_figure(preview), tmp_path / "odd.png")
        assert_is_picture(tmp_path / "odd.png")
    assert "$x" not in " ".join(legend(preview_figure(preview))).replace(r"\$", "")
