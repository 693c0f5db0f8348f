"""What users state about files of microscopes, in all commands and from Python."""

import json

import nibabel as nib
import numpy as np
import pytest

import unet3d
from tests.command_line import refusal, run, settings_of
from tests.images.samples import blob_label, noise, write_json
from unet3d.cli.options import _spacing_mm
from unet3d.config import Reading, load_config
from unet3d.errors import ConfigError
from unet3d.images.image import open_image
from unet3d.images.labels import read_label
from unet3d.inference.request import PredictionRequest

SHAPE = (20, 18, 12)

TINY = [
    *("--epochs", "1", "--devices", "cpu", "--quiet"),
    *("--set", "data.num_workers=0", "--set", "patches.size=8,8,8"),
    *("--set", "training.steps_per_epoch=1", "--set", "model.base_channels=4"),
    *("--set", "model.num_levels=2", "--set", "data.num_folds=2"),
    *("--set", "training.batch_size=2"),
]

STATED = ("--spacing", "40,8,8nm")

STATED_MM = (8e-6, 8e-6, 4e-5)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a data set of TIFF files that state no spacing."""
    tifffile = pytest.importorskip("tifffile")
    root = tmp_path_factory.mktemp("bare")
    for number in range(2):
        for name, voxels in (("image", noise(SHAPE, number)), ("label", blob_label(SHAPE, number))):
            (root / f"{name}s").mkdir(exist_ok=True)
            tifffile.imwrite(root / f"{name}s" / f"{number}.tif", voxels.T.astype(np.uint8))
    cases = [{"image": f"images/{n}.tif", "label": f"labels/{n}.tif"} for n in range(2)]
    labels = {"background": 0, "left": 1, "right": 2}
    write_json(root / "dataset.json", {"labels": labels, "training": cases})
    return root


@pytest.fixture(scope="module")
def bare(files):
    """Return the data set, and a run that was told its spacing."""
    assert run("train", files, "--output", files / "run", *TINY, *STATED) == 0
    return files, files / "run"


def test_check_names_volumes_without_a_spacing(files, capsys):
    assert run("check", files) == 0
    assert "no spacing is stated by 0.tif, 1.tif; give it with --spacing Z,Y,X" in (
        capsys.readouterr().out
    )
    assert run("check", files, *STATED) == 0
    shown = capsys.readouterr().out
    assert "8x8x40 nm" in shown and "0 warnings" in shown


@pytest.mark.nightly
def test_a_run_keeps_what_was_stated(bare, capsys):
    _, output = bare
    assert settings_of(output)["data"]["reading"]["spacing_mm"] == list(STATED_MM)
    segmented = open_image(next((output / "validation").rglob("*_seg.tif")))
    assert segmented.geometry.spacing_mm == pytest.approx(STATED_MM)
    more = ("train", "--resume", "--output", output, "--epochs", "2", "--quiet")
    assert "--spacing changed from" in refusal(capsys, *more, "--spacing", "40,8,9nm")
    assert run(*more, *STATED) == 0


@pytest.mark.nightly
def test_scans_labels_and_pages_get_it(bare, tmp_path, capsys):
    root, output = bare
    scan, result = root / "images/0.tif", tmp_path / "result.tif"
    assert run("predict", scan, "-c", output, "-o", result, *STATED) == 0
    assert read_label(result).geometry.spacing_mm == pytest.approx(STATED_MM)
    assert run("plan", "--predict", scan, "-c", output, *STATED) == 0
    scores = tmp_path / "scores.json"
    assert run("evaluate", result, root / "labels/0.tif", *STATED, "--json", scores) == 0
    assert json.loads(scores.read_text())["tolerance_mm"] == pytest.approx(1.6e-5)
    page = tmp_path / "page.html"
    assert run("report", result, "--image", scan, *STATED, "-o", page) == 0
    assert "8 x 8 x 40 nm" in page.read_text()
    assert run("report", output, *STATED) == 2
    written = unet3d.predict(scan, output, output=tmp_path / "b.tif", spacing_mm=STATED_MM)
    segmented = unet3d.load(output, devices="cpu", spacing_mm=STATED_MM).segment(scan)
    np.testing.assert_array_equal(segmented.dataobj, read_label(written[0]).array)
    assert nib.affines.voxel_sizes(segmented.affine) == pytest.approx(STATED_MM)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("40,8,8nm", STATED_MM),
        ("1.5,1,.5", (0.5, 1, 1.5)),
        ("1e-3,2,3 µm", (3e-3, 2e-3, 1e-6)),
        ("4,4,4 micron", (4e-3, 4e-3, 4e-3)),
    ],
)
def test_a_spacing_is_typed_along_z_y_x(text, expected):
    assert _spacing_mm(None, None, text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--spacing", "8nm"), "'8nm' is no spacing along Z, Y, X"),
        (("--spacing", "8,8,8 parsec"), "is no spacing along Z, Y, X"),
        (("--spacing", "8,8,-8"), "is no spacing along Z, Y, X"),
        (("--axes", "3"), "--axes is 3; give a name"),
        (("--time", "-1"), "--time is -1; give a whole number of at least 0"),
        (("--level", "fine"), "--level is 'fine'; give a whole number of at least 0"),
    ],
)
def test_wrong_values_are_refused(arguments, message, tmp_path, capsys):
    assert run("check", tmp_path, *arguments) in (1, 2)
    assert message in capsys.readouterr().err


def test_prediction_reads_the_level_nearest_to_the_network():
    request = PredictionRequest(settings={"data.reading.axes": "zyx"})
    assert request.reading((1, 2, 3)) == Reading(axes="zyx", near_mm=(1, 2, 3))
    near = PredictionRequest(settings={"data.reading.near_mm": [4, 4, 4], "data.reading.level": 1})
    assert near.reading((1, 2, 3)) == Reading(level=1, near_mm=(4, 4, 4))
    assert near.reading().near((5, 5, 5)) == Reading(near_mm=(5, 5, 5))
    with pytest.raises(ConfigError, match="data.reading.time is -1"):
        load_config(None, ["data.reading.time=-1"])


def test_training_and_prediction_choose_levels(tmp_path, capsys):
    stores = pytest.importorskip("tests.images.zarr_stores")
    for number in range(2):
        voxels = np.random.default_rng(number).integers(1, 200, (2, 16, 18, 20)).astype(np.uint8)
        scan = stores.store(tmp_path / f"scans/{number}.ome.zarr", voxels, names="czyx")
        name_channels(scan, ["DAPI", "GFP"])
        labels = (voxels[0] > 99).astype(np.uint8)
        stores.store(scan / "labels/cells", labels)
    paths = [f"scans/{number}.ome.zarr" for number in range(2)]
    cases = [{"image": path, "label": f"{path}/labels/cells"} for path in paths]
    write_json(
        tmp_path / "dataset.json", {"labels": {"background": 0, "cell": 1}, "training": cases}
    )
    output = tmp_path / "run"
    assert run("train", tmp_path, "--output", output, *TINY, "--level", "1") == 0
    segmented = output / "validation/scans/0_seg.ome.zarr"
    assert open_image(segmented).geometry.shape == (10, 9, 8)
    result = tmp_path / "result.ome.zarr"
    assert run("predict", scan, "-c", output, "-o", result) == 0
    assert read_label(result).array.shape == (10, 9, 8)
    assert run("evaluate", result, scan / "labels/cells") == 0
    assert run("report", result, "--image", scan, "-o", tmp_path / "page.html") == 0
    assert run("predict", scan, "-c", output, "-o", result, "--level", "0", "--overwrite") == 0
    assert read_label(result).array.shape == (20, 18, 16)
    assert "has no level 2" in refusal(capsys, "predict", scan, "-c", output, "--level", "2")
    name_channels(scan, ["GFP", "DAPI"])
    assert run("predict", scan, "-c", output) == 1
    wrong = "has the channels GFP, DAPI, but the network was trained on DAPI, GFP; bring them"
    assert wrong in capsys.readouterr().err


def name_channels(store, names):
    """Write names of channels into the metadata of OME-Zarr 0.5."""
    path = store / "zarr.json"
    tree = json.loads(path.read_text())
    tree["attributes"]["ome"]["omero"] = {"channels": [{"label": name} for name in names]}
    path.write_text(json.dumps(tree))
