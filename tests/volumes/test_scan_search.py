"""Which scans are segmented, where to, and which results are kept."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.volumes.samples import noise, write_volume
from unet3d.errors import ConfigError, ResultExistsError, VolumeError
from unet3d.volumes.header import read_header
from unet3d.volumes.scan_search import FoundScans, find_scans, refuse_existing
from unet3d.volumes.scans import Scan, Wanted, read_scan, write_segmentation


def touch(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return [folder / name for name in names]


def outputs(found: FoundScans) -> dict[tuple[str, ...], str]:
    assert not found.kept and not found.faults
    return {
        tuple(image.name for image in scan.images): scan.output.name for scan in found.to_segment
    }


def names(scans: tuple[Scan, ...]) -> list[str]:
    return [scan.images[0].name for scan in scans]


def test_a_folder_is_every_volume_in_it_but_earlier_segmentations(tmp_path: Path) -> None:
    touch(tmp_path, "b.nii.gz", "a.nii", "c.mgz", "a_seg.nii.gz", ".hidden.nii", "notes.txt")
    touch(tmp_path, "pair.hdr", "pair.img", "LOUD.HDR", "LOUD.IMG", "lonely.img", "deeper/d.nii")
    touch(tmp_path, "Mixed.IMG", "Mixed.hdr", "B.NII.GZ", "B_SEG.NII.GZ")
    assert outputs(find_scans([tmp_path], None, 1, Wanted(overwrite=True))) == {
        ("B.NII.GZ",): "B_seg.nii.gz",
        ("LOUD.HDR",): "LOUD_seg.nii.gz",
        ("Mixed.hdr",): "Mixed_seg.nii.gz",
        ("a.nii",): "a_seg.nii.gz",
        ("b.nii.gz",): "b_seg.nii.gz",
        ("c.mgz",): "c_seg.nii.gz",
        ("lonely.img",): "lonely_seg.nii.gz",
        ("pair.hdr",): "pair_seg.nii.gz",
    }


def dicom_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "IM0001").write_bytes(bytes(128) + b"DICM")
    return folder


def test_a_folder_of_slices_is_one_scan_and_its_result_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    series = dicom_folder(tmp_path / "CT 1.2.840")
    touch(series, "IM0002", "notes.txt")
    expected = tmp_path / "CT 1.2.840_seg.nii.gz"
    for name in (series, tmp_path / "CT 1.2.840" / ".." / "CT 1.2.840"):
        (scan,) = find_scans([name], None, 1, Wanted()).to_segment
        assert scan.images == (name,) and scan.output.resolve() == expected
    monkeypatch.chdir(series)
    (scan,) = find_scans([Path(".")], None, 1, Wanted()).to_segment
    assert scan.images == (series,) and scan.output == expected
    (scan,) = find_scans([series], tmp_path / "out", 1, Wanted()).to_segment
    assert scan.output == tmp_path / "out" / "CT 1.2.840_seg.nii.gz"


def test_a_folder_may_hold_scans_of_every_kind(tmp_path: Path) -> None:
    touch(tmp_path, "a.nii.gz", "b.nrrd", "c.mha", "d.mhd", "d.raw", "deeper/e.nii")
    dicom_folder(tmp_path / "series")
    dicom_folder(tmp_path / "s.2")
    dicom_folder(tmp_path / ".hidden")
    dicom_folder(tmp_path / "study" / "too deep")
    assert outputs(find_scans([tmp_path], None, 1, Wanted(overwrite=True))) == {
        ("a.nii.gz",): "a_seg.nii.gz",
        ("b.nrrd",): "b_seg.nii.gz",
        ("c.mha",): "c_seg.nii.gz",
        ("d.mhd",): "d_seg.nii.gz",
        ("s.2",): "s.2_seg.nii.gz",
        ("series",): "series_seg.nii.gz",
    }


def test_slices_beside_volumes_are_refused(tmp_path: Path) -> None:
    series = dicom_folder(tmp_path / "series")
    touch(series, "mask.nrrd", "old_seg.nii.gz")
    with pytest.raises(VolumeError, match="holds DICOM slices and volumes, such as mask.nrrd"):
        find_scans([series], None, 1, Wanted())


def test_segmentations_are_nifti(tmp_path: Path) -> None:
    (scan,) = touch(tmp_path, "a.nrrd")
    with pytest.raises(ConfigError, match=r"b\.nrrd: segmentations are written as NIfTI; name"):
        find_scans([scan], tmp_path / "b.nrrd", 1, Wanted())


def test_channel_files_are_one_scan_where_the_network_wants_several(tmp_path: Path) -> None:
    files_of = ["x_0001.nii.gz", "x_0000.nii.gz", "y_0000.nii.gz", "y_0001.nii.gz", "z.nii.gz"]
    files = touch(tmp_path, *files_of)
    expected = {
        ("x_0000.nii.gz", "x_0001.nii.gz"): "x_seg.nii.gz",
        ("y_0000.nii.gz", "y_0001.nii.gz"): "y_seg.nii.gz",
        ("z.nii.gz",): "z_seg.nii.gz",
    }
    assert outputs(find_scans([tmp_path], None, 2, Wanted())) == expected
    assert outputs(find_scans(files, None, 2, Wanted())) == expected
    assert outputs(find_scans([tmp_path, *files], None, 2, Wanted())) == expected
    assert len(find_scans([tmp_path], None, 1, Wanted()).to_segment) == 5
    # One file may hold both channels, whatever its number.
    assert outputs(find_scans(files[:1], None, 2, Wanted())) == {
        ("x_0001.nii.gz",): "x_0001_seg.nii.gz"
    }


@pytest.mark.parametrize(
    "channels",
    [
        ("x_0001.nii.gz", "x_0002.nii.gz"),
        ("x_0000.nii.gz", "x_0000.nii"),
        ("x_0000.nii.gz", "x_0001.nii.gz", "x_0002.nii.gz"),
    ],
    ids=["first missing", "one twice", "one too many"],
)
def test_channels_that_are_not_the_right_ones_are_refused(
    tmp_path: Path, channels: tuple[str, ...]
) -> None:
    touch(tmp_path, *channels)
    with pytest.raises(VolumeError, match=r"x has the files x_000.* 2 channels; name them x_0000"):
        find_scans([tmp_path], None, 2, Wanted())
    touch(tmp_path, "y_0000.nii.gz", "y_0001.nii.gz")
    found = find_scans([tmp_path], None, 2, Wanted())
    assert names(found.to_segment) == ["y_0000.nii.gz"]
    ((scan, error),) = found.faults
    assert names((scan,)) == [sorted(channels)[0] if channels[0] != channels[1] else channels[0]]
    assert "name them x_0000 to x_0001" in str(error)


@pytest.mark.parametrize("spelling", ["as it is", "from here", "around", "through a link"])
def test_a_scan_that_is_named_in_two_ways_counts_once(
    tmp_path: Path, spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = touch(tmp_path / "scans", "a.nii.gz")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("scans")
    other = {
        "as it is": path,
        "from here": Path("scans/a.nii.gz"),
        "around": tmp_path / "scans/../scans/a.nii.gz",
        "through a link": Path("link/a.nii.gz"),
    }[spelling]
    for inputs in ([path, other], [tmp_path / "scans", other], [other, tmp_path / "scans"]):
        assert len(find_scans(inputs, tmp_path / "out", 1, Wanted()).to_segment) == 1


def test_every_link_to_one_scan_is_a_scan(tmp_path: Path) -> None:
    (path,) = touch(tmp_path, "elsewhere/a.nii.gz")
    (tmp_path / "scans").mkdir()
    for index in range(1000):
        (tmp_path / f"scans/{index}.nii.gz").symlink_to(path)
    (tmp_path / "scans/loop.nii.gz").symlink_to("loop.nii.gz")
    (tmp_path / "scans/nowhere.nii.gz").symlink_to("absent.nii.gz")
    found = find_scans([tmp_path / "scans"], None, 1, Wanted())
    # The last two are named when they are read.
    assert len({scan.output for scan in found.to_segment}) == 1002


def test_links_that_lead_to_themselves_stop_no_folder(tmp_path: Path) -> None:
    touch(tmp_path, "a.nii.gz")
    (tmp_path / "loop.nii.gz").symlink_to("loop.nii.gz")
    os.mkfifo(tmp_path / "pipe.nii.gz")
    found = find_scans([tmp_path, tmp_path / "loop.nii.gz"], None, 1, Wanted())
    assert names(found.to_segment) == ["a.nii.gz", "loop.nii.gz", "pipe.nii.gz"]
    for scan, words in zip(
        found.to_segment, ["is empty", "symbolic links", "is a pipe"], strict=True
    ):
        with pytest.raises(VolumeError, match=words):
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
    (scan,) = find_scans([path], tmp_path / given, 1, Wanted()).to_segment
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
            find_scans(inputs, output, 1, Wanted(overwrite=True))
    with pytest.raises(VolumeError, match="other/empty holds no volumes"):
        (tmp_path / "other/empty").mkdir()
        find_scans([tmp_path / "other/empty"], None, 1, Wanted())


def test_results_that_exist_are_kept_and_only_a_single_scan_is_refused(tmp_path: Path) -> None:
    a, b, old = touch(tmp_path, "a.nii.gz", "b.nii.gz", "b_seg.nii.gz")
    for inputs in ([a, b], [tmp_path]):
        found = find_scans(inputs, None, 1, Wanted())
        assert (names(found.to_segment), names(found.kept)) == (["a.nii.gz"], ["b.nii.gz"])
        found = find_scans(inputs, None, 1, Wanted(overwrite=True))
        assert (names(found.to_segment), names(found.kept)) == (["a.nii.gz", "b.nii.gz"], [])
    with pytest.raises(ResultExistsError, match=f"{old} exists; add --overwrite"):
        find_scans([b], None, 1, Wanted())
    touch(tmp_path, "a_seg.nii.gz")
    found = find_scans([tmp_path], None, 1, Wanted())
    assert (names(found.to_segment), names(found.kept)) == ([], ["a.nii.gz", "b.nii.gz"])


@pytest.mark.parametrize(
    ("present", "missing"),
    [("a_seg.nii.gz", "a_seg.json"), ("a_seg.json", "a_seg.nii.gz")],
)
def test_half_a_result_is_neither_replaced_nor_taken_for_whole(
    tmp_path: Path, present: str, missing: str
) -> None:
    """Another network may have made it: statistics of ours would give its labels wrong names."""
    a, b, there = touch(tmp_path, "a.nii.gz", "b.nii.gz", present)
    words = f"{there} exists, but not {missing}; add --overwrite to make both"
    with pytest.raises(ConfigError, match=words):
        find_scans([a], None, 1, Wanted(statistics=True))
    found = find_scans([a, b], None, 1, Wanted(statistics=True))
    assert (names(found.to_segment), names(found.kept)) == (["b.nii.gz"], [])
    ((scan, error),) = found.faults
    assert scan.images == (a,) and words in str(error)
    assert len(find_scans([a, b], None, 1, Wanted(overwrite=True, statistics=True)).to_segment) == 2
    touch(tmp_path, missing)
    with pytest.raises(ResultExistsError):
        refuse_existing(scan, Wanted(statistics=True))
    assert names(find_scans([a, b], None, 1, Wanted(statistics=True)).kept) == ["a.nii.gz"]


def test_pictures_are_results_as_statistics_are(tmp_path: Path) -> None:
    a, there = touch(tmp_path, "a.nii.gz", "a_seg.nii.gz")
    words = f"{there} exists, but not a_seg.png; add --overwrite to make both"
    with pytest.raises(ConfigError, match=words):
        find_scans([a], None, 1, Wanted(preview=True))
    words = "exists, but not a_seg.json and a_seg.png; add --overwrite to make all"
    with pytest.raises(ConfigError, match=words):
        find_scans([a], None, 1, Wanted(statistics=True, preview=True))
    touch(tmp_path, "a_seg.png")
    with pytest.raises(ResultExistsError):
        find_scans([a], None, 1, Wanted(preview=True))
    (tmp_path / "a_seg.png").unlink()
    (tmp_path / "a_seg.png").mkdir()
    with pytest.raises(ConfigError, match="a_seg.png is a folder; choose another --output"):
        find_scans([a], None, 1, Wanted(overwrite=True, preview=True))


def test_files_that_nobody_asks_for_do_not_matter(tmp_path: Path) -> None:
    a, *_ = touch(tmp_path, "a.nii.gz", "a_seg.json", "a_seg.png")
    assert names(find_scans([a], None, 1, Wanted()).to_segment) == ["a.nii.gz"]


@pytest.mark.parametrize("kind", ["FIFO", "dangling link", "loop", "folder"])
def test_whatever_has_the_name_counts_as_a_result(tmp_path: Path, kind: str) -> None:
    (a,) = touch(tmp_path, "a.nii.gz")
    output = tmp_path / "a_seg.nii.gz"
    if kind == "FIFO":
        os.mkfifo(output)
    elif kind == "folder":
        output.mkdir()
    else:
        output.symlink_to("a_seg.nii.gz" if kind == "loop" else "absent")
    with pytest.raises(ResultExistsError):
        find_scans([a], None, 1, Wanted())
    refused = {"folder": "is a folder", "FIFO": "is not a regular file"}
    if kind in refused:
        with pytest.raises(ConfigError, match=f"{refused[kind]}; choose another --output"):
            find_scans([a], None, 1, Wanted(overwrite=True))
    else:
        assert find_scans([a], None, 1, Wanted(overwrite=True)).to_segment


def test_a_link_to_the_scan_itself_is_not_written_to(tmp_path: Path) -> None:
    (a,) = touch(tmp_path, "a.nii.gz")
    (tmp_path / "a_seg.nii.gz").symlink_to("a.nii.gz")
    with pytest.raises(ConfigError, match="is itself to be segmented"):
        find_scans([a], None, 1, Wanted(overwrite=True))


@pytest.mark.parametrize("place", ["file", "read-only", "dangling", "too long"])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_computed(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = touch(tmp_path, "a.nii.gz", "file")
    (tmp_path / "read-only").mkdir()
    (tmp_path / "dangling").symlink_to("absent")
    access = os.access
    # Root may write to what has no mode for it, but not to a file system that is read-only.
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path).name != "read-only" and access(path, mode)
    )
    output = tmp_path / (place if place != "too long" else "x" * 300)
    for choice in (output, output / "deeper"):
        with pytest.raises(ConfigError, match=f"cannot write.*{output.name}.*choose another"):
            find_scans([a], choice, 1, Wanted(overwrite=True))


def test_a_folder_that_cannot_be_listed_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(VolumeError, match=f"cannot list {tmp_path}: Permission denied"):
        find_scans([tmp_path], None, 1, Wanted())
