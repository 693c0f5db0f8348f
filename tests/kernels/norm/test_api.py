import pytest
import torch
from torch import Tensor

from tests.kernels.comparison import LAYOUTS, assert_near, assert_same, results
from tests.kernels.norm.closed_form import (
    EPS,
    arguments,
    assert_as_in_float64,
    closed_form,
    in_float64,
    value_and_gradients,
)
from tests.products import pairwise
from unet3d.kernels import instance_norm, triton_support
from unet3d.kernels.norm import api as norm
from unet3d.kernels.padding import empty_padded, with_padding
from unet3d.memory.saved_tensors import handling


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("slope", [0.01, 1.0])
def test_the_reference_is_the_closed_form(slope, adds, layout):
    *values, dy = arguments((2, 3, 4, 5, 6), layout=layout)
    values += [torch.randn_like(values[0])] * adds

    def normed(x, weight, bias, *added):
        options = {"added": added[0]} if adds else {}
        return instance_norm(x.clone(), weight, bias, EPS, slope, **options)

    def plain(x, weight, bias, *added):
        return closed_form(sum(added, x), weight, bias, EPS, slope)

    assert_same(results(normed, values, dy), results(plain, values, dy), 1e-10)


def test_second_derivatives_are_refused():
    x, weight, bias, dy = arguments((2, 3, 2, 3, 2))
    y = instance_norm(x.requires_grad_(), weight, bias, EPS, 0.01)
    (dx,) = torch.autograd.grad(y, x, dy.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_only_the_input_and_numbers_of_each_channel_are_kept():
    x, weight, bias, _ = arguments((2, 3, 4, 5, 6))
    kept: list[Tensor] = []
    with handling(kept.append):
        instance_norm(x.requires_grad_(), weight, bias, EPS, 0.01)
    assert [value.numel() for value in kept] == [x.numel(), 3, 3, 2 * 3, 2 * 3]
    assert kept[0].data_ptr() == x.data_ptr()


@pytest.fixture
def triton_at_any_size(monkeypatch):
    monkeypatch.setattr(norm, "MIN_ELEMENTS", 0)


SHAPES = [
    (1, 32, 40, 48, 56),
    (2, 5, 7, 9, 11),
    (3, 70, 3, 5, 7),
    (1, 320, 6, 6, 6),
    (2, 1, 8, 8, 8),
    (2, 33, 16, 17, 18),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("triton_at_any_size")
@pairwise(
    shape=SHAPES,
    kind=[
        (torch.float32, 0.0, 1e-6),
        (torch.float32, 1e4, 1e-6),
        (torch.bfloat16, 1.0, 4e-3),
        (torch.float16, 1.0, 5e-4),
    ],
    slope=[0.01, 1.0],
    layout=LAYOUTS,
)
def test_on_a_gpu_against_float64(shape, kind, slope, layout):
    dtype, mean, tolerance = kind
    inputs = arguments(shape, mean, dtype, "cuda", layout)
    actual = value_and_gradients(inputs, instance_norm, slope)
    assert actual[0].dtype == dtype
    assert_as_in_float64(actual, in_float64(inputs, slope), inputs[3], tolerance)
    again = value_and_gradients(inputs, instance_norm, slope)
    assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))


@pytest.mark.gpu
@pytest.mark.usefixtures("triton_at_any_size")
@pytest.mark.parametrize("has_room", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)], ids=str
)
@pytest.mark.parametrize("shape", [(1, 32, 20, 24, 56), (2, 5, 7, 9, 11)], ids=str)
def test_what_is_added_on_a_gpu_against_float64(shape, dtype, tolerance, has_room):
    x, weight, bias, dy = arguments(shape, 1.0, dtype, "cuda")
    added = arguments(shape, 3.0, dtype, "cuda")[3]
    # The sum is rounded as it is stored, and where that crosses zero the slope is another.
    total = (x.float() + added.float()).to(dtype)
    expected, of_total, *others = in_float64([total, weight, bias, dy], 0.01)
    if has_room:  # and any values around
        made = empty_padded(x)
        with_padding(made).fill_(1e4)
        x = made.copy_(x)
    leaves = [value.requires_grad_() for value in (x, added, weight, bias)]
    y = instance_norm(x, weight, bias, EPS, 0.01, added=added)
    actual = [y, *torch.autograd.grad(y, leaves, dy)]
    assert_as_in_float64(actual, [expected, of_total, of_total, *others], dy, tolerance)


@pytest.mark.gpu
@pytest.mark.usefixtures("triton_at_any_size")
def test_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    x = torch.randn(1, 32, 8, 8, 8, device="cuda", dtype=torch.bfloat16)
    large = x.repeat(1, 1, 52, 52, 52).contiguous(memory_format=torch.channels_last_3d)
    assert large.numel() > 2**31
    one, zero = torch.ones(32, device="cuda"), torch.zeros(32, device="cuda")
    with torch.no_grad():
        # The statistics of a volume and of its copies are the same.
        y = instance_norm(large, one, zero, EPS, 0.01)
        expected = closed_form(x.double(), one.double(), zero.double(), EPS, 0.01)
    assert_near([y[..., -8:, -8:, -8:], y[..., :8, :8, :8]], [expected] * 2, 4e-3)


@pytest.mark.gpu
@pytest.mark.usefixtures("triton_at_any_size")
def test_the_first_to_ask_may_be_a_prediction(caplog):
    triton_support.works.cache_clear()
    x, weight, bias, _ = arguments((1, 2, 3, 4, 5), 0.0, torch.float32, "cuda")
    with torch.no_grad():
        instance_norm(x, weight, bias, EPS, 0.01)
    assert not caplog.records


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_where_triton_cannot_compile_it_is_said_once(caplog):
    triton_support.works.cache_clear()
    assert [triton_support.works() for _ in range(2)] == [False, False]
    (record,) = caplog.records
    assert record.getMessage().startswith("Triton cannot compile here, so training is several")
