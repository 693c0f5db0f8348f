import errno
import json
import os
import tracemalloc

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.images.samples import noise, write_volume
from unet3d.errors import ResultExistsError, VolumeError
from unet3d.images.image import open_image
from unet3d.images.labels import read_label, write_label
from unet3d.inference.request import PredictionRequest
from unet3d.inference.scans import (
    Scan,
    is_whole,
    label_statistics,
    read_scan,
    result_file,
    write_segmentation,
    write_statistics,
)


@pytest.fixture
def header(tmp_path):
    return open_image(write_volume(tmp_path / "scan.nii", noise((4, 4, 4)))).geometry


LABELS = np.zeros((4, 4, 4), np.uint8)


def test_what_somebody_else_has_written_in_the_meantime_is_kept(tmp_path, header):
    scan = Scan(images=(header.path,), output=tmp_path / "scan_seg.nii.gz")
    results = scan.results(PredictionRequest(statistics=True))
    assert results == [scan.output, scan.beside("statistics")]
    for path in results:
        path.write_text("theirs")
    with pytest.raises(ResultExistsError, match="scan_seg.nii.gz was made by another process mean"):
        write_segmentation(scan, LABELS, header, {})
    assert [path.read_text() for path in results] == ["theirs", "theirs"]
    write_segmentation(scan, LABELS, header, {}, overwrite=True)
    assert read_label(scan.output).array.shape == (4, 4, 4)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"scan.nii", "scan_seg.json", "scan_seg.nii.gz"}


def test_a_file_beside_a_segmentation_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "scan_seg.png"
    with pytest.raises(VolumeError, match="cannot write .*png: No space left on device; choose"):
        with result_file(path, overwrite=False) as unfinished:
            unfinished.write_text("half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not list(tmp_path.iterdir())
    with result_file(path, overwrite=False) as unfinished:
        unfinished.write_text("whole")
        assert not path.exists()
    with pytest.raises(ResultExistsError, match="scan_seg.png was made by another process mean"):
        with result_file(path, overwrite=False) as unfinished:
            unfinished.write_text("other")
    assert path.read_text() == "whole"
    with result_file(path, overwrite=True) as unfinished:
        unfinished.write_text("other")
    assert path.read_text() == "other" and list(tmp_path.iterdir()) == [path]


def test_statistics_are_those_of_numpy(tmp_path):
    array = noise((6, 5, 4, 2))
    path = write_volume(tmp_path / "scan.nii.gz", array, (0.5, 2, 3))
    scan = Scan(images=(path,), output=tmp_path / "mine.nii.gz")
    labels = np.zeros((6, 5, 4), np.uint16)
    labels[:2, 1:3, 1] = 7
    labels[5, 4, 3] = 300
    found = label_statistics(labels, read_scan(scan), {7: "seven", 300: "corner", 9: "absent"})
    inside = array[:2, 1:3, 1].reshape(4, 2).astype(np.float64)
    assert list(found) == ["seven", "corner", "absent"]
    assert (found["seven"]["value"], found["seven"]["num_voxels"]) == (7, 4)
    assert found["seven"]["volume_ml"] == pytest.approx(4 * 0.5 * 2 * 3 / 1000)
    for channel, values in enumerate(inside.T):
        expected = {"mean": values.mean(), "standard_deviation": values.std()}
        expected |= {"minimum": values.min(), "maximum": values.max()}
        assert found["seven"]["intensity"][channel] == pytest.approx(expected)
    assert found["corner"]["intensity"][1]["standard_deviation"] == 0
    assert found["corner"]["intensity"][0]["mean"] == array[5, 4, 3, 0]
    nothing = {"value": 9, "num_voxels": 0, "volume_ml": 0, "intensity": [None, None]}
    assert found["absent"] == nothing
    write_statistics(scan.beside("statistics"), scan, found, ["a.pt", "b.pt"])
    content = json.loads((tmp_path / "mine.json").read_text())
    assert content == {"image": [str(path)], "checkpoints": ["a.pt", "b.pt"], "labels": found}


def test_statistics_of_several_parts_are_those_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("unet3d.images.image.PIECE_VOXELS", 100)
    array = 1e4 + noise((16, 15, 14))
    path = write_volume(tmp_path / "scan.nii.gz", array.astype(np.float32))
    labels = np.random.default_rng(0).integers(0, 3, array.shape).astype(np.uint8)
    labels[:, :, 3:9] = 0
    found = label_statistics(labels, open_image(path), {1: "one", 2: "two"})
    for name, value in (("one", 1), ("two", 2)):
        inside = array.astype(np.float32)[labels == value].astype(np.float64)
        assert found[name]["num_voxels"] == inside.size
        expected = {"mean": inside.mean(), "standard_deviation": inside.std()}
        expected |= {"minimum": inside.min(), "maximum": inside.max()}
        assert found[name]["intensity"] == [pytest.approx(expected, rel=1e-9)]


def test_statistics_take_no_memory_by_the_value_of_a_label(tmp_path):
    """Label values may be large, such as the registry numbers of Allen's atlas."""
    path = write_volume(tmp_path / "scan.nii.gz", noise((6, 5, 4)))
    labels = np.zeros((6, 5, 4), np.uint32)
    labels[1], labels[2, 3] = 614454277, 2**32 - 1
    image = read_scan(Scan(images=(path,), output=tmp_path / "mine.nii.gz"))
    label_statistics(np.zeros_like(labels), image, {})  # imports modules before memory is measured
    tracemalloc.start()
    found = label_statistics(labels, image, {2**32 - 1: "last", 614454277: "area", 10**8: "absent"})
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()
    assert [found[name]["num_voxels"] for name in ("last", "area", "absent")] == [4, 20, 0]


@pytest.mark.parametrize("ending", [".nii.gz", ".nii", ".json", ".png", ".npy"])
def test_a_result_that_is_cut_off_is_not_whole(ending, tmp_path, header):
    path = tmp_path / f"scan{ending}"
    if ending == ".json":
        path.write_text('{"labels": {}}')
    elif ending == ".png":
        Figure((1, 1)).savefig(path)
    elif ending == ".npy":
        np.save(path, np.zeros((3, 4, 5), np.float16))
    else:
        write_label(path, LABELS, header)
    assert is_whole(path)
    content = path.read_bytes()
    for length in (0, 1, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        assert not is_whole(path), length
    path.unlink()
    assert not is_whole(path)
