"""Which scans are segmented, where results are written, and which results are kept."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.images.samples import noise, write_volume
from unet3d.errors import ConfigError, ResultExistsError, VolumeError
from unet3d.images.image import open_image
from unet3d.inference.request import PredictionRequest
from unet3d.inference.scan_search import find_scans, refuse_early, refuse_existing
from unet3d.inference.scans import write_segmentation


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return [folder / name for name in names]


def outputs(found):
    assert not found.kept and not found.faults
    files = [tuple(image.name for image in scan.images) for scan in found.to_segment]
    return dict(zip(files, [scan.output.name for scan in found.to_segment], strict=True))


def found_of(inputs, output, num_channels, **asked):
    request = PredictionRequest(images=tuple(inputs), output=output, **asked)
    return find_scans(request, num_channels)


def refuses(inputs, words, output=None, **wanted):
    with pytest.raises((ConfigError, VolumeError), match=words):
        found_of(inputs, output, 1, **wanted)


def names(scans):
    return [scan.images[0].name for scan in scans]


def dicom_folder(folder):
    folder.mkdir(parents=True)
    (folder / "IM0001").write_bytes(bytes(128) + b"DICM")
    return folder


def test_a_folder_is_every_scan_in_it_but_earlier_segmentations(tmp_path):
    scans = ["B.NII.GZ", "LOUD.HDR", "Mixed.hdr", "pair.hdr", "a.nii", "b.nii.gz", "c.mgz"]
    scans += ["lonely.img", "e.nrrd", "f.mha", "g.mhd"]
    touch(tmp_path, *scans, "LOUD.IMG", "Mixed.IMG", "pair.img", "g.raw", "deeper/d.nii")
    touch(tmp_path, "a_seg.nii.gz", "B_SEG.NII.GZ", "a_seg.nii", ".hidden.nii", "notes.txt")
    for name in ("series", "s.2", ".hidden", "study/too deep"):
        dicom_folder(tmp_path / name)
    assert outputs(found_of([tmp_path], None, 1, overwrite=True)) == {
        ("series",): "series_seg.nii.gz",
        ("s.2",): "s.2_seg.nii.gz",
        **{(name,): f"{name.split('.')[0]}_seg.nii.gz" for name in scans},
    }
    touch(tmp_path / "series", "mask.nrrd", "old_seg.nii.gz")
    refuses([tmp_path / "series"], "holds slices and volumes, such as mask.nrrd")


def test_a_folder_of_slices_is_one_scan_and_its_result_lies_beside_it(tmp_path, monkeypatch):
    series = dicom_folder(tmp_path / "CT 1.2.840")
    touch(series, "IM0002", "notes.txt")
    name = "CT 1.2.840_seg.nii.gz"
    monkeypatch.chdir(series)
    for given, images in ((series, series), (Path("."), series), (series / "../CT 1.2.840",) * 2):
        (scan,) = found_of([given], None, 1).to_segment
        assert scan.images == (images,) and scan.output.resolve() == tmp_path / name
    (scan,) = found_of([series], tmp_path / "out", 1).to_segment
    assert scan.output == tmp_path / "out/CT 1.2.840.nii.gz"


def test_channel_files_are_one_scan_where_the_network_wants_several(tmp_path):
    files_of = ["x_0001.nii.gz", "x_0000.nii.gz", "y_0000.nii.gz", "y_0001.nii.gz", "z.nii.gz"]
    files = touch(tmp_path, *files_of)
    expected = {
        ("x_0000.nii.gz", "x_0001.nii.gz"): "x_seg.nii.gz",
        ("y_0000.nii.gz", "y_0001.nii.gz"): "y_seg.nii.gz",
        ("z.nii.gz",): "z_seg.nii.gz",
    }
    assert outputs(found_of([tmp_path], None, 2)) == expected
    assert outputs(found_of(files, None, 2)) == expected
    assert outputs(found_of([tmp_path, *files], None, 2)) == expected
    assert len(found_of([tmp_path], None, 1).to_segment) == 5
    # One file, whatever its number, may hold both channels.
    of_one = outputs(found_of(files[:1], None, 2))
    assert of_one == {("x_0001.nii.gz",): "x_0001_seg.nii.gz"}


def test_channels_that_are_not_the_right_ones_are_refused(tmp_path):
    for number, channels in enumerate(
        (
            ("x_0001.nii.gz", "x_0002.nii.gz"),
            ("x_0000.nii.gz", "x_0000.nii"),
            ("x_0000.nii.gz", "x_0001.nii.gz", "x_0002.nii.gz"),
        )
    ):
        folder = tmp_path / str(number)
        touch(folder, *channels)
        with pytest.raises(VolumeError, match=r"x has the files x_000.* 2 channels; name them x_0"):
            found_of([folder], None, 2)
        touch(folder, "y_0000.nii.gz", "y_0001.nii.gz")
        found = found_of([folder], None, 2)
        assert names(found.to_segment) == ["y_0000.nii.gz"]
        ((scan, error),) = found.faults
        assert names((scan,)) == [min(channels)] and "name them x_0000 to x_0001" in str(error)


def test_a_scan_that_is_named_in_two_ways_counts_once(tmp_path, monkeypatch):
    (path,) = touch(tmp_path / "scans", "a.nii.gz")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("scans")
    around, linked = tmp_path / "scans/../scans/a.nii.gz", Path("link/a.nii.gz")
    for other in (path, Path("scans/a.nii.gz"), around, linked):
        for inputs in ([path, other], [tmp_path / "scans", other], [other, tmp_path / "scans"]):
            assert len(found_of(inputs, tmp_path / "out", 1).to_segment) == 1


def test_output_is_a_file_or_a_folder(tmp_path):
    (tmp_path / "there.already").mkdir()
    path = write_volume(tmp_path / "scan.nii.gz", noise((4, 5, 6)))
    for given, inside in (
        ("mine.nii", ""),
        ("new folder", "scan.nii.gz"),
        ("there.already", "scan.nii.gz"),
        (".", "scan_seg.nii.gz"),
    ):
        (scan,) = found_of([path], tmp_path / given, 1).to_segment
        assert scan.output == tmp_path / given / inside
        write_segmentation(scan, np.ones((4, 5, 6), np.uint8), open_image(path).geometry, {})
        assert scan.output.is_file()


def test_in_another_folder_a_segmentation_pairs_with_its_label_map(tmp_path):
    names = ["case_0000.nii.gz", "scan_0001.nii.gz", "b_0000.nii.gz", "b_0001.nii.gz"]
    case, other, *channels = touch(tmp_path, *names)
    for given, num_channels, name in (
        ([case], 1, "case"),
        ([other], 1, "scan_0001"),
        (channels, 2, "b"),
        ([case], 2, "case"),  # both channels in one file
    ):
        (scan,) = found_of(given, tmp_path / "out", num_channels).to_segment
        assert scan.output == tmp_path / "out" / f"{name}.nii.gz"
    twin = touch(tmp_path, "case.nii")
    refuses([case, *twin], "would both be written to .*; name one$", tmp_path / "out")


def test_the_folder_of_several_scans_may_have_a_dot_in_its_name(tmp_path):
    scans = touch(tmp_path / "scans", "a.nii.gz", "b.nii.gz")
    output = tmp_path / "results.v2"
    for inputs in (scans, [tmp_path / "scans"]):
        found = found_of(inputs, output, 1)
        assert [scan.output.parent for scan in found.to_segment] == [output, output]
    scans[1].unlink()  # a folder may hold any numbers of files
    (scan,) = found_of([tmp_path / "scans"], output, 1).to_segment
    assert scan.output == output / "a.nii.gz"
    (scan,) = found_of([tmp_path / "scans"], tmp_path / "seg.nii", 1).to_segment
    assert scan.output == tmp_path / "seg.nii"
    refuses(
        scans[:1], "results.v2: a segmentation ends in .nii.gz or .nii or .* or .hdf5; name", output
    )
    for name in ("results.v2", "results.nii.gz"):
        (scan,) = found_of(scans[:1], f"{tmp_path / name}/", 1).to_segment
        assert scan.output == tmp_path / name / "a.nii.gz"
    (scan,) = found_of(scans[:1], f"{tmp_path / 'seg.ome.zarr'}/", 1).to_segment
    assert scan.output == tmp_path / "seg.ome.zarr"


def test_outputs_that_cannot_be_are_refused(tmp_path):
    (tmp_path / "other/empty").mkdir(parents=True)
    a, b, twin, pair = touch(tmp_path, "a.nii.gz", "b.nii.gz", "other/a.nii", "pair.hdr")
    run = touch(tmp_path / "run", "checkpoint-latest.pt")[0].parent
    above = touch(tmp_path / "above/p", "x.nii")[0].parents[1]
    for inputs, output, words in (
        ([a], a, "is also an input"),
        ([a, tmp_path / "a_seg.nii.gz"], None, "is also an input"),
        ([a, b], tmp_path / "one.nii.gz", "is one file for 2 scans; name a folder"),
        ([a, twin], tmp_path / "out", "out/a.nii.gz; leave out --output to write beside"),
        (
            [a],
            tmp_path / "out.mgz",
            r"ends in .nii.gz or .nii or .tif or .tiff or .* or .hdf5; name such a file",
        ),
        ([a], tmp_path / "out.nrrd", r"out\.nrrd: a segmentation ends in"),
        (
            [pair],
            tmp_path / "out.txt",
            r"ends in .nii.gz or .nii or .tif or .tiff or .* or .hdf5; name such a file",
        ),
        ([run], None, "run holds no volumes to segment; name the run with --checkpoint"),
        ([tmp_path / "other/empty"], None, "other/empty holds no volumes to segment; known: .nii"),
        (
            [above],
            None,
            "above holds no volumes.*; name the folders in it, or files such as .*/p/x",
        ),
    ):
        refuses(inputs, words, output, overwrite=True)
    (tmp_path / "a_seg.nii.gz").symlink_to("a.nii.gz")
    refuses([a], "is also an input", overwrite=True)


def test_results_that_exist_are_kept_and_only_a_single_scan_is_refused(tmp_path):
    a, b, old = touch(tmp_path, "a.nii.gz", "b.nii.gz", "b_seg.nii.gz")
    for inputs in ([a, b], [tmp_path]):
        found = found_of(inputs, None, 1)
        assert (names(found.to_segment), names(found.kept)) == ([a.name], [b.name])
        found = found_of(inputs, None, 1, overwrite=True)
        assert (names(found.to_segment), names(found.kept)) == ([a.name, b.name], [])
    with pytest.raises(ResultExistsError, match=f"{old} exists; add --overwrite"):
        found_of([b], None, 1)
    touch(tmp_path, "a_seg.nii.gz")
    assert names(found_of([tmp_path], None, 1).kept) == [a.name, b.name]


def test_half_a_result_is_neither_replaced_nor_taken_for_whole(tmp_path):
    """Another network may have made it: new statistics would name its labels wrongly."""
    both = ["a_seg.nii.gz", "a_seg.json"]
    for present, missing in (both, both[::-1]):
        a, b, there = touch(tmp_path / present, "a.nii.gz", "b.nii.gz", present)
        words = f"{there} exists, but not {missing}; add --overwrite to write all"
        refuses([a], words, statistics=True)
        found = found_of([a, b], None, 1, statistics=True)
        assert (names(found.to_segment), names(found.kept)) == (["b.nii.gz"], [])
        ((scan, error),) = found.faults
        assert scan.images == (a,) and words in str(error)
        anyway = found_of([a, b], None, 1, overwrite=True, statistics=True)
        assert len(anyway.to_segment) == 2
        touch(tmp_path / present, missing)
        with pytest.raises(ResultExistsError):
            refuse_existing(scan, PredictionRequest(statistics=True))
        kept = found_of([a, b], None, 1, statistics=True).kept
        assert names(kept) == ["a.nii.gz"]


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_computed(
    tmp_path, monkeypatch
):
    a, _ = touch(tmp_path, "a.nii.gz", "file")
    (tmp_path / "read-only").mkdir()
    (tmp_path / "dangling").symlink_to("absent")
    access = os.access

    def on_read_only_disk(path, mode):  # root may write to any file in spite of its mode
        return Path(path).name != "read-only" and access(path, mode)

    monkeypatch.setattr(os, "access", on_read_only_disk)
    inside = write_volume(tmp_path / "read-only/mine/b.nii.gz", noise((4, 5, 6)))
    refuse_early(PredictionRequest(images=(inside,)))
    beside = write_volume(tmp_path / "read-only/c.nii.gz", noise((4, 5, 6)))
    with pytest.raises(ConfigError, match=r"cannot write .*read-only/c_seg"):
        refuse_early(PredictionRequest(images=(beside,)))
    done = write_volume(tmp_path / "read-only/done.nii.gz", noise((4, 5, 6)))
    write_volume(tmp_path / "read-only/done_seg.nii.gz", np.zeros((4, 5, 6), np.uint8))
    refuse_early(PredictionRequest(images=(done,), goes_on=True))
    assert names(found_of([done], None, 1, goes_on=True).kept) == ["done.nii.gz"]
    for place in ("file", "read-only", "dangling"):
        words = f"cannot write.*{place}.*choose another"
        for output in (tmp_path / place, tmp_path / place / "deeper"):
            refuses([a], words, output, overwrite=True)
    for beside in ("pipe.nii", "pipe.json"):  # a result, or a file written beside it
        os.mkfifo(tmp_path / beside)
        words = f"cannot write .*{beside}: it is not a regular file"
        refuses([a], words, tmp_path / "pipe.nii", statistics=True, overwrite=True)
        os.unlink(tmp_path / beside)


def zarr_store(folder):
    folder.mkdir(parents=True)
    (folder / "0").mkdir()
    for node in (folder, folder / "0"):
        (node / "zarr.json").write_text("{}".ljust(200))  # of a volume, it is this long
    return folder


def test_a_store_is_one_scan_and_its_result_is_a_store(tmp_path):
    stores = [zarr_store(tmp_path / name) for name in ("a.ome.zarr", "b.zarr", "a_seg.ome.zarr")]
    touch(tmp_path, "c.nii.gz", "d.zarr.zip")
    expected = {
        ("a.ome.zarr",): "a_seg.ome.zarr",
        ("b.zarr",): "b_seg.ome.zarr",
        ("c.nii.gz",): "c_seg.nii.gz",
        ("d.zarr.zip",): "d_seg.ome.zarr",
    }
    assert outputs(found_of([tmp_path], None, 1, overwrite=True)) == expected
    (scan,) = found_of(stores[:1], tmp_path / "new.ome.zarr", 1).to_segment
    assert scan.images == (stores[0],) and scan.output == tmp_path / "new.ome.zarr"
    refuses(stores[:1], "a_seg.ome.zarr exists; add --overwrite")
    refuses(stores[:1], "b.zarr exists; add --overwrite", tmp_path / "b.zarr")
    found = found_of(stores[:1], tmp_path / "b.zarr", 1, overwrite=True)
    assert found.to_segment[0].output == tmp_path / "b.zarr"
    refuses(stores[:1], "is also an input", stores[0], overwrite=True)
    (tmp_path / "other.zarr").mkdir()
    (tmp_path / "other.zarr" / "precious").touch()
    refuses(stores[:1], "cannot write .*other.zarr", tmp_path / "other.zarr", overwrite=True)
    touch(tmp_path, "file.zarr")
    refuses(stores[:1], "cannot write .*file.zarr", tmp_path / "file.zarr", overwrite=True)


def test_an_empty_folder_becomes_a_store(tmp_path):
    scans = touch(tmp_path, "a.nii.gz")
    (tmp_path / "seg.ome.zarr").mkdir()
    (scan,) = found_of(scans, tmp_path / "seg.ome.zarr", 1).to_segment
    assert scan.output == tmp_path / "seg.ome.zarr"


def test_the_result_of_a_url_is_in_the_current_folder(tmp_path):
    url = Path("https://host/scans/a.ome.zarr")
    (scan,) = found_of([url], None, 1).to_segment
    assert scan.images == (url,) and scan.output == Path("a_seg.ome.zarr")
    (scan,) = found_of([Path("s3://bucket/key/6001240")], tmp_path, 1).to_segment
    assert scan.output == tmp_path / "6001240.ome.zarr" and scan.name == "s3://bucket/key/6001240"
    refuses(
        [url], "https://h/a_seg.ome.zarr is not on this machine", Path("https://h/a_seg.ome.zarr")
    )


def test_nothing_is_written_into_a_store_or_in_place_of_one_that_holds_the_scan(tmp_path):
    store = zarr_store(tmp_path / "a.ome.zarr")
    words = f"would be in the store {store}, which stays as it is; name .* with -o"
    refuses([store / "0"], words)
    refuses([store], words, store / "labels" / "seg.ome.zarr")
    refuses([store], words, f"{store / 'labels'}/")
    refuses([store / "0"], "a.ome.zarr holds an input; choose another", store, overwrite=True)
    (scan,) = found_of([store / "0"], tmp_path / "seg.ome.zarr", 1).to_segment
    assert scan.images == (store / "0",)


def test_an_empty_group_above_scans_is_no_store(tmp_path):
    """napari-ome-zarr leaves one two folders above a store of labels that it has opened."""
    scans = [*touch(tmp_path, "a.nii.gz"), zarr_store(tmp_path / "b.ome.zarr")]
    group = {"attributes": {}, "zarr_format": 3, "node_type": "group"}
    (tmp_path / "zarr.json").write_text(json.dumps(group, indent=2))
    assert len(found_of(scans, tmp_path / "out", 1).to_segment) == 2
    assert len(found_of([tmp_path], tmp_path / "out", 1).to_segment) == 2


def test_scans_whose_formats_differ_do_not_share_a_file_of_statistics(tmp_path):
    scans = [*touch(tmp_path, "a.nii.gz"), zarr_store(tmp_path / "a.ome.zarr")]
    assert len(found_of(scans, tmp_path / "out", 1).to_segment) == 2
    words = "would both be written to .*out/a.json; name one"
    refuses(scans, words, tmp_path / "out", statistics=True)


def test_a_store_named_by_a_dot_gives_its_name_to_the_result(tmp_path, monkeypatch):
    monkeypatch.chdir(zarr_store(tmp_path / "a.ome.zarr"))
    (scan,) = found_of([Path()], None, 1).to_segment
    assert scan.output == tmp_path / "a_seg.ome.zarr"


def test_a_picture_beside_volumes_is_no_scan(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    touch(tmp_path, "a.nii.gz")
    dicom_folder(tmp_path / "series")
    for place in (tmp_path, tmp_path / "series"):
        tifffile.imwrite(place / "overview.tif", np.zeros((4, 5), np.uint8))
    assert names(found_of([tmp_path], None, 1).to_segment) == ["a.nii.gz", "series"]
    assert names(found_of([tmp_path / "series"], None, 1).to_segment) == ["series"]


@pytest.mark.parametrize(
    ("ending", "package"), [(".tif", "tifffile"), (".zarr", "zarr"), (".ome.zarr", "zarr")]
)
def test_a_format_whose_package_is_missing_is_refused_early(tmp_path, monkeypatch, ending, package):
    scan = tmp_path / "a.nii.gz"
    write_volume(scan, noise((4, 4, 4)))
    monkeypatch.setitem(sys.modules, package, None)
    output = tmp_path / f"seg{ending}"
    with pytest.raises(VolumeError, match=f"writing {output} needs {package}: pip install"):
        refuse_early(PredictionRequest(images=(scan,), output=output))
