"""A store that several processes fill: every block right, whoever dies, and nothing else left."""

import shutil
import signal
import subprocess
import sys
import time

import nibabel as nib
import numpy as np
import pytest

import unet3d
from unet3d.atomic import HOST
from unet3d.errors import ConfigError, ResultExistsError, VolumeError

zarr = pytest.importorskip("zarr")

from tests.images.orientations import turn_to  # noqa: E402
from tests.images.samples import noise, write_volume  # noqa: E402
from tests.inference.block_labels import SHAPE, ahead, labels_of, with_kills  # noqa: E402
from tests.networks import write_checkpoint  # noqa: E402
from unet3d.images.image import open_image  # noqa: E402
from unet3d.images.label_names import read_label_names  # noqa: E402
from unet3d.images.label_store import LabelStore  # noqa: E402
from unet3d.images.labels import read_label  # noqa: E402
from unet3d.inference import block_filling  # noqa: E402
from unet3d.inference.block_filling import Part, fill, work_folder  # noqa: E402
from unet3d.inference.block_prediction import Status, status  # noqa: E402


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
    (path / "0" / "0.partial").touch()  # of a process that was killed
    assert fill(path, ahead(labels_of), blocks_done=lambda *both: done.append(both))
    assert_complete(path)
    assert done == sorted(done)
    assert done[-1] == (18, 18)


def test_blocks_of_background_have_files_as_all_others(tmp_path):
    path = tmp_path / "labels.ome.zarr"
    new_store(path)
    whole = labels_of([slice(0, size) for size in SHAPE])
    whole[:, :128] = 0  # of the first level, half of the blocks
    assert fill(path, ahead(lambda box: whole[box] if box[1].start else None))
    files = [file for file in (path / "0" / "c").rglob("*") if file.is_file()]
    assert len(files) == 18
    np.testing.assert_array_equal(read_label(path).array, whole)
    np.testing.assert_array_equal(read_label(path / "1").array, whole[::2])
    files[0].unlink()
    with pytest.raises(VolumeError, match="lacks its file"):
        read_label(path)


def test_parts_complete_it_together(tmp_path):
    path, computed = tmp_path / "labels.ome.zarr", []
    new_store(path)

    def compute(box):
        computed.append(str(box))
        return labels_of(box)

    assert not fill(path, ahead(compute), Part(1, 3))
    assert not fill(path, ahead(compute), Part(3, 3))
    assert len(computed) == 12
    assert fill(path, ahead(compute), Part(2, 3))
    assert len(set(computed)) == len(computed) == 18
    assert_complete(path)


def test_what_was_done_is_forgotten_with_the_store(tmp_path):
    path = tmp_path / "labels.ome.zarr"
    new_store(path)
    assert not fill(path, ahead(labels_of), Part(1, 3))
    shutil.rmtree(path)
    new_store(path)
    assert fill(path, ahead(labels_of))
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
        fill(path, ahead(compute))
    assert len(computed) == 17
    assert fill(path, ahead(labels_of))  # once it is repaired
    assert_complete(path)


def test_a_block_that_cannot_be_written_is_given_back(tmp_path):
    path = tmp_path / "labels.ome.zarr"
    new_store(path)
    (path / "0" / "c").touch()  # where a folder must be
    with pytest.raises(OSError, match="labels.ome.zarr") as caught:
        fill(path, ahead(labels_of))
    assert caught.value.filename == str(path)
    assert [list(folder.iterdir()) for folder in work_folder(path).iterdir()] == [[], []]


def test_an_interruption_gives_the_block_back(tmp_path):
    path = tmp_path / "labels.ome.zarr"
    new_store(path)

    def interrupted(box):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill(path, ahead(interrupted))
    assert not list((work_folder(path) / "claims").iterdir())
    assert fill(path, ahead(labels_of))
    assert_complete(path)


def test_the_next_block_is_begun_before_one_is_computed(tmp_path):
    path, order = tmp_path / "labels.ome.zarr", []
    new_store(path)

    def begin(box, soon):
        order.append(("begun", box))

        def labels():
            soon()
            order.append(("computed", box))
            return labels_of(box)

        return labels

    assert fill(path, begin)
    assert_complete(path)
    first, *others = [box for what, box in order if what == "begun"]
    wanted = [("begun", first)]
    for before, box in zip([first, *others], others, strict=False):
        wanted += [("begun", box), ("computed", before)]
    assert order == [*wanted, ("computed", others[-1])]


def test_the_status_says_what_is_done(tmp_path):
    path = tmp_path / "labels.ome.zarr"
    new_store(path)
    assert status(path) == Status(is_complete=False, num_blocks=18)
    assert not fill(path, ahead(labels_of), Part(1, 3))
    (work_folder(path) / "claims" / "0-1.0").write_text(HOST)  # of a process that is dead
    found = status(path)
    assert 0 < found.seconds_left < 60
    assert found[:5] == (False, 18, 6, 0, 1)
    fill(path, ahead(labels_of))
    assert status(path) == Status(is_complete=True, num_blocks=18, done=18)
    for name in (".", "none.ome.zarr"):
        with pytest.raises(ConfigError, match="is not a store that is written in blocks"):
            status(tmp_path / name)
    assert not (tmp_path / "none.ome.zarr").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a checkpoint and a scan whose windows lie alike in the whole and in blocks."""
    folder = tmp_path_factory.mktemp("trained")
    path = write_checkpoint(folder / "network.pt", changes=("training.precision=float32",))
    scan = nib.Nifti1Image(noise((136, 16, 136)), np.diag([1.0, 1.0, 2.0, 1.0]))
    turned = scan.as_reoriented(turn_to("LIP", scan.affine))
    nib.save(turned, folder / "scan.nii")
    return path, folder / "scan.nii"


def test_blocks_give_the_labels_of_the_whole(trained, tmp_path):
    network, scan = trained
    (whole,) = unet3d.predict(scan, network, output=tmp_path / "whole.nii.gz", devices="cpu")
    (blocks,) = unet3d.predict(
        scan, network, output=tmp_path / "blocks.ome.zarr", devices="cpu", block=128
    )
    expected = read_label(whole)
    assert len(LabelStore(blocks).blocks(0)) == 4
    np.testing.assert_array_equal(read_label(blocks).array, expected.array)
    assert read_label_names(blocks) == read_label_names(whole)


@pytest.mark.nightly
def test_a_store_that_was_begun_otherwise_is_refused(trained, tmp_path):
    network, scan = trained
    path = tmp_path / "blocks.ome.zarr"
    asked = {"devices": "cpu", "output": path, "block": 128}
    unet3d.predict(scan, network, **asked, part=(1, 2))
    with pytest.raises(ConfigError, match="was begun with another settings; go on with the same"):
        unet3d.predict(scan, network, **asked, overlap=0.25)
    other = write_checkpoint(tmp_path / "other.pt", seed=8)
    with pytest.raises(ConfigError, match="was begun with another network; go on"):
        unet3d.predict(scan, other, **asked)
    assert unet3d.predict(scan, network, **asked) == (path,)
    with pytest.raises(ResultExistsError):
        unet3d.predict(scan, network, **asked)
    unet3d.predict(scan, other, **asked, overwrite=True)
    assert LabelStore(path).is_complete


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": "x.nii.gz", "block": 128}, "cannot be written in blocks"),
        ({"output": "x.ome.zarr", "block": 100}, "multiple of 128"),
        ({"output": "x.ome.zarr", "part": (1, 2), "statistics": True}, "leave out --statistics"),
        ({"output": "x.ome.zarr", "part": (0, 2)}, "part must be a number .*, but is 0/2"),
        ({"output": "x.ome.zarr", "part": (3, 2)}, "part must be a number .*, but is 3/2"),
    ],
)
def test_what_blocks_cannot_do_is_refused(trained, tmp_path, options, message):
    network, scan = trained
    options = {**options, "output": tmp_path / options["output"]}
    with pytest.raises(ConfigError, match=message):
        unet3d.predict(scan, network, devices="cpu", **options)
    assert not list(tmp_path.iterdir())


WORKER = """
import sys, time
from pathlib import Path
from tests.inference.block_labels import ahead, labels_of
from unet3d.inference import block_filling
block_filling.POLL_SECONDS = 0.05
def compute(box):
    time.sleep(float(sys.argv[2]))
    return labels_of(box)
block_filling.fill(Path(sys.argv[1]), ahead(compute))
"""


def begin(path, seconds=0.05):
    return subprocess.Popen([sys.executable, "-c", WORKER, str(path), str(seconds)])


@pytest.mark.nightly
def test_a_frozen_process_harms_nothing(tmp_path, monkeypatch):
    path = tmp_path / "labels.ome.zarr"
    new_store(path)
    frozen = begin(path, 0.3)
    claims = work_folder(path) / "claims"
    while not claims.exists() or not list(claims.iterdir()):
        time.sleep(0.05)
    frozen.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(block_filling, "POLL_SECONDS", 0.05)
    monkeypatch.setattr("unet3d.inference.tasks.LEASE_SECONDS", 0.5)
    monkeypatch.setattr(block_filling.Tasks.__init__, "__defaults__", (0.5,))
    assert fill(path, ahead(labels_of))
    assert_complete(path)
    frozen.send_signal(signal.SIGCONT)
    assert frozen.wait(60) == 0
    assert_complete(path)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_ten_kills_lose_nothing(tmp_path, seed):
    path = tmp_path / "labels.ome.zarr"
    new_store(path)
    assert with_kills(lambda: begin(path), seed, 1) == {0}
    assert_complete(path)


def test_devices_that_share_windows_cannot_compute_blocks(trained, tmp_path):
    network, scan = trained
    with pytest.raises(ConfigError, match="devices that each have whole windows"):
        unet3d.predict(
            *(scan, network),
            output=tmp_path / "x.ome.zarr",
            devices=["cpu", "cpu"],
            parallel="spatial",
            block=128,
        )
    assert not list(tmp_path.iterdir())
