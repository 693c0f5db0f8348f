"""A crop and a mask of an image in blocks: labels are those of the whole, cut and multiplied."""

import nibabel as nib
import numpy as np
import pytest

import unet3d
from unet3d.config import Reading
from unet3d.errors import ConfigError, VolumeError
from unet3d.images.image import open_image
from unet3d.inference.region import Region
from unet3d.inference.request import PredictionRequest

zarr = pytest.importorskip("zarr")

from tests.command_line import run  # noqa: E402
from tests.images.orientations import turn_to  # noqa: E402
from tests.images.samples import noise, write_volume  # noqa: E402
from tests.images.zarr_stores import write_store  # noqa: E402
from tests.networks import write_checkpoint  # noqa: E402
from unet3d.inference.block_prediction import status  # noqa: E402
from unet3d.inference.predictor import Predictor  # noqa: E402

SHAPE = (136, 8, 140)  # Z, Y, X
ASKED = {"devices": "cpu", "block": 128, "spacing_mm": (1, 1, 1)}


def labels_in(path):
    """Return the labels (Z, Y, X) of all levels, and the position of the finest one."""
    group = zarr.open_group(path, mode="r")
    levels = group.attrs["ome"]["multiscales"][0]["datasets"]
    _, moved = levels[0]["coordinateTransformations"]
    found = [group[level["path"]][:] for level in levels]
    for array, name in zip(found, group.array_keys(), strict=True):
        numbers = -(-np.array(array.shape) // group[name].shards)
        files = [file for file in (path / name / "c").rglob("*") if file.is_file()]
        assert len(files) == numbers.prod()
    return found, moved["translation"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a network, an image in 10 nm, and the labels of the whole as one."""
    folder = tmp_path_factory.mktemp("trained")
    network = write_checkpoint(
        folder / "network.pt", changes=("training.precision=float32",), patch_size=(8, 8, 8)
    )
    scan = write_store(folder / "scan.ome.zarr", noise(SHAPE))
    whole = folder / "whole.ome.zarr"
    unet3d.predict(scan, network, output=whole, devices="cpu", spacing_mm=(1, 1, 1))
    return network, scan, labels_in(whole)[0][0]


@pytest.fixture
def segmented(monkeypatch):
    """Return the boxes that are segmented from now on."""
    boxes, begin_block = [], Predictor.begin_block

    def noting(predictor, found, box, windows_done):
        boxes.append(box)
        return begin_block(predictor, found, box, windows_done)

    monkeypatch.setattr(Predictor, "begin_block", noting)
    return boxes


@pytest.mark.nightly
def test_a_crop_is_that_part_of_the_whole_at_its_place(trained, tmp_path):
    network, scan, whole = trained
    path = tmp_path / "part.ome.zarr"
    crop = ((7, 139), (None, None), (3, None))
    assert unet3d.predict(scan, network, output=path, crop=crop, part=(1, 2), **ASKED) == (path,)
    assert status(path)[:3] == (False, 4, 2)
    with pytest.raises(ConfigError, match="begun with another crop; go on with the same"):
        unet3d.predict(scan, network, output=path, **ASKED)
    unet3d.predict(scan, network, output=path, crop=crop, **ASKED)
    labels, moved = labels_in(path)
    np.testing.assert_array_equal(labels[0], whole[3:, :, 7:139])
    assert moved == [3e6, 0, 7e6]


def test_a_crop_counts_along_the_axes_of_the_result(trained, tmp_path, capsys):
    network, _, _ = trained
    scan = nib.Nifti1Image(noise((12, 14, 16)), np.diag([1.0, 1.0, 2.0, 1.0]))
    turned = scan.as_reoriented(turn_to("LIP", scan.affine))
    nib.save(turned, tmp_path / "scan.nii")
    command = ("predict", tmp_path / "scan.nii", "-c", network, "--devices", "cpu", "-o")
    assert run(*command, tmp_path / "whole.ome.zarr", "--block", "128") == 0
    assert run(*command, tmp_path / "part.ome.zarr", "--crop", "5:,:9,2:11") == 0
    assert run(*command, tmp_path / "x.ome.zarr", "--crop", "5:,:9") == 2
    assert "'5:,:9' is no part along Z, Y, X such as 0:50,:,100:400." in capsys.readouterr().err
    whole, origin = labels_in(tmp_path / "whole.ome.zarr")
    part, moved = labels_in(tmp_path / "part.ome.zarr")
    np.testing.assert_array_equal(part[0], whole[0][5:, :9, 2:11])
    assert np.subtract(moved, origin).tolist() == [10, 0, 2]


def test_where_a_mask_is_zero_nothing_is_computed(trained, tmp_path, segmented):
    network, scan, whole = trained
    coarse = (np.random.default_rng(1).random((68, 4, 70)) > 0.5).astype(np.uint16) * 300
    coarse[:64, :, :64] = 0
    mask, path = write_store(tmp_path / "m.ome.zarr", coarse, spacing=2e6), tmp_path / "x.ome.zarr"
    unet3d.predict(scan, network, output=path, mask=mask, part=(2, 2), **ASKED)
    other = write_volume(tmp_path / "other.nii", np.ones(SHAPE[::-1], np.uint8))
    with pytest.raises(ConfigError, match="begun with another mask"):
        unet3d.predict(scan, network, output=path, mask=other, **ASKED)
    unet3d.predict(scan, network, output=path, mask=mask, **ASKED)
    fine = coarse.repeat(2, 0).repeat(2, 1).repeat(2, 2) > 0
    labels, _ = labels_in(path)
    np.testing.assert_array_equal(labels[0], whole * fine)
    assert len(segmented) == 3  # of 4 blocks
    assert (slice(0, 128), slice(0, 8), slice(0, 128)) not in segmented


def test_a_mask_and_a_crop_together(trained, tmp_path, segmented):
    network, scan, whole = trained
    inside = np.zeros(SHAPE[::-1], np.float32)
    inside[134:, 3:, :] = np.nan
    inside[133:, 2, 20] = -0.25
    mask, path = write_volume(tmp_path / "m.nii.gz", inside), tmp_path / "x.ome.zarr"
    crop = ((4, None), (2, 7), (None, 90))
    unet3d.predict(scan, network, output=path, mask=mask, crop=crop, **ASKED)
    np.testing.assert_array_equal(labels_in(path)[0][0], (whole * (inside != 0).T)[:90, 2:7, 4:])
    assert segmented == [(slice(132, 140), slice(2, 7), slice(0, 90))]


@pytest.mark.nightly
def test_a_damaged_mask_stops_only_its_block(trained, tmp_path, segmented):
    network, scan, _ = trained
    mask = write_store(tmp_path / "m.ome.zarr", np.ones(SHAPE, np.uint8), chunks=(128, 8, 128))
    (mask / "0" / "c" / "1" / "0" / "0").write_bytes(b"damage")
    with pytest.raises(VolumeError, match=r"1 block of 4 .* z 128 to 136: .*m.ome.zarr"):
        unet3d.predict(scan, network, output=tmp_path / "x.ome.zarr", mask=mask, **ASKED)
    assert len(segmented) == 3


@pytest.mark.parametrize(
    ("shape", "mask_shape", "spacing"),
    [
        ((10, 7, 9), (10, 7, 9), (1, 1, 1)),
        ((10, 7, 9), (5, 4, 3), (2, 2, 3)),
        ((10, 7, 9), (30, 14, 9), (1 / 3, 0.5, 1)),
        ((10, 7, 9), (6, 5, 6), (1.6, 1.5, 1.5)),
    ],
)
def test_each_voxel_takes_the_nearest_of_the_mask(shape, mask_shape, spacing, tmp_path):
    image = open_image(write_volume(tmp_path / "image.nii", np.zeros(shape, np.uint8)))
    array = np.random.default_rng(0).integers(0, 2, mask_shape).astype(np.uint8)
    mask = write_volume(tmp_path / "mask.nii.gz", array, spacing)
    region = Region(image, PredictionRequest(mask=mask), Reading())
    box = (slice(3, 10), slice(0, 5), slice(2, 8))
    centres = np.moveaxis(np.indices(shape), 0, -1)[box] + 0.5
    last = np.array(mask_shape) - 1
    nearest = np.minimum(np.floor(centres / spacing + 1e-9), last).astype(int)
    expected = 7 * array[tuple(np.moveaxis(nearest, -1, 0))]

    def begin(asked):
        return lambda: np.full([part.stop - part.start for part in asked], 7)

    np.testing.assert_array_equal(region.begin(box, begin)(), expected)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"crop": ((0, 5), (0, 7), (3, 10))}, "has 9,7,10 voxels along Z,Y,X, and no part 3:10,0:"),
        ({"crop": ((5, 5), (0, 7), (0, 9))}, "no part 0:9,0:7,5:5; change --crop"),
        ({"mask": (10, 7, 7)}, "covers 10 x 7 x 7 mm, but .* 10 x 7 x 9 mm along X, Y, Z; choose"),
        ({"mask": (4, 7, 9)}, "covers 4 x 7 x 9 mm, but"),
        ({"mask": (10, 7, 9, 2)}, "has 2 channels; a mask needs one number per voxel"),
    ],
)
def test_what_does_not_fit_the_image_is_refused(asked, message, tmp_path):
    image = open_image(write_volume(tmp_path / "image.nii", np.zeros((10, 7, 9), np.uint8)))
    if "mask" in asked:
        mask = np.ones(asked["mask"], np.uint8)
        asked = {"mask": write_volume(tmp_path / "mask.nii", mask)}
    with pytest.raises((ConfigError, VolumeError), match=message):
        Region(image, PredictionRequest(**asked), Reading())


def test_what_blocks_cannot_do_with_a_region_is_refused(trained, tmp_path):
    network, scan, _ = trained
    with pytest.raises(ConfigError, match="leave out --crop and --mask, or name a store"):
        crop = ((0, 8), (0, 8), (0, 8))
        unet3d.predict(scan, network, output=tmp_path / "x.tif", crop=crop, mask=scan)
    with pytest.raises(ConfigError, match="m.ome.zarr is also an input; choose another --output"):
        mask = write_store(tmp_path / "m.ome.zarr", np.ones(SHAPE, np.uint8))
        unet3d.predict(scan, network, output=mask, mask=mask, overwrite=True)
