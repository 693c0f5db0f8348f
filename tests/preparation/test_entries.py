"""Entries of the cache, whatever somebody or something has done to them."""

import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.mutations import damaged, property_test
from unet3d.preparation.cache import Cache, CaseRecord
from unet3d.preparation.entries import read_entry

IMAGE = np.arange(2 * 4 * 5 * 6, dtype=np.float32).reshape(2, 4, 5, 6)
LABEL = (IMAGE[0] % 3).astype(np.uint8)
FILES = ("image.npy", "label.npy", "foreground.npy", "components.npy", "entry.json")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Return an entry that is as it was written."""
    folder = tmp_path_factory.mktemp("cache")
    save(Cache(folder))
    return folder / "prepared" / "key"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return a cache for damaged entries, whose disk is not waited for."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: None)
        yield Cache(tmp_path_factory.mktemp("damaged"))


def save(cache):
    cache.save_case("key", IMAGE, LABEL, (1.0, 1.5, 2.0), 3)


def assert_is_sound(case):
    np.testing.assert_array_equal(case.image(), IMAGE)
    np.testing.assert_array_equal(case.label(), LABEL)
    assert case.spacing_mm == (1.0, 1.5, 2.0)
    foreground = case.foreground()
    assert foreground.components(0) == []
    for value in (1, 2):
        voxels = np.concatenate(foreground.components(value))
        np.testing.assert_array_equal(np.sort(voxels), np.flatnonzero(LABEL == value))


def assert_is_repaired(cache, sound, damage):
    """Damage a copy of an entry, and see that nothing else than what was written comes out."""
    folder = cache.folder / "prepared" / "key"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder)
    damage(folder)
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("unet3d.preparation.cache").addHandler(handler)
    try:
        case = cache.load_case("key", "case")
    finally:
        logging.getLogger("unet3d.preparation.cache").removeHandler(handler)
    if case is None:
        (line,) = said
        assert "is damaged" in line and line.isprintable() and len(line) < 500
        save(cache)
        case = cache.load_case("key", "case")
    assert_is_sound(case)


@partial(property_test, share=0.5)
@given(data=st.data(), name=st.sampled_from(FILES))
def test_damaged_bytes_are_never_used(cache, sound, data, name):
    content = data.draw(damaged((sound / name).read_bytes()))
    assert_is_repaired(cache, sound, lambda entry: (entry / name).write_bytes(content))


REPLACEMENTS = (
    lambda path: None,
    os.mkdir,
    os.mkfifo,
    lambda path: path.symlink_to(path.name),
    lambda path: path.symlink_to("/dev/zero"),
    lambda path: (path.touch(), os.truncate(path, 2**40)),
    lambda path: shutil.copy(next(path.parent.iterdir()), path),
)


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_of_the_entry_is_not_waited_for(cache, sound, name):
    def replace(entry, make):
        (entry / name).unlink()
        make(entry / name)

    for make in REPLACEMENTS:
        assert_is_repaired(cache, sound, partial(replace, make=make))


def test_several_writers_repair_one_entry(cache, sound):
    folder = cache.folder / "prepared" / "key"
    with ThreadPoolExecutor(4) as writers:
        for _ in range(5):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(sound, folder)
            os.truncate(folder / "image.npy", 100)
            list(writers.map(lambda _: save(cache), range(4)))
            assert_is_sound(cache.load_case("key", "case"))
    assert [path.name for path in folder.parent.iterdir()] == ["key"]


def test_the_checksum_of_a_record_covers_all_of_it(sound):
    record = read_entry(sound, CaseRecord)
    changed = {"num_components": (0, 7, 8), "spacing_mm": (1.0, 1.5, 2.1), "key": "other"}
    for field, value in {**changed, "files": {}}.items():
        other = record.model_copy(update={field: value})
        assert other.own_checksum() != record.checksum, field
