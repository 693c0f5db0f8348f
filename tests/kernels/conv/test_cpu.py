"""Small float32 convolutions on a CPU: as exact as PyTorch's own, and never on its slow path."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from tests.kernels.comparison import LAYOUTS, assert_near, results, tensor
from tests.model.shapes import HALF, ONE, topology_of
from tests.products import each_value
from unet3d.kernels import conv1x1x1
from unet3d.kernels.conv import cpu, slabs
from unet3d.memory.saved_tensors import handling
from unet3d.model import UNet3d, dice_cross_entropy

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="needs a PyTorch with oneDNN"
)


def assert_as_in_float64(function, plain, x, weight):
    """Compare value, gradients and the saved tensors with float64; return the value."""
    low, kept = [value.float() for value in (x, weight)], []
    with handling(kept.append):
        actual = results(function, low)
    assert {value.data_ptr() for value in kept} == {value.data_ptr() for value in low}
    assert {value.dtype for value in actual} == {torch.float32}
    assert_near(actual, results(plain, [x, weight]), 2e-6)
    return actual[0]


@each_value(
    planes=[2, 3, 7, 8],
    stride=[(1, 1, 1), (2, 2, 2), (1, 2, 2), (3, 1, 2)],
    x_padding=[0, 1],
    layout=LAYOUTS,
)
def test_convolutions(planes, stride, x_padding, layout):
    planes = max(planes, 3 - 2 * x_padding)
    x = tensor(1, 3, planes, 5, 4).contiguous(memory_format=layout)
    weight = tensor(4, 3, 3, 3, 3, seed=1).contiguous(memory_format=layout)
    assert cpu.is_slow(x.float(), weight, stride)
    y = assert_as_in_float64(
        lambda x, w: slabs.convolve(x, w, stride, (x_padding, 1, 1)),
        lambda x, w: F.conv3d(x, w, None, stride, (x_padding, 1, 1)),
        x,
        weight,
    )
    if layout == torch.channels_last_3d:
        assert y.shape[2] == 1 or y.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("stride", [(2, 2, 2), (1, 2, 2), (3, 1, 2)], ids=str)
@pytest.mark.parametrize("planes", [1, 2, 3, 6])
def test_transposed_convolutions(planes, stride):
    assert_as_in_float64(
        lambda x, w: slabs.upsample(x, w, stride),
        lambda x, w: F.conv_transpose3d(x, w, stride=stride),
        tensor(1, 4, planes, 3, 2),
        tensor(4, 3, *stride, seed=1),
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("samples", [1, 2])
def test_points(samples, layout):
    """1x1x1 kernels of a head; and transposed, between two levels of one resolution."""
    x = tensor(samples, 5, 4, 3, 2).contiguous(memory_format=layout)
    bias = tensor(3, seed=2)
    head = (lambda x, w: conv1x1x1(x, w, bias.to(x)), lambda x, w: F.conv3d(x, w, bias))
    up = (lambda x, w: slabs.upsample(x, w, (1, 1, 1)), F.conv_transpose3d)
    for functions, channels in ((head, (3, 5)), (up, (5, 3))):
        y = assert_as_in_float64(*functions, x, tensor(*channels, 1, 1, 1, seed=1))
        assert y.is_contiguous(memory_format=layout)


@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "dtype", "slow"),
    [
        ((1, 4, 8, 8, 64), 3, 1, torch.float32, True),
        ((2, 4, 8, 8, 64), 3, 1, torch.float32, False),  # a batch
        ((1, 80, 16, 16, 2), 3, 1, torch.float32, True),  # N * C * X * Y is 20,480
        ((1, 81, 16, 16, 2), 3, 1, torch.float32, False),
        ((1, 4, 8, 8, 8), 5, 1, torch.float32, False),  # a large kernel
        ((1, 4, 8, 8, 8), 3, 2, torch.float32, True),
        ((1, 4, 8, 8, 8), 3, 1, torch.float64, False),  # has no other path
        ((1, 4, 8, 8, 8), 3, 1, torch.bfloat16, False),  # never takes this one
    ],
    ids=str,
)
def test_the_rule_is_pytorchs(shape, kernel, stride, dtype, slow):
    x, weight = torch.zeros(shape, dtype=dtype), torch.zeros(2, shape[1], *(kernel,) * 3)
    assert cpu.is_slow(x, weight, (stride,) * 3) == slow
    if dtype == torch.float32:
        backend = torch._C._select_conv_backend(
            x, weight, None, (stride,) * 3, (1,) * 3, (1,) * 3, False, (0,) * 3, 1
        )
        assert ("Slow" in str(backend)) == slow, backend


@pytest.mark.filterwarnings("ignore::UserWarning:torch.backends.mkldnn")
def test_without_onednn_and_on_fake_gpus_nothing_is_divided():
    x, weight = torch.zeros(1, 2, 4, 4, 4), torch.zeros(2, 2, 3, 3, 3)
    assert cpu.is_slow(x, weight, (1, 1, 1))
    with torch.backends.mkldnn.flags(enabled=False):
        assert not cpu.is_slow(x, weight, (1, 1, 1))
    with FakeTensorMode():
        for device in ("cpu", "cpu:0", "cpu:1", "meta"):
            x = torch.zeros(2, 2, 3, 3, 3, device=device)
            assert cpu.is_slow(x[:1], x, (1, 1, 1)) == (device == "cpu")


@pytest.mark.parametrize("encoder", ["plain", "residual"])
def test_a_training_step_of_a_small_network_never_takes_the_slow_path(encoder):
    torch.manual_seed(0)
    fields = {"strides": (ONE, HALF, (1, 2, 2)), "upsampling_bias": False, "encoder": encoder}
    model = UNet3d(topology_of(channels=(4, 8, 8), **fields))
    image, target = torch.randn(1, 2, 16, 16, 16), torch.randint(0, 3, (1, 16, 16, 16))
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        dice_cross_entropy(model(image), target).total.backward()
    names = {event.key for event in profiled.key_averages()}
    assert "aten::mkldnn_convolution" in names
    assert not {name for name in names if "slow_conv" in name}
