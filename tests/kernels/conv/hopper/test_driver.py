"""Kernels are loaded once on each GPU, and used only where everything that they need exists."""

import ctypes
import logging
import re
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from unet3d.kernels.conv.hopper import api, build, driver, op

pytestmark = pytest.mark.usefixtures("fresh_process")

GPU, SECOND, FAKE = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu", 0)
SLOWER = "convolutions use cuDNN, so training takes about a third longer: "


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "unet3d")
    return caplog


@pytest.fixture
def kernel(cuda, monkeypatch):
    streams = {GPU: 7, SECOND: 8}
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=streams[device])
    )
    return driver.Kernel("multiply", ["one.cu", "two.cu"], {"TILES": 2}, 384, 200_000)


@pytest.fixture
def hopper(kernel, monkeypatch):
    """A machine with two Hopper GPUs; ``kernel`` is the variant that checks them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(op, "CHECKED", kernel)
    monkeypatch.setattr(op, "begin_building", Mock())
    return op


def test_a_launch_is_on_the_current_stream_of_its_device(kernel, cuda, nvrtc):
    for device in (GPU, SECOND, GPU):
        kernel.launch(device, 132, ctypes.c_int(5), (ctypes.c_int * 2)(6, 9))
    sizes = [132, 1, 1, 384, 1, 1, 200_000]
    first, second = ((100 + i, b"multiply", sizes, 7 + i, [5, 6]) for i in (0, 1))
    assert cuda.launches == [first, second, first]
    # Each context has its own module, and no thread's context is changed.
    assert [context for context, _ in cuda.modules] == [100, 101]
    assert all(cubin.endswith(b"-DTILES=2") for _, cubin in cuda.modules)
    assert list(cuda.shared.values()) == [200_000, 200_000] and cuda.stack == []
    assert len(nvrtc.programs) == 1


def test_threads_load_it_once(kernel, cuda):
    barrier = threading.Barrier(4, timeout=20)

    def load():
        barrier.wait()
        kernel.load(GPU)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cuda.modules) == 1


def test_an_error_of_the_driver_is_told_and_leaves_its_context(kernel, cuda):
    cuda.refused.add("cuLaunchKernel")
    with pytest.raises(RuntimeError, match=r"^CUDA's driver says: not supported \(801\)$"):
        kernel.launch(GPU, 1)
    assert cuda.stack == []
    with pytest.raises(torch.OutOfMemoryError):
        driver._check(2)


ADDING = """
struct Arguments { float* y; float value; int size; };
extern "C" __global__ void add(Arguments a) {
    extern __shared__ float values[];
    values[threadIdx.x] = TIMES * a.value;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.size) a.y[i] += values[threadIdx.x];
}
"""


class Arguments(ctypes.Structure):
    _fields_ = (("y", ctypes.c_void_p), ("value", ctypes.c_float), ("size", ctypes.c_int))


@pytest.mark.gpu
def test_it_runs_in_threads_streams_and_graphs_on_every_gpu(sources):
    """New threads have no context of CUDA."""
    (sources / "one.cu").write_text(ADDING)
    kernel = driver.Kernel("add", ["one.cu"], {"TIMES": 2}, 128, 100_000)
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if torch.cuda.get_device_capability(device) != api.CAPABILITY:
            pytest.skip("needs Hopper GPUs")
        y = torch.zeros(1000, device=device)
        torch.cuda.synchronize(device)
        given = (device, 8, Arguments(y.data_ptr(), 3.0, len(y)))
        thread = threading.Thread(target=kernel.launch, args=given)
        thread.start()
        thread.join()
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            with torch.cuda.stream(torch.cuda.Stream(device)):
                kernel.launch(*given)
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            # Without a stream, PyTorch would take one of the GPU that captured first.
            stream = torch.cuda.Stream(device)
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                kernel.launch(*given)
            graph.replay()
            graph.replay()
        assert y.tolist() == [24.0] * 1000
    assert torch.cuda.current_device() == 0


MAPS = {
    "whole": lambda: channels_last(2, 64, 3, 4, 5),
    "with room around Z": lambda: channels_last(2, 32, 3, 4, 7)[..., 1:-1],
    "a slab": lambda: channels_last(1, 32, 6, 4, 5)[:, :, 2:5],
    "single voxels": lambda: channels_last(1, 32, 1, 1, 1),
    "odd strides of one voxel": lambda: channels_last(1, 32, 4, 1, 5).as_strided(
        (1, 32, 4, 1, 5), (3, 1, 160, 1, 32)
    ),
}


def channels_last(*shape):
    count = torch.Size(shape).numel()
    values = torch.arange(count, dtype=torch.int16).view(torch.bfloat16).view(shape)
    return values.contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("name", MAPS)
def test_a_map_is_described_as_it_lies_in_memory(name, cuda):
    x = MAPS[name]()
    made = driver.tensor_map(x, (18, 10))
    assert len(made) == 128 and ctypes.addressof(made) % 64 == 0
    ((dtype, rank, address, sizes, strides, box, steps, options),) = cuda.maps
    assert (dtype, rank, address) == (9, 5, x.data_ptr())
    assert sizes == [x.shape[axis] for axis in (1, 4, 3, 2, 0)]
    assert all(stride % 16 == 0 and stride > 0 for stride in strides)
    assert box == [32, 10, 18, 1, 1] and steps == [1] * 5 and options == (0, 2, 2, 0)
    # The copy engine reads the map through it.
    last = sum((size - 1) * stride for size, stride in zip(sizes, [2, *strides], strict=True))
    memory = np.frombuffer((ctypes.c_char * (last + 2)).from_address(address), np.int16)
    in_elements = [stride // 2 for stride in (2, *strides)]
    read = np.lib.stride_tricks.as_strided(
        memory, sizes[::-1], [2 * stride for stride in in_elements[::-1]]
    )
    assert (read == x.view(torch.int16).permute(0, 2, 3, 4, 1).numpy()).all()


def test_a_map_is_described_once(cuda):
    x = channels_last(1, 32, 3, 4, 5)
    again = x[:, :, :]
    assert driver.tensor_map(x, (18, 18)) is driver.tensor_map(again, (18, 18))
    driver.tensor_map(x, (16, 16))
    driver.tensor_map(x.view(torch.float16), (16, 16))
    driver.tensor_map(x[:, :, 1:], (16, 16))
    assert [one[0] for one in cuda.maps] == [9, 9, 6, 9]


def test_a_hopper_gpu_has_them(hopper, cuda, nvrtc, log):
    assert all(api.available(device) for device in (GPU, SECOND, GPU, FAKE))
    assert [context for context, _ in cuda.modules] == [100, 101] and len(nvrtc.programs) == 1
    assert not log.messages
    hopper.begin_building.assert_called_with(float16=False)  # the other kernels


def test_a_gpu_that_is_not_here_is_taken_for_one_that_is(hopper, cuda, monkeypatch, log):
    assert api.available(FAKE)
    assert not cuda.modules  # loading them would take GPU memory
    assert not hopper.begin_building.called
    api.available.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not api.available(FAKE)
    assert len(log.messages) == 1


def test_each_gpu_that_is_not_here_is_taken_for_its_own(hopper, monkeypatch):
    """A fake device stands for the GPU of its index; without such a GPU, for the first one."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device.index))
    fakes = [torch.device("cpu", index) for index in range(3)]
    assert [api.available(fake) for fake in fakes] == [True, False, True]


def test_without_any_gpu_a_fake_one_has_them(monkeypatch, log):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(api, "_works", Mock(side_effect=AssertionError))
    assert api.available(FAKE)
    assert not api.available(torch.device("cpu"))
    assert not api.available(torch.device("meta"))
    assert not log.messages


def has_no_nvrtc(monkeypatch, cuda):
    monkeypatch.setattr(build, "nvrtc", Mock(side_effect=OSError("NVRTC: no such\nfile")))


def has_no_driver(monkeypatch, cuda):
    monkeypatch.setattr(driver, "cuda", Mock(side_effect=OSError("libcuda.so.1: no such file")))


def does_not_load(monkeypatch, cuda):
    cuda.refused.add("cuModuleLoadData")


def is_another_processor(monkeypatch, cuda):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))


def is_from_amd(monkeypatch, cuda):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Instinct MI250X")
    monkeypatch.setattr(torch.version, "hip", "7.2")


def is_switched_off(monkeypatch, cuda):
    monkeypatch.setenv("UNET3D_HOPPER", "0")


@pytest.mark.parametrize(
    ("machine", "level", "line"),
    [
        (has_no_nvrtc, "WARNING", SLOWER + "NVRTC: no such file"),
        (has_no_driver, "WARNING", SLOWER + "libcuda.so.1: no such file"),
        (does_not_load, "WARNING", SLOWER + r"CUDA's driver says: not supported \(801\)"),
        (
            is_another_processor,
            "INFO",
            "convolutions use cuDNN, the hand-written convolutions need a Hopper GPU, not "
            "NVIDIA A100",
        ),
        (
            is_from_amd,
            "INFO",
            "convolutions use cuDNN, the hand-written convolutions need a Hopper GPU, not "
            "AMD Instinct MI250X",
        ),
        (
            is_switched_off,
            "INFO",
            "convolutions use cuDNN, UNET3D_HOPPER=0 switches the hand-written convolutions off",
        ),
    ],
)
def test_where_something_is_missing_one_line_says_what(
    machine, level, line, hopper, cuda, monkeypatch, caplog, log
):
    machine(monkeypatch, cuda)
    assert not any(api.available(device) for device in (GPU, SECOND, GPU))
    ((_, found, message),) = caplog.record_tuples
    assert logging.getLevelName(found) == level
    assert re.fullmatch(line, message), message
