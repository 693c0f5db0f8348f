import json
import shutil
import threading

import numpy as np
import pytest

from tests.images.samples import write_json, write_msd, write_volume
from unet3d.datasets.dataset import Case, load_dataset
from unet3d.errors import CacheError, VolumeError
from unet3d.preparation import case_boxes
from unet3d.preparation.case_boxes import boxes_of
from unet3d.preparation.cropping import Box
from unet3d.preparation.entries import json_checksum

SHAPE = (12, 14, 10)
BOXES = [
    Box(start=(0, 0, 0), stop=SHAPE),
    Box(start=(2, 0, 1), stop=(9, 14, 7)),
    Box(start=(11, 13, 9), stop=SHAPE),
]


@pytest.fixture
def cases(tmp_path):
    root = write_msd(tmp_path / "data", shape=SHAPE)
    for number, box in enumerate(BOXES):
        image = np.zeros(SHAPE, np.float32)
        image[box.slices] = np.random.default_rng(number).normal(100, 10, box.shape)
        write_volume(root / f"imagesTr/case_{number}.nii.gz", image)
    return load_dataset(root).cases


def found(cases, folder):
    return boxes_of(cases, [SHAPE] * len(cases), folder / "cache")


def test_boxes_are_found_once(cases, tmp_path, caplog):
    caplog.set_level("INFO")
    assert found(cases[:2], tmp_path) == BOXES[:2]
    assert found(cases, tmp_path) == BOXES
    assert found(cases[::-1], tmp_path) == BOXES[::-1]
    read = [message.split(" cases")[0] for message in caplog.messages]
    assert read == ["reading 2 of 2", "reading 1 of 3"]


def test_a_changed_image_has_a_box_of_its_own_in_which_all_channels_count(tmp_path):
    paths = (tmp_path / "a.nii", tmp_path / "b.nii")
    case = Case(name="case", images=paths, label=tmp_path / "unused.nii")
    for first, expected in (
        ((1, 5, 5), Box(start=(1, 2, 5), stop=(9, 6, 10))),
        ((9, 1, 9), Box(start=(8, 1, 9), stop=(10, 3, 10))),
    ):
        for path, place in zip(paths, (first, (8, 2, 9)), strict=True):
            image = np.zeros(SHAPE, np.float32)
            image[place] = 1
            write_volume(path, image)
        assert found((case,), tmp_path) == [expected]


def test_damaged_records_are_made_anew(cases, tmp_path, caplog):
    found(cases, tmp_path)
    records = sorted((tmp_path / "cache" / "boxes").iterdir())
    assert len(records) == len(cases)
    caplog.set_level("INFO")
    plain = {"start": [0, 0, 0], "stop": [1, 1, 1]}
    beyond = {"start": [0, 0, 0], "stop": [99, 14, 10]}
    beyond["checksum"] = json_checksum(beyond)
    damages = [{"start": [1, 1, 1]}, {"stop": [0, 0, 0]}, {"stop": "12"}, beyond, None]
    for changes in damages:
        for record in records:
            tree = json.loads(record.read_text())
            write_json(record, plain if changes is None else {**tree, **changes})
        assert found(cases, tmp_path) == found(cases, tmp_path) == BOXES, changes
    assert len([line for line in caplog.messages if "reading 3 of 3" in line]) == len(damages)


def test_what_cannot_be_read_or_written_is_named(cases, tmp_path):
    path = cases[1].images[0]
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(VolumeError, match=path.name):
        found(cases, tmp_path)
    for thread in threading.enumerate():
        if thread.name == "ahead":  # which may write yet
            thread.join(10)
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CacheError, match="set data.cache"):
        found(cases, tmp_path)


def test_nobody_waits_for_images_that_are_no_longer_wanted(cases, tmp_path, monkeypatch):
    reading, may_end = threading.Event(), threading.Event()

    def opened(images):
        assert threading.current_thread().daemon  # nor does a process that ends
        if images == cases[0].images:
            assert reading.wait(10)
            raise VolumeError("damaged")
        reading.set()
        assert may_end.wait(60)

    monkeypatch.setattr(case_boxes, "open_channels", opened)
    monkeypatch.setattr(case_boxes, "num_cores", lambda: 2)
    with pytest.raises(VolumeError, match="damaged"):
        found(cases, tmp_path)
    assert not may_end.is_set()
    may_end.set()
