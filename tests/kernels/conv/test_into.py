import pytest
import torch
import torch.nn.functional as F

from tests.kernels.comparison import assert_same, channels_last, tensor
from tests.products import pairwise
from unet3d.kernels.conv import into, slabs
from unet3d.memory.allocations import counted_allocations

SIDES = [(0, 0), (1, 1), (1, 0), (0, 1), (3, 3)]


@pairwise(
    kernel_and_sides=[(k, s) for k in (1, 2, 3, 4) for s in SIDES if max(s) < k],
    stride=[1, 2],
    size=[(1, 12, 4, 5), (2, 9, 4, 5)],
)
def test_planes_are_written_to_their_place(kernel_and_sides, stride, size, monkeypatch):
    """Each call also makes planes that are wrong; none of them is left."""
    kernel, sides = kernel_and_sides
    n, *space = size
    x, weight = tensor(n, 3, *space), tensor(4, 3, kernel, 3, 3, seed=1)
    expected = F.conv3d(F.pad(x, (1, 1, 1, 1, *sides)), weight, None, (stride, 1, 1))
    called = []

    def is_seen(x):
        called.append(x.shape[2])
        return True

    monkeypatch.setattr(into, "writes_in_place", is_seen)
    for limit in (150, 300, 420):
        called.clear()
        monkeypatch.setattr(slabs, "MAX_ELEMENTS", limit)
        y = slabs.convolve(x, weight, (stride, 1, 1), (sides, 1, 1))
        assert_same([y], [expected], 1e-12)
        assert len(called) > n


def test_on_a_gpu_there_is_no_copy_of_what_is_computed(monkeypatch):
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", 2**18)
    gpu = torch.device("cpu", 1)  # stands for one
    peaks = {}
    for dtype in (torch.bfloat16, torch.float32):
        with counted_allocations() as recorder:
            x = channels_last(torch.empty((1, 32, 64, 32, 32), dtype=dtype, device=gpu))
            weight = torch.empty((32, 32, 3, 3, 3), dtype=dtype, device=gpu)
            before = recorder.now[gpu]
            recorder.peak[gpu] = before
            y = slabs.convolve(x, weight, (1, 1, 1), (1, 1, 1))
            plane = x.nbytes // 64
            peaks[dtype] = (recorder.peak[gpu] - before - y.nbytes) / plane
    assert peaks[torch.bfloat16] <= 1  # what a call must not overwrite
    assert peaks[torch.float32] > 4


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("sides", [(0, 0), (1, 1), (1, 0)], ids=str)
def test_cudnn_writes_planes_to_their_place(sides, stride, monkeypatch):
    x, weight = tensor(2, 32, 37, 24, 20), tensor(32, 32, 3, 3, 3, seed=1) * 0.03
    x, weight = x.to("cuda", torch.bfloat16), weight.to("cuda", torch.bfloat16)
    padded = F.pad(x.double(), (1, 1, 1, 1, *sides))
    expected = F.conv3d(padded, weight.double(), None, (stride, 1, 1))
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", 150_000)
    monkeypatch.delattr(into.F, "conv3d")  # which would make a copy
    y = slabs.convolve(x, weight, (stride, 1, 1), (sides, 1, 1))
    assert y.is_contiguous(memory_format=torch.channels_last_3d)
    norms = [z.transpose(1, 2).flatten(2).norm(dim=2) for z in (y.double() - expected, expected)]
    assert (norms[0] / norms[1]).max() <= 4e-3  # of every plane of every sample
