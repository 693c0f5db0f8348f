import pytest
import torch
from torch import Tensor

from tests.kernels.norm.closed_form import (
    arguments,
    closed_form,
    relative_error,
    value_and_gradients,
)
from unet3d.kernels import instance_norm, triton_support
from unet3d.kernels.norm import api as norm
from unet3d.kernels.padding import empty_padded, with_padding
from unet3d.memory.saved_tensors import handling


@pytest.mark.parametrize("slope", [0.01, 1.0])
def test_the_reference_is_the_closed_form(slope: float) -> None:
    inputs = [value.double() for value in arguments((2, 3, 4, 5, 6), 2.0, torch.float32, "cpu")]
    actual = value_and_gradients(inputs, instance_norm, slope)
    expected = value_and_gradients(inputs, closed_form, slope)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_the_reference_has_right_derivatives() -> None:
    inputs = [value.double() for value in arguments((2, 3, 2, 3, 2), 0.0, torch.float32, "cpu")]
    x, weight, bias = (value.requires_grad_() for value in inputs[:3])
    assert torch.autograd.gradcheck(instance_norm, (x, weight, bias, 1e-5, 0.01))


@pytest.mark.parametrize("slope", [0.01, 1.0])
def test_second_derivatives_are_refused(slope: float) -> None:
    x, weight, bias, dy = arguments((2, 3, 2, 3, 2), 0.0, torch.float32, "cpu")
    y = instance_norm(x.requires_grad_(), weight, bias, 1e-5, slope)
    (dx,) = torch.autograd.grad(y, x, dy.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_only_the_input_and_numbers_of_each_channel_are_kept() -> None:
    x, weight, bias, _ = arguments((2, 3, 4, 5, 6), 0.0, torch.float32, "cpu")
    kept: list[Tensor] = []
    with handling(kept.append):
        instance_norm(x.requires_grad_(), weight, bias, 1e-5, 0.01)
    assert [value.numel() for value in kept] == [x.numel(), 3, 3, 2 * 3, 2 * 3]
    assert kept[0].data_ptr() == x.data_ptr()


def test_what_is_added_is_added_first() -> None:
    x, weight, bias, dy = (
        v.double() for v in arguments((2, 3, 4, 5, 6), 2.0, torch.float32, "cpu")
    )
    added = torch.randn(x.shape, dtype=torch.float64)
    leaves = [value.requires_grad_() for value in (x, added, weight, bias)]
    y = instance_norm(x.clone(), weight, bias, 1e-5, 0.01, added=added)
    expected = closed_form(x + added, weight, bias, 1e-5, 0.01)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    wanted = torch.autograd.grad(expected, leaves, dy)
    for a, b in zip(torch.autograd.grad(y, leaves, dy), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.fixture
def triton_at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "MIN_ELEMENTS", 0)


SHAPES = [
    (1, 32, 40, 48, 56),
    (2, 5, 7, 9, 11),
    (3, 70, 3, 5, 7),
    (1, 320, 6, 6, 6),
    (2, 1, 8, 8, 8),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("triton_at_any_size")
@pytest.mark.parametrize("slope", [0.01, 1.0])
@pytest.mark.parametrize("mean", [0.0, 1e4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_on_a_gpu_against_float64(
    shape: tuple[int, ...], mean: float, slope: float
) -> None:
    inputs = arguments(shape, mean, torch.float32, "cuda")
    expected = value_and_gradients([value.cpu().double() for value in inputs], closed_form, slope)
    actual = value_and_gradients(inputs, instance_norm, slope)
    for name, a, b in zip(("y", "x", "weight", "bias"), actual, expected, strict=True):
        # A gradient of weight or bias is a sum that may cancel: judged by what was added up.
        scale = max(b.norm().item(), inputs[3].norm().item()) if b.dim() == 1 else b.norm().item()
        assert (a.cpu().double() - b).norm().item() <= 1e-6 * scale, name
    again = value_and_gradients(inputs, instance_norm, slope)
    assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))


@pytest.mark.gpu
@pytest.mark.usefixtures("triton_at_any_size")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=str)
def test_low_precision_on_a_gpu(
    dtype: torch.dtype, tolerance: float, layout: torch.memory_format
) -> None:
    inputs = arguments((2, 33, 16, 17, 18), 1.0, dtype, "cuda")
    inputs[0] = inputs[0].contiguous(memory_format=layout)
    expected = value_and_gradients([value.cpu().double() for value in inputs], closed_form, 0.01)
    actual = value_and_gradients(inputs, instance_norm, 0.01)
    assert actual[0].dtype == dtype
    for name, a, b in zip(("y", "x", "weight", "bias"), actual, expected, strict=True):
        assert relative_error(a, b) <= tolerance, name


@pytest.mark.gpu
@pytest.mark.usefixtures("triton_at_any_size")
@pytest.mark.parametrize("has_room", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)], ids=str
)
@pytest.mark.parametrize("shape", [(1, 32, 20, 24, 56), (2, 5, 7, 9, 11)], ids=str)
def test_what_is_added_on_a_gpu_against_float64(
    shape: tuple[int, ...], dtype: torch.dtype, tolerance: float, has_room: bool
) -> None:
    x, weight, bias, dy = arguments(shape, 1.0, dtype, "cuda")
    added = arguments(shape, 3.0, dtype, "cuda")[3]
    # The sum is rounded as it is stored, and where that crosses zero the slope is another.
    total = (x.float() + added.float()).to(dtype)
    exact = [value.cpu().double().requires_grad_() for value in (total, weight, bias)]
    expected = closed_form(*exact, 1e-5, 0.01)
    of_total, *others = torch.autograd.grad(expected, exact, dy.cpu().double())
    wanted = [expected, of_total, of_total, *others]
    if has_room:  # and any values around
        made = empty_padded(x)
        with_padding(made).fill_(1e4)
        x = made.copy_(x)
    leaves = [value.requires_grad_() for value in (x, added, weight, bias)]
    y = instance_norm(x, weight, bias, 1e-5, 0.01, added=added)
    actual = [y, *torch.autograd.grad(y, leaves, dy)]
    for name, a, b in zip(("y", "x", "added", "weight", "bias"), actual, wanted, strict=True):
        scale = max(b.norm().item(), dy.float().norm().item() if b.dim() == 1 else 0)
        assert (a.detach().cpu().double() - b).norm().item() <= tolerance * scale, name


@pytest.mark.gpu
@pytest.mark.usefixtures("triton_at_any_size")
def test_more_than_two_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    x = torch.randn(1, 32, 8, 8, 8, device="cuda", dtype=torch.bfloat16)
    large = x.repeat(1, 1, 52, 52, 52).contiguous(memory_format=torch.channels_last_3d)
    assert large.numel() > 2**31
    one, zero = torch.ones(32, device="cuda"), torch.zeros(32, device="cuda")
    with torch.no_grad():
        # The statistics of a volume and of its copies are the same.
        y = instance_norm(large, one, zero, 1e-5, 0.01)
        expected = closed_form(x.double(), one.double(), zero.double(), 1e-5, 0.01)
    assert relative_error(y[..., -8:, -8:, -8:], expected.cpu()) <= 4e-3
    assert relative_error(y[..., :8, :8, :8], expected.cpu()) <= 4e-3


@pytest.mark.gpu
@pytest.mark.usefixtures("triton_at_any_size")
def test_the_first_to_ask_may_be_a_prediction(caplog: pytest.LogCaptureFixture) -> None:
    triton_support.works.cache_clear()
    x, weight, bias, _ = arguments((1, 2, 3, 4, 5), 0.0, torch.float32, "cuda")
    with torch.no_grad():
        instance_norm(x, weight, bias, 1e-5, 0.01)
    assert not caplog.records


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_where_triton_cannot_compile_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    triton_support.works.cache_clear()
    assert [triton_support.works() for _ in range(2)] == [False, False]
    (record,) = caplog.records
    assert record.getMessage().startswith("Triton cannot compile here, so training is several")
