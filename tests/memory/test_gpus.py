"""Devices that a machine lacks, according to Linux, without importing PyTorch."""

import pytest

from unet3d.errors import DeviceError
from unet3d.memory import gpus


@pytest.mark.parametrize(
    ("files", "visible", "missing"),
    [
        ((), None, "0"),
        (("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"), None, "cuda:2"),
        (("nvidia0", "nvidia1"), "1", "1"),
        (("nvidia0",), "", "0"),
        (("dxg",), None, None),
        (("kfd",), None, None),
    ],
)
def test_gpus_that_cannot_be_there_are_refused(files, visible, missing, tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for name in files:
        (tmp_path / name).touch()
    if missing is None:
        gpus.refuse_missing(["cpu", "7"])
        return
    gpus.refuse_missing(["cpu", *map(str, range(gpus.gpu_index(missing)))])
    with pytest.raises(DeviceError, match=f"device '{missing}' does not exist; this machine has"):
        gpus.refuse_missing(["cpu", missing])
