import pytest
import torch

from tests.kernels.comparison import LAYOUTS, assert_same, results
from tests.kernels.norm.closed_form import EPS, arguments, closed_form, compare, in_float64, normed
from tests.products import each_value
from unet3d.kernels import instance_norm, triton_support
from unet3d.kernels.maps import empty_map, with_padding
from unet3d.kernels.norm import volume
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
    kept = []
    with handling(kept.append):
        instance_norm(x.requires_grad_(), weight, bias, EPS, 0.01)
    assert [value.numel() for value in kept] == [x.numel(), 3, 3, 2 * 3, 2 * 3]
    assert kept[0].data_ptr() == x.data_ptr()


@pytest.mark.gpu
@each_value(
    shape=[
        (1, 32, 40, 48, 56),
        (2, 5, 7, 9, 11),
        (3, 70, 3, 5, 7),
        (1, 320, 6, 6, 6),
        (2, 1, 8, 8, 8),
        (2, 33, 16, 17, 18),
    ],
    kind=[
        (torch.float32, 0.0, 1e-6),
        (torch.float32, 1e4, 1e-6),
        (torch.bfloat16, 1.0, 4e-3),
        (torch.float16, 1.0, 5e-4),
    ],
    slope=[0.01, 1.0],
    layout=LAYOUTS,
)
def test_on_a_gpu_against_float64(shape, kind, slope, layout, monkeypatch):
    monkeypatch.setattr(volume, "MIN_ELEMENTS", 0)
    dtype, mean, tolerance = kind
    inputs = arguments(shape, mean, dtype, "cuda", layout)
    actual = normed(inputs, slope)
    assert actual[0].dtype == dtype
    compare(actual, in_float64(inputs, slope), inputs[3], tolerance)
    again = normed(inputs, slope)
    assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))


@pytest.mark.gpu
@each_value(
    shape=[(1, 32, 20, 24, 56), (2, 5, 7, 9, 11)],
    kind=[(torch.float32, 1e-6), (torch.bfloat16, 5e-3)],
    has_room=[False, True],
)
def test_what_is_added_on_a_gpu_against_float64(shape, kind, has_room, monkeypatch):
    monkeypatch.setattr(volume, "MIN_ELEMENTS", 0)
    dtype, tolerance = kind
    x, weight, bias, dy = arguments(shape, 1.0, dtype, "cuda")
    added = arguments(shape, 3.0, dtype, "cuda")[3]
    # The stored sum is rounded; if that changes its sign, LeakyReLU has another slope.
    total = (x.float() + added.float()).to(dtype)
    expected, of_total, *others = in_float64([total, weight, bias, dy], 0.01)
    if has_room:  # with any values in the room
        made = empty_map(x, pads=True)
        with_padding(made).fill_(1e4)
        x = made.copy_(x)
    leaves = [value.requires_grad_() for value in (x, added, weight, bias)]
    y = instance_norm(x, weight, bias, EPS, 0.01, added=added)
    actual = [y, *torch.autograd.grad(y, leaves, dy)]
    compare(actual, [expected, of_total, of_total, *others], dy, tolerance)


def test_where_triton_cannot_compile_it_is_said_once(caplog):
    triton_support.works.cache_clear()
    with torch.no_grad():  # the first call may be in a prediction
        assert [triton_support.works() for _ in range(2)] == [torch.cuda.is_available()] * 2
    beginnings = [record.getMessage()[:50] for record in caplog.records]
    expected = "Triton cannot compile here, so training is several"
    assert beginnings == [expected] * (not torch.cuda.is_available())
