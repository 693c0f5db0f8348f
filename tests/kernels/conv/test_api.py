import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.comparison import LAYOUTS, assert_near, assert_same, in_slabs, results, tensor
from unet3d.kernels import conv1x1x1, conv3x3x3, strided_conv3x3x3
from unet3d.kernels.conv import api, slabs
from unet3d.kernels.maps import can_fold

FIRST, LAST = LAYOUTS


@pytest.mark.parametrize(
    ("shape", "channels", "dtype", "layout", "device", "folds"),
    [
        ((1, 32, 64, 64, 64), 32, torch.bfloat16, LAST, "cpu:0", True),
        ((1, 64, 64, 64, 64), 8, torch.float16, LAST, "cpu:0", True),
        ((1, 32, 64, 64, 64), 32, torch.bfloat16, LAST, "cpu", False),
        ((1, 32, 64, 64, 64), 33, torch.bfloat16, LAST, "cpu:0", False),
        ((1, 32, 64, 64, 64), 7, torch.bfloat16, LAST, "cpu:0", False),
        ((1, 32, 64, 63, 64), 32, torch.bfloat16, LAST, "cpu:0", False),  # too small
        ((1, 32, 64, 64, 65), 32, torch.bfloat16, LAST, "cpu:0", False),  # Z is odd
        ((1, 32, 64, 64, 64), 32, torch.float32, LAST, "cpu:0", False),
        ((1, 32, 64, 64, 64), 32, torch.bfloat16, FIRST, "cpu:0", False),
    ],
)
def test_what_is_worth_folding(shape, channels, dtype, layout, device, folds):
    with FakeTensorMode():
        x = torch.empty(shape, dtype=dtype, device=device, memory_format=layout)
        assert can_fold(x, channels) == folds
        y = conv3x3x3(x, torch.empty(channels, x.shape[1], 3, 3, 3, dtype=dtype, device=device))
    assert y.shape == (1, channels, *shape[2:])


@pytest.mark.parametrize(
    ("outputs", "size", "limit", "folds"),
    [
        (3, (3, 4, 8), slabs.MAX_ELEMENTS, True),
        (16, (2, 3, 16), slabs.MAX_ELEMENTS, True),
        (17, (2, 3, 16), slabs.MAX_ELEMENTS, False),  # too much of the matrix would be zero
        (3, (3, 8, 4), slabs.MAX_ELEMENTS, False),  # Z is not a multiple of 8
        (3, (9, 3, 8), 600, False),  # too large for one call
    ],
)
def test_a_head_multiplies_eight_voxels_at_a_time(outputs, size, limit, folds, monkeypatch):
    # Pretend that x is 16-bit on a GPU; computing in float64 makes the comparison exact.
    monkeypatch.setattr(api, "can_fold", lambda x, channels: True)
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", limit)
    values = [tensor(2, 5, *size), tensor(outputs, 5, 1, 1, 1, seed=1), tensor(outputs, seed=2)]
    rows = []
    for name in ("linear", "conv3d"):
        function = getattr(F, name)

        def watched(x, weight, *more, of=function):
            rows.append(len(weight))
            return of(x, weight, *more)

        monkeypatch.setattr(F, name, watched)
    actual = results(conv1x1x1, values)
    assert set(rows) == {8 * outputs if folds else outputs}
    assert (len(rows) > 1) == (limit < 1000)
    monkeypatch.undo()
    assert_same(actual, results(F.conv3d, values))


@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_shards_with_halos_are_the_whole_convolution(stride, folds, monkeypatch):
    """Three slabs of a volume, each with its halo: neighbours' planes, or zeros at the ends."""
    monkeypatch.setattr(api, "can_fold", lambda *_: folds)
    values = [tensor(1, 8, 12, 3, 4), tensor(8, 8, 3, 3, 3, seed=1)]

    def in_shards(x, weight):
        def convolve(x):
            if stride == 1:
                return conv3x3x3(x, weight)
            return strided_conv3x3x3(x, weight, (stride,) * 3)

        return in_slabs(convolve, x, (0, 4, 8, 12))

    expected = results(lambda x, w: F.conv3d(x, w, None, stride, 1), values)
    assert_same(results(in_shards, values), expected)


@pytest.mark.gpu
def test_bfloat16_on_a_gpu_against_float64():
    values = [tensor(1, 32, 64, 64, 64), tensor(32, 32, 3, 3, 3, seed=1)]
    x, weight, dy = (v.cuda().bfloat16() for v in (*values, tensor(1, 32, 64, 64, 64, seed=9)))
    assert can_fold(x, 32)
    actual = results(conv3x3x3, [x, weight], dy)
    assert actual[0].is_contiguous(memory_format=torch.channels_last_3d)
    exact = [x.double(), weight.double()]
    wanted = results(lambda x, w: F.conv3d(x, w, padding=1), exact, dy.double())
    assert_near(actual, wanted, 2e-2)
