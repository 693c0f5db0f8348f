"""The values that ranks of one machine tell one another through a folder."""

import os
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from unet3d.distributed.value_store import FolderStore
from unet3d.errors import LostRankError, RankError


def test_it_keeps_what_pytorchs_store_keeps(tmp_path):
    ours, theirs = FolderStore(tmp_path / "store"), dist.HashStore()
    for store in (ours, theirs):
        store.set("a/../b", "a long value")
        store.set("a/../b", "short")
        store.set("empty", "")
        assert store.get("a/../b") == b"short"
        assert store.get("empty") == b""
        assert store.check(["a/../b", "empty"])
        assert not store.check(["empty", "absent"])
        assert store.delete_key("empty") and not store.delete_key("absent")
        assert not store.check(["empty"])
        with pytest.raises(dist.DistStoreError):
            store.wait(["absent"], timedelta(seconds=0.05))
    assert os.listdir(tmp_path) == ["store"]


def test_a_reader_never_sees_half_of_two_values(tmp_path):
    store, wrong = FolderStore(tmp_path), []
    values = [letter * 3000 for letter in "abc"]
    store.set("key", values[0])

    def read():
        wrong.extend(x for x in (store.get("key").decode() for _ in range(300)) if x not in values)

    reader = threading.Thread(target=read)
    reader.start()
    while reader.is_alive():
        for value in values:
            store.set("key", value)
    assert wrong == []


def test_many_notes_take_the_room_of_one_and_half_of_a_note_is_not_read(tmp_path):
    store = FolderStore(tmp_path)
    for step in range(1000):
        store.set("note/0", f"step {step:4}")
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size < 100 and store.get("note/0") == b"step  999"
    os.truncate(path, 10)
    with pytest.raises(LostRankError, match="ended while it wrote"):
        store.get("note/0")


def test_a_folder_that_is_gone_is_explained(tmp_path):
    store = FolderStore(tmp_path / "store")
    (tmp_path / "store").rmdir()
    with pytest.raises(RankError, match="cannot meet in .*TMPDIR"):
        store.set("key", "value")
