"""Blocks in an object store: every block right, whoever dies, and nothing else left."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import unet3d
from unet3d.errors import ConfigError, ResultExistsError

zarr = pytest.importorskip("zarr")
s3fs = pytest.importorskip("s3fs")

from fsspec.asyn import sync  # noqa: E402

from tests.images.object_store import ObjectStore  # noqa: E402
from tests.images.samples import noise, write_volume  # noqa: E402
from tests.inference.block_labels import ahead, labels_of, with_kills  # noqa: E402
from tests.networks import write_checkpoint  # noqa: E402
from unet3d.images.image import open_image  # noqa: E402
from unet3d.images.label_store import LabelStore  # noqa: E402
from unet3d.images.labels import read_label  # noqa: E402
from unet3d.inference import block_filling  # noqa: E402
from unet3d.inference.block_filling import Part, fill  # noqa: E402
from unet3d.inference.block_prediction import Status, status  # noqa: E402

URL = "s3://bucket/run/labels.ome.zarr"
PATH = Path(URL)
SHAPE = (260, 130, 20)


@pytest.fixture
def store(monkeypatch, tmp_path):
    """Run a server, to which s3:// leads in this process and in those that it starts."""
    running = ObjectStore()
    values = {
        "AWS_ENDPOINT_URL": running.url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(block_filling, "POLL_SECONDS", 0.02)
    caches = []

    def connect_anew():
        caches.append({})
        monkeypatch.setattr(s3fs.S3FileSystem, "_cache", caches[-1])

    running.connect_anew = connect_anew
    connect_anew()
    thread = threading.Thread(target=running.serve_forever, args=(0.01,))
    thread.start()
    yield running
    for files in [files for cache in caches for files in cache.values()]:
        loop = zarr.core.sync._get_loop() if files.asynchronous else files.loop
        if files._s3 is not None:
            sync(loop, files._s3.__aexit__, None, None, None)
    running.shutdown()
    thread.join()
    running.server_close()


def new_store(tmp_path, dtype=np.uint8):
    scan = write_volume(tmp_path / "scan.nii", np.zeros(SHAPE, np.uint8), (0.5, 1, 1))
    LabelStore.create(PATH, open_image(scan).geometry, dtype, {1: "one"}, block=128)


def assert_complete(store):
    whole = labels_of([slice(0, size) for size in SHAPE])
    np.testing.assert_array_equal(read_label(PATH).array, whole)
    np.testing.assert_array_equal(read_label(PATH / "1").array, whole[::2])
    names = {name.rpartition("/")[2] for name in store.objects}
    assert {name for name in names if not name.isdecimal()} == {"zarr.json"}


WORKER = """
import sys, time
from pathlib import Path
from tests.inference.block_labels import ahead, labels_of
from unet3d.inference import block_filling
block_filling.POLL_SECONDS = 0.02
block_filling.Tasks.__init__.__defaults__ = (2.0,)
def compute(box):
    time.sleep(0.2)
    return labels_of(box)
block_filling.fill(Path(sys.argv[1]), ahead(compute))
"""


def begin():
    return subprocess.Popen([sys.executable, "-c", WORKER, str(PATH)])


@pytest.mark.nightly
def test_a_frozen_process_harms_nothing(tmp_path, store, monkeypatch):
    new_store(tmp_path)
    frozen = begin()
    while not any("/claims/" in name for name in list(store.objects)):
        time.sleep(0.05)
    frozen.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(block_filling.Tasks.__init__, "__defaults__", (1.0,))
    assert fill(PATH, ahead(labels_of))
    assert_complete(store)
    frozen.send_signal(signal.SIGCONT)
    assert frozen.wait(60) == 0
    assert_complete(store)


@pytest.mark.nightly
def test_ten_kills_lose_nothing(tmp_path, store):
    new_store(tmp_path)
    assert with_kills(begin, 0, 4) == {0}
    assert_complete(store)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a checkpoint and a scan of four blocks."""
    folder = tmp_path_factory.mktemp("trained")
    path = write_checkpoint(folder / "network.pt", changes=("training.precision=float32",))
    return path, write_volume(folder / "scan.nii", noise((136, 16, 136)), (1.0, 1.0, 2.0))


def predict(trained, **asked):
    network, scan = trained
    asked = {"output": URL, "block": 128} | asked
    return unet3d.predict(scan, network, devices="cpu", **asked)


def test_a_bucket_gets_the_labels_of_a_folder(trained, tmp_path, store):
    (whole,) = predict(trained, output=tmp_path / "whole.nii.gz", block=None)
    assert predict(trained, part=(1, 2)) == (PATH,)
    assert status(PATH)[:4] == (False, 4, 2, 0)
    with pytest.raises(ConfigError, match=f"{URL} was begun with another settings"):
        predict(trained, overlap=0.25)
    predict(trained, block=None)
    assert status(PATH) == Status(is_complete=True, num_blocks=4, done=4)
    np.testing.assert_array_equal(read_label(PATH).array, read_label(whole).array)
    with pytest.raises(ResultExistsError, match=f"{URL} exists; add --overwrite"):
        predict(trained)
    before = dict(store.objects)
    predict(trained, overlap=0.25, overwrite=True)
    assert before.keys() == store.objects.keys() and LabelStore(PATH).is_complete
    assert all(before[name][1] < store.objects[name][1] for name in before)


@pytest.mark.parametrize("conditions", ["ignored", "refused"])
@pytest.mark.nightly
def test_a_store_without_conditional_writes_takes_parts(trained, tmp_path, store, conditions):
    store.conditions = conditions
    with pytest.raises(ConfigError, match="without conditional writes, .*--part K/N"):
        predict(trained)
    assert not store.objects
    new_store(tmp_path)
    assert not fill(PATH, ahead(labels_of), Part(1, 2))
    assert fill(PATH, ahead(labels_of), Part(2, 2))
    assert_complete(store)


def test_only_stores_that_were_written_here_are_replaced(trained, store):
    store.objects["run/labels.ome.zarr/.zgroup"] = b'{"zarr_format": 2}', 0.0
    before = dict(store.objects)
    with pytest.raises(ResultExistsError, match="exists"):
        predict(trained)
    with pytest.raises(ConfigError, match="is not a store that is written in blocks"):
        predict(trained, overwrite=True)
    assert store.objects == before


def test_a_store_whose_maker_was_killed_is_made(tmp_path, store):
    new_store(tmp_path)
    made = store.objects.pop("run/labels.ome.zarr/zarr.json")[0]
    new_store(tmp_path)
    assert store.objects["run/labels.ome.zarr/zarr.json"][0] == made
    with pytest.raises(FileExistsError):
        new_store(tmp_path)
    del store.objects["run/labels.ome.zarr/zarr.json"]
    with pytest.raises(ConfigError, match=f"{URL} holds 0/zarr.json of another store"):
        new_store(tmp_path, np.uint16)


@pytest.mark.nightly
def test_errors_name_the_bucket(tmp_path, store, trained, monkeypatch):
    new_store(tmp_path)

    def forbidding(box):
        store.forbidden = ("PUT", "DELETE")
        return labels_of(box)

    with pytest.raises(PermissionError, match=URL):
        fill(PATH, ahead(forbidding))
    store.forbidden = ()
    with pytest.raises(FileNotFoundError, match="bucket does not exist: 's3://other/x.ome.zarr'"):
        predict(trained, output="s3://other/x.ome.zarr")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    store.connect_anew()
    with pytest.raises(OSError, match="Unable to locate credentials") as caught:
        predict(trained, output="s3://bucket/x.ome.zarr")
    assert caught.value.filename == "s3://bucket/x.ome.zarr"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": "s3://bucket/x.nii.gz", "block": None}, "is not on this machine; name a file"),
        ({"output": "https://h/x.ome.zarr"}, "https://h/x.ome.zarr is not on this machine"),
        ({"statistics": True, "block": None}, f"{URL} is written in blocks; leave out --stat"),
    ],
)
def test_what_cannot_be_written_to_urls_is_refused(trained, options, message):
    with pytest.raises(ConfigError, match=message):
        predict(trained, **options)
