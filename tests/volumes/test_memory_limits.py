import pytest

from unet3d.errors import VolumeError
from unet3d.volumes import memory_limits
from unet3d.volumes.memory_limits import explaining_memory, readable, refuse_beyond_memory


def test_amounts_are_readable_however_large() -> None:
    assert readable(0) == "0 bytes"
    assert readable(1023) == "1023 bytes"
    assert readable(2**30) == "1 GiB"
    assert readable(119 * 2**40 + 2**38) == "119.2 TiB"
    assert readable(10**90).endswith(" EiB")


def test_what_is_more_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "available_bytes", lambda: 2**30)
    refuse_beyond_memory(2**30, "a volume", "do something")
    with pytest.raises(VolumeError) as caught:
        refuse_beyond_memory(2**31, "a volume", "do something")
    assert str(caught.value) == (
        "a volume takes 2 GiB of memory, but this machine has 1 GiB available; do something"
    )
    monkeypatch.setattr(memory_limits, "available_bytes", lambda: 0)
    refuse_beyond_memory(2**20, "a small volume", "")


def test_only_allocations_are_explained() -> None:
    with pytest.raises(VolumeError, match="^scan.nii: too little memory"):
        with explaining_memory("scan.nii"):
            raise MemoryError
    with pytest.raises(RuntimeError, match="something else"):
        with explaining_memory("scan.nii"):
            raise RuntimeError("something else")
