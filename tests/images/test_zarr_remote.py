"""Stores at URLs: of a local server that knows ranges, as those of clouds do."""

import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest

from tests.images.object_store import LocalServer
from tests.images.zarr_stores import VOXELS, store, zipped
from tests.products import by_night
from unet3d.errors import VolumeError
from unet3d.images.files import (
    is_collection,
    is_store,
    members,
    stands_for_volume,
    url_of,
    volume_stem,
    written_suffix,
)
from unet3d.images.image import open_image
from unet3d.images.label_names import read_label_names
from unet3d.images.labels import read_label, write_label
from unet3d.images.source import Reading

zarr_store = pytest.importorskip("unet3d.images.zarr_store")
pytest.importorskip("aiohttp")


class Server(LocalServer):
    """Serves the files of a folder; its behaviour is changed by tests."""

    wait_s, forbidden, knows_ranges, num_failures = 0.0, (), True, 0

    def __init__(self, folder):
        super().__init__(Handler)
        self.folder = folder


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        server, name = self.server, self.path.split("?")[0]
        time.sleep(server.wait_s)
        file = server.folder / name[1:]
        code, content, more = 200, b"", {}
        if server.num_failures:
            server.num_failures -= 1
            code = 503
        elif name.endswith(tuple(server.forbidden)):
            code = 403
        elif not file.is_file():
            code = 404
        else:
            content = file.read_bytes()
            asked = self.headers.get("Range", "").removeprefix("bytes=")
            if asked and server.knows_ranges:
                begin, _, end = asked.partition("-")
                first = int(begin) if begin else len(content) - int(end)
                last = min(int(end), len(content) - 1) if begin and end else len(content) - 1
                more = {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
                code, content = 206, content[first : last + 1]
        server.requests.append((name, code, len(content)))
        self.send_response(code)
        more |= {"Content-Length": str(len(content)), "Accept-Ranges": "bytes", "ETag": '"1"'}
        for key, value in more.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path):
    running = Server(tmp_path)
    thread = threading.Thread(target=running.serve_forever, args=(0.01,))
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def refusal(path, read=open_image):
    """Return the message of a refusal, after checking that it is one line with the URL."""
    with pytest.raises(VolumeError) as caught:
        read(path)
    message = str(caught.value)
    assert url_of(path) in message and "\n" not in message
    return message


@pytest.mark.parametrize("version", ["0.5", *by_night("0.4")])
def test_a_store_at_a_url_is_read(tmp_path, server, version):
    store(tmp_path / "scan.ome.zarr", version=version)
    path = Path(f"{server.url}/scan.ome.zarr")
    assert str(path).count("//") == 0 and url_of(path) == f"{server.url}/scan.ome.zarr"
    image = open_image(path)
    assert not any("c/" in name for name, *_ in server.requests)
    assert len(server.requests) < 12
    np.testing.assert_array_equal(image.whole()[0], VOXELS.T)
    coarse = open_image(path, reading=Reading(level=1))
    np.testing.assert_array_equal(coarse.whole()[0], VOXELS[::2, ::2, ::2].T)
    assert open_image(path / "1").geometry.spacing_mm == coarse.geometry.spacing_mm
    assert written_suffix(path) == ".ome.zarr" and volume_stem(path) == "scan"
    assert stands_for_volume(path) and is_store(path) and not is_collection(path)
    assert members(path) == (path,)


def test_chunks_of_shards_are_read_by_their_ranges(tmp_path, server):
    store(tmp_path / "scan.ome.zarr", num_levels=1)
    image = open_image(Path(server.url, "scan.ome.zarr"))
    server.requests.clear()
    box = (slice(3, 5), slice(8, 9), slice(0, 4))
    np.testing.assert_array_equal(image.read(box)[0], VOXELS.T[box])
    (_, _, index_bytes), (_, code, chunk_bytes) = server.requests
    assert index_bytes == 8 * 16 + 4 and code == 206 and chunk_bytes < 4 * 8 * 8 * 2 + 99
    server.knows_ranges = False
    np.testing.assert_array_equal(image.read(box)[0], VOXELS.T[box])  # from whole files
    np.testing.assert_array_equal(image.read()[0], VOXELS.T)


def test_a_zip_file_at_a_url_is_read(tmp_path, server):
    folder = store(tmp_path / "scan.ome.zarr")
    store(folder / "labels" / "cells", (VOXELS > 2000).astype(np.uint8))
    zipped(folder)
    path = Path(f"{server.url}/scan.ome.zarr.zip")
    np.testing.assert_array_equal(open_image(path).whole()[0], VOXELS.T)
    np.testing.assert_array_equal(read_label(path / "labels" / "cells").array, VOXELS.T > 2000)
    assert volume_stem(path) == "scan"


def test_labels_of_a_scan_at_a_url_name_it(tmp_path, server):
    store(tmp_path / "scan.ome.zarr")
    image = open_image(Path(server.url, "scan.ome.zarr"))
    write_label(tmp_path / "seg.ome.zarr", VOXELS.T // 2000, image.geometry, names={1: "cell"})
    path = Path(server.url, "seg.ome.zarr")
    assert read_label_names(path) == {1: "cell"}
    np.testing.assert_array_equal(read_label(path).array, VOXELS.T // 2000)
    assert (
        f'"image": "{server.url}/scan.ome.zarr"'
        in (tmp_path / "seg.ome.zarr/zarr.json").read_text()
    )


def test_a_bucket_is_read_without_credentials(tmp_path, server, monkeypatch):
    pytest.importorskip("s3fs")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    store(tmp_path / "bucket" / "scan.ome.zarr")
    np.testing.assert_array_equal(
        open_image(Path("s3://bucket/scan.ome.zarr")).whole()[0], VOXELS.T
    )


def test_addresses_without_a_store_are_refused(tmp_path, server, monkeypatch):
    monkeypatch.setattr(zarr_store, "TIMEOUT_S", 0.3)
    url = f"{server.url}/scan.ome.zarr"
    assert refusal(Path(url)).startswith(f"{url} is not a zarr store: it lacks")
    server.forbidden = ("json", "group", "array")
    assert refusal(Path(url)) == f"{url} may not be read; ask for the right to read it"
    server.wait_s = 1.0
    begin = time.monotonic()
    assert "did not answer in time; check the address" in refusal(Path(url))
    zarr_store.zarr_sync(zarr_store._end_reads())  # as a process does before it ends
    assert time.monotonic() - begin < 0.9
    assert "Connect call failed" in refusal(Path("http://127.0.0.1:1/a.zarr"))
    assert "Protocol not known: nothing" in refusal(Path("nothing://a.zarr"))


def test_a_server_that_fails_twice_is_asked_again(tmp_path, server):
    store(tmp_path / "scan.ome.zarr", num_levels=1)
    image = open_image(Path(server.url, "scan.ome.zarr"))
    box = (slice(3, 5), slice(8, 9), slice(0, 4))
    server.num_failures = 2
    np.testing.assert_array_equal(image.read(box)[0], VOXELS.T[box])
    other = (slice(19, 20), slice(8, 9), slice(0, 4))
    server.num_failures = 3
    assert "503" in refusal(Path(server.url, "scan.ome.zarr"), lambda path: image.read(other))


def test_chunks_that_may_not_be_read_are_refused(tmp_path, server):
    store(tmp_path / "scan.ome.zarr")
    server.forbidden = ("c/0/0/1",)
    message = refusal(Path(server.url, "scan.ome.zarr"), lambda path: open_image(path).read())
    assert "its voxels may not be read; ask for the right to" in message


def test_the_package_is_named_where_it_is_missing(monkeypatch):
    import fsspec

    def missing(url):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    assert refusal(Path("s3://bucket/a.zarr")) == (
        "reading s3://bucket/a.zarr needs a package: Install s3fs to access S3; for https and s3, "
        "pip install 'unet3d-parallel[remote]'"
    )
