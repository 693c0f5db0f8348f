import pytest

from unet3d.errors import VolumeError
from unet3d.images.memory_limits import explaining_memory, refuse_beyond_memory
from unet3d.memory import host


def test_what_is_more_than_there_is_is_refused(monkeypatch):
    monkeypatch.setattr(host, "available_bytes", lambda: 2**30)
    refuse_beyond_memory(2**30, "a volume", "do something")
    with pytest.raises(VolumeError) as caught:
        refuse_beyond_memory(2**31, "a volume", "do something")
    assert str(caught.value) == (
        "a volume takes 2 GiB of memory, but this machine has 1 GiB available; do something"
    )
    monkeypatch.setattr(host, "available_bytes", lambda: 0)
    refuse_beyond_memory(2**20, "a small volume", "")


def test_only_allocations_are_explained():
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: x")):
        with pytest.raises(VolumeError, match="^scan.nii: too little memory, .* available"):
            with explaining_memory("scan.nii"):
                raise error
    with pytest.raises(RuntimeError, match="something else"):
        with explaining_memory("scan.nii"):
            raise RuntimeError("something else")
