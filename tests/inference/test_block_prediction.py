"""A store that several processes fill: every block right, whoever dies, and nothing else left."""

import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from unet3d.errors import VolumeError

zarr = pytest.importorskip("zarr")

from tests.images.samples import write_volume  # noqa: E402
from unet3d.images.image import open_image  # noqa: E402
from unet3d.images.label_store import LabelStore  # noqa: E402
from unet3d.inference import block_prediction  # noqa: E402
from unet3d.inference.block_prediction import Part, fill, work_folder  # noqa: E402

SHAPE = (300, 200, 260)


def labels_of(box):
    """Return labels that tell every voxel from its neighbours."""
    x, y, z = (np.arange(part.start, part.stop) for part in box)
    return (x[:, None, None] * 7 + y[:, None] * 13 + z * 29).astype(np.uint8)


def new_store(path):
    scan = write_volume(path.parent / "scan.nii", np.zeros(SHAPE, np.uint8), (0.5, 1, 1))
    path.mkdir()
    LabelStore.create(path, open_image(scan).geometry, np.uint8, {1: "one"}, block=128)


def assert_complete(path):
    whole = labels_of([slice(0, size) for size in SHAPE]).T
    group = zarr.open_group(path, mode="r")
    np.testing.assert_array_equal(group["0"][:], whole)
    # Voxels along X are half as wide, so level 1 has every second one along X only.
    np.testing.assert_array_equal(group["1"][:], whole[:, :, ::2])
    files = {file.name for file in path.rglob("*") if file.is_file()}
    assert {name for name in files if not name.isdecimal()} == {"zarr.json"}
    assert {file.name for file in path.parent.iterdir()} == {"scan.nii", path.name}


def test_one_process_fills_the_store(tmp_path):
    path, done = tmp_path / "labels.ome.zarr", []
    new_store(path)
    assert fill(path, labels_of, blocks_done=lambda *both: done.append(both))
    assert_complete(path)
    assert done == sorted(done)
    assert done[-1] == (18, 18)


def test_parts_complete_it_together(tmp_path):
    path, computed = tmp_path / "labels.ome.zarr", []
    new_store(path)

    def compute(box):
        computed.append(str(box))
        return labels_of(box)

    assert not fill(path, compute, Part(1, 3))
    assert not fill(path, compute, Part(3, 3))
    assert len(computed) == 12
    assert fill(path, compute, Part(2, 3))
    assert len(set(computed)) == len(computed) == 18
    assert_complete(path)


def test_a_block_that_fails_is_named_after_all_others_are_done(tmp_path):
    path = tmp_path / "labels.ome.zarr"
    new_store(path)
    computed = []

    def compute(box):
        if box[0].start == 128 and box[1].start == box[2].start == 0:
            raise VolumeError("a chunk is damaged")
        computed.append(box)
        return labels_of(box)

    with pytest.raises(VolumeError, match="1 block of 18 .* x 128 to 256, .*: a chunk is damaged"):
        fill(path, compute)
    assert len(computed) == 17
    assert fill(path, labels_of)  # once it is repaired
    assert_complete(path)


def test_an_interruption_gives_the_block_back(tmp_path):
    path = tmp_path / "labels.ome.zarr"
    new_store(path)

    def interrupted(box):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill(path, interrupted)
    assert not list((work_folder(path) / "claims").iterdir())
    assert fill(path, labels_of)
    assert_complete(path)


WORKER = """
import sys, time
from pathlib import Path
from tests.inference.test_block_prediction import labels_of
from unet3d.inference import block_prediction
block_prediction.POLL_SECONDS = 0.05
def compute(box):
    time.sleep(float(sys.argv[2]))
    return labels_of(box)
block_prediction.fill(Path(sys.argv[1]), compute)
"""


def begin(path, seconds=0.05):
    return subprocess.Popen([sys.executable, "-c", WORKER, str(path), str(seconds)])


def test_a_frozen_process_harms_nothing(tmp_path, monkeypatch):
    path = tmp_path / "labels.ome.zarr"
    new_store(path)
    frozen = begin(path, 0.3)
    claims = work_folder(path) / "claims"
    while not claims.exists() or not list(claims.iterdir()):
        time.sleep(0.05)
    frozen.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(block_prediction, "POLL_SECONDS", 0.05)
    monkeypatch.setattr("unet3d.inference.tasks.LEASE_SECONDS", 0.5)
    monkeypatch.setattr(block_prediction.Tasks.__init__, "__defaults__", (0.5,))
    assert fill(path, labels_of)
    assert_complete(path)
    frozen.send_signal(signal.SIGCONT)
    assert frozen.wait(60) == 0
    assert_complete(path)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_ten_kills_lose_nothing(tmp_path, seed):
    path = tmp_path / "labels.ome.zarr"
    new_store(path)
    rng = random.Random(seed)
    workers = [begin(path) for _ in range(4)]
    for _ in range(10):
        time.sleep(rng.uniform(0.1, 1.0))
        index = rng.randrange(len(workers))
        workers[index].kill()
        workers[index].wait()
        workers[index] = begin(path)
    assert [worker.wait(300) for worker in workers] == [0] * len(workers)
    assert_complete(path)
