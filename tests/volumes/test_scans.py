import json
import os
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from tests.networks import place, random_checkpoint
from tests.volumes.samples import SPACING_MM, noise, write_volume
from unet3d.errors import ConfigError, VolumeError
from unet3d.volumes.nifti import read_header
from unet3d.volumes.scans import (
    Scan,
    find_scans,
    label_statistics,
    read_scan,
    write_segmentation,
    write_statistics,
)


def touch(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return [folder / name for name in names]


def outputs(scans: list[Scan]) -> dict[tuple[str, ...], str]:
    return {tuple(image.name for image in scan.images): scan.output.name for scan in scans}


def test_a_folder_is_every_volume_in_it_but_earlier_segmentations(tmp_path: Path) -> None:
    touch(tmp_path, "b.nii.gz", "a.nii", "c.mgz", "a_seg.nii.gz", ".hidden.nii", "notes.txt")
    touch(tmp_path, "pair.hdr", "pair.img", "LOUD.HDR", "LOUD.IMG", "lonely.img", "deeper/d.nii")
    touch(tmp_path, "Mixed.IMG", "Mixed.hdr", "B.NII.GZ", "B_SEG.NII.GZ")
    assert outputs(find_scans([tmp_path], None, 1, overwrite=True)) == {
        ("B.NII.GZ",): "B_seg.nii.gz",
        ("LOUD.HDR",): "LOUD_seg.nii.gz",
        ("Mixed.hdr",): "Mixed_seg.nii.gz",
        ("a.nii",): "a_seg.nii.gz",
        ("b.nii.gz",): "b_seg.nii.gz",
        ("c.mgz",): "c_seg.nii.gz",
        ("lonely.img",): "lonely_seg.nii.gz",
        ("pair.hdr",): "pair_seg.nii.gz",
    }


def test_channel_files_are_one_scan_where_the_network_wants_several(tmp_path: Path) -> None:
    names = ["x_0001.nii.gz", "x_0000.nii.gz", "y_0000.nii.gz", "y_0001.nii.gz", "z.nii.gz"]
    files = touch(tmp_path, *names)
    expected = {
        ("x_0000.nii.gz", "x_0001.nii.gz"): "x_seg.nii.gz",
        ("y_0000.nii.gz", "y_0001.nii.gz"): "y_seg.nii.gz",
        ("z.nii.gz",): "z_seg.nii.gz",
    }
    assert outputs(find_scans([tmp_path], None, 2, False)) == expected
    assert outputs(find_scans(files, None, 2, False)) == expected
    assert outputs(find_scans([tmp_path, *files], None, 2, False)) == expected
    assert len(find_scans([tmp_path], None, 1, False)) == 5
    # One file may hold both channels, whatever its number.
    assert outputs(find_scans(files[:1], None, 2, False)) == {
        ("x_0001.nii.gz",): "x_0001_seg.nii.gz"
    }


@pytest.mark.parametrize(
    "names",
    [
        ("x_0001.nii.gz", "x_0002.nii.gz"),
        ("x_0000.nii.gz", "x_0000.nii"),
        ("x_0000.nii.gz", "x_0001.nii.gz", "x_0002.nii.gz"),
    ],
    ids=["first missing", "one twice", "one too many"],
)
def test_channels_that_are_not_the_right_ones_are_refused(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    touch(tmp_path, *names)
    with pytest.raises(VolumeError, match=r"x has the files x_000.* 2 channels; name them x_0000"):
        find_scans([tmp_path], None, 2, False)


def test_channels_are_put_together_in_order(tmp_path: Path) -> None:
    arrays = [noise(seed=1), noise(seed=2)]
    files = [
        write_volume(tmp_path / f"x_{channel:04d}.nii", array, SPACING_MM)
        for channel, array in enumerate(arrays)
    ]
    (scan,) = find_scans(files[::-1], None, 2, False)
    image = read_scan(scan)
    assert image.header.num_channels == 2
    np.testing.assert_array_equal(image.array, arrays)
    predictor = place(random_checkpoint(num_channels=2))
    write_volume(tmp_path / "stacked.nii", np.stack(arrays, axis=-1), SPACING_MM)
    stacked = read_scan(Scan(images=(tmp_path / "stacked.nii",), output=tmp_path / "unused.nii"))
    np.testing.assert_array_equal(predictor.segment(image), predictor.segment(stacked))
    write_volume(files[1], arrays[1], (1, 1, 1))
    with pytest.raises(VolumeError, match=r"x_0001.nii is not on the grid of .*x_0000.nii: aff"):
        read_scan(scan)


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("mine.nii.gz", "mine.nii.gz"),
        ("mine.nii", "mine.nii"),
        ("new folder", "new folder/scan_seg.nii.gz"),
        ("there.already", "there.already/scan_seg.nii.gz"),
    ],
)
def test_output_is_a_file_or_a_folder(tmp_path: Path, given: str, written: str) -> None:
    (tmp_path / "there.already").mkdir()
    (path,) = touch(tmp_path, "scan.nii.gz")
    (scan,) = find_scans([path], tmp_path / given, 1, False)
    assert scan.output == tmp_path / written
    write_volume(path, noise())
    labels = np.ones(noise().shape, np.uint8)
    write_segmentation(scan, labels, read_header(path))
    assert scan.output.is_file()


def test_outputs_that_cannot_be_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    a, b, twin, pair = touch(tmp_path, "a.nii.gz", "b.nii.gz", "other/a.nii", "pair.hdr")
    cases: list[tuple[list[Path], Path | None, str]] = [
        ([a], a, "is itself to be segmented"),
        ([a, tmp_path / "a_seg.nii.gz"], None, "is itself to be segmented"),
        ([a, b], tmp_path / "one.nii.gz", "is one file for 2 scans; name a folder"),
        ([a, twin], tmp_path / "out", "would both be written to"),
        ([a], tmp_path / "out.mgz", r"name a .nii or .nii.gz file"),
        ([pair], tmp_path / "out.txt", r"name a .nii or .nii.gz file"),
    ]
    for inputs, output, words in cases:
        with pytest.raises(ConfigError, match=words):
            find_scans(inputs, output, 1, overwrite=True)
    with pytest.raises(VolumeError, match="other/empty holds no volumes"):
        (tmp_path / "other/empty").mkdir()
        find_scans([tmp_path / "other/empty"], None, 1, False)


def test_nothing_is_overwritten_unless_asked(tmp_path: Path) -> None:
    a, b, old = touch(tmp_path, "a.nii.gz", "b.nii.gz", "b_seg.nii.gz")
    with pytest.raises(ConfigError, match=f"{old} exists; add --overwrite"):
        find_scans([a, b], None, 1, overwrite=False)
    assert len(find_scans([a, b], None, 1, overwrite=True)) == 2
    (statistics,) = touch(tmp_path, "a_seg.json")
    assert len(find_scans([a], None, 1, overwrite=False)) == 1
    with pytest.raises(ConfigError, match=f"{statistics} exists; add --overwrite"):
        find_scans([a], None, 1, overwrite=False, statistics=True)


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    path = write_volume(tmp_path / "scan.nii", noise((4, 4, 4)))
    (tmp_path / "file").touch()
    scan = Scan(images=(path,), output=tmp_path / "file" / "scan_seg.nii.gz")
    header = read_header(path)
    with pytest.raises(VolumeError, match="cannot write to .*file: "):
        write_segmentation(scan, np.zeros((4, 4, 4), np.uint8), header)
    with pytest.raises(VolumeError, match="cannot write .*scan_seg.json: Not a directory"):
        write_statistics(scan, {})


# Statistics


def test_statistics_are_those_of_numpy(tmp_path: Path) -> None:
    array = noise((6, 5, 4, 2))
    path = write_volume(tmp_path / "scan.nii.gz", array, (0.5, 2, 3))
    image = read_scan(Scan(images=(path,), output=tmp_path / "unused.nii"))
    labels = np.zeros((6, 5, 4), np.uint16)
    labels[:2, 1:3, 1] = 7
    labels[5, 4, 3] = 300
    found = label_statistics(labels, image, {7: "seven", 300: "corner", 9: "absent"})
    inside = array[:2, 1:3, 1].reshape(4, 2).astype(np.float64)
    assert list(found) == ["seven", "corner", "absent"]
    assert found["seven"]["value"] == 7
    assert found["seven"]["num_voxels"] == 4
    assert found["seven"]["volume_ml"] == pytest.approx(4 * 0.5 * 2 * 3 / 1000)
    for channel in range(2):
        assert found["seven"]["intensity"][channel] == pytest.approx(
            {
                "mean": inside[:, channel].mean(),
                "standard_deviation": inside[:, channel].std(),
                "minimum": inside[:, channel].min(),
                "maximum": inside[:, channel].max(),
            }
        )
    assert found["corner"]["intensity"][1]["standard_deviation"] == 0
    assert found["corner"]["intensity"][0]["mean"] == array[5, 4, 3, 0]
    assert found["absent"] == {
        "value": 9,
        "num_voxels": 0,
        "volume_ml": 0,
        "intensity": [None, None],
    }
    scan = Scan(images=(path,), output=tmp_path / "mine.nii.gz")
    written = write_statistics(scan, found)
    assert written == tmp_path / "mine.json"
    content = json.loads(written.read_text())
    assert content == {"image": [str(path)], "labels": found}


def test_links_that_lead_to_themselves_stop_no_folder(tmp_path: Path) -> None:
    touch(tmp_path, "a.nii.gz")
    (tmp_path / "loop.nii.gz").symlink_to("loop.nii.gz")
    os.mkfifo(tmp_path / "pipe.nii.gz")
    scans = find_scans([tmp_path, tmp_path / "loop.nii.gz"], None, 1, overwrite=False)
    assert [scan.images[0].name for scan in scans] == ["a.nii.gz", "loop.nii.gz", "pipe.nii.gz"]
    for scan, words in zip(scans, ["is empty", "symbolic links", "is a pipe"], strict=True):
        with pytest.raises(VolumeError, match=words):
            read_scan(scan)


def test_a_folder_that_cannot_be_listed_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(VolumeError, match="cannot list .*: Permission denied"):
        find_scans([tmp_path], None, 1, overwrite=False)


@pytest.mark.parametrize("degrees", [15, 25, 30])
def test_statistics_of_a_tilted_gantry_are_in_true_ml(
    tmp_path: Path, degrees: float, caplog: pytest.LogCaptureFixture
) -> None:
    affine = np.diag([0.5, 0.5, 3, 1])
    affine[1:3, 1] = 0.5 * np.cos(np.radians(degrees)), 0.5 * np.sin(np.radians(degrees))
    nib.save(nib.Nifti1Image(noise((6, 5, 4)), affine), tmp_path / "scan.nii.gz")
    image = read_scan(Scan(images=(tmp_path / "scan.nii.gz",), output=tmp_path / "unused.nii"))
    statistics = label_statistics(np.ones((6, 5, 4), np.uint8), image, {1: "all"})
    # A stack of slices of 3 x 2.5 mm, tilted, and 12 mm along the table: base times height.
    expected = 3 * 2.5 * np.cos(np.radians(degrees)) * 12 / 1000
    assert statistics["all"]["volume_ml"] == pytest.approx(expected, rel=1e-6)
    assert caplog.text.count(f"miss a right angle by {degrees} degrees") == 1
