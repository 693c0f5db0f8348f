"""Recalled results of operations look like real tensors, call after call."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from unet3d.memory.allocations import counted_allocations
from unet3d.memory.fake_results import _known

Made = tuple[Tensor | None, ...]


def add_out(x: Tensor, y: Tensor, target: Tensor) -> Made:
    return (torch.add(x, y, out=target), target)


def filter_gradient(x: Tensor, y: Tensor) -> Made:
    """Compute one of three gradients, so that the others are None."""
    image, gradient, weight = x[None, None], y[:2, :4][None, None], y[:3, :3][None, None]
    wanted = [False, True, False]
    return torch.ops.aten.convolution_backward(
        gradient, image, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, wanted
    )


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Made]] = {
    "new": lambda x, y: (x + y, x * 2, x / 2, x.sum(), x > y),
    "type": lambda x, y: (x + 1, x + 1.0, x.int() + 1, x.int() + 1.0, x.double()),
    "view": lambda x, y: (x[1], x[:, 1:], x[:, 1:][:, 1:], x.transpose(0, 1), x.view(-1)),
    "several views": lambda x, y: (*x.split(2, dim=1), *x.unbind()),
    "in place": lambda x, y: (x.add_(x), x.add_(y), y.mul_(2), x[0].zero_()),
    "shape in place": lambda x, y: (x.t_(), x.unsqueeze_(0), x.squeeze_()),
    "the same or new": lambda x, y: (x.contiguous(), x.t().contiguous(), x.reshape(-1), x.to(x)),
    "out": lambda x, y: (*add_out(x, y, x), *add_out(x, y, y), *add_out(x, x, torch.empty(4, 6))),
    "list": lambda x, y: (torch.cat([x, y]), torch.cat([x, y], 1), torch.stack([x, x])),
    "expanded": lambda x, y: (x[:1].expand(3, 6), torch.empty(2, 0, 3), x.new_empty((3, 2))),
    "strided": lambda x, y: (torch.empty_strided((2, 3), (1, 2)), x.as_strided((2,), (4,), 1)),
    "one of several": filter_gradient,
}


def told(x: Tensor, y: Tensor, made: Made) -> list[object]:
    """Return all properties of results but their values, and whose memory they use."""
    memories = [one.untyped_storage()._cdata for one in (x, y, *made) if one is not None]
    numbers = {memory: number for number, memory in reversed(list(enumerate(memories)))}
    return [
        one
        if one is None
        else (
            tuple(one.shape),
            one.stride(),
            one.storage_offset(),
            one.dtype,
            one.untyped_storage().nbytes(),
            numbers[one.untyped_storage()._cdata],
            [other is one for other in (x, y)],
        )
        for one in made
    ]


def run(operation: Callable[[Tensor, Tensor], Made], shape: tuple[int, int]) -> list[object]:
    x, y = torch.ones(shape), torch.ones(shape)
    made = operation(x, y)
    return told(x, y, made)


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_what_is_recalled_is_what_real_tensors_show(operation):
    real = run(operation, (4, 6))
    # A private name: whether a result is recalled shows in time only.
    _known.clear()
    with counted_allocations():
        assert run(operation, (4, 6)) == real
        assert any(known is not None for known in _known.values())
        assert run(operation, (4, 6)) == real
    with counted_allocations() as recorder:  # a new mode recalls them, too
        assert run(operation, (4, 6)) == real
        assert recorder.now[torch.device("cpu")] == 0


def test_what_depends_on_values_is_refused_each_time():
    with counted_allocations():
        for _ in range(2):
            with pytest.raises(RuntimeError):
                torch.ones(3).nonzero()


def test_a_real_parameter_is_copied_each_time():
    parameter, place = nn.Parameter(torch.ones(3, 4)), torch.device("cpu", 1)
    with counted_allocations() as recorder:
        copies = [parameter.to(place, torch.float64) for _ in range(3)]
        likes = [torch.empty_like(parameter) for _ in range(2)]
    assert [(one.shape, one.dtype, one.device) for one in copies] == [
        ((3, 4), torch.float64, place)
    ] * 3
    made = [*copies, *likes]
    assert len({one.untyped_storage()._cdata for one in made}) == len(made)
    assert recorder.now == {place: 3 * 512, torch.device("cpu"): 2 * 512}
