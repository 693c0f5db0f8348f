import pytest
import torch
from torch import Tensor

from tests.products import each_value
from unet3d.memory.saved_tensors import Saved, handling, save
from unet3d.torch_private import storage_key


class Double:
    """A placeholder for a tensor, which restores twice its values."""

    def __init__(self, tensor: Tensor) -> None:
        self.value = 2 * tensor.detach()

    def restore(self) -> Tensor:
        return self.value


class Asked:
    """Records the tensors that are offered, and replaces those of one shape."""

    def __init__(self, takes: tuple[int, ...] | None = None) -> None:
        self.takes = takes
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, tensor: Tensor) -> Saved | None:
        self.shapes.append(tuple(tensor.shape))
        return Double(tensor) if tuple(tensor.shape) == self.takes else None


@pytest.fixture
def factors():
    torch.manual_seed(0)
    a = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    return a, torch.randn(3, 4, dtype=torch.float64, requires_grad=True)


@each_value(outer=[None, (2, 3), (3, 4)], inner=[None, (2, 3), (3, 4)])
def test_backward_gets_what_stands_for_a_tensor(factors, outer, inner):
    a, b = factors
    # A replaced tensor comes back with doubled values.
    scale_a, scale_b = (2 if shape in (outer, inner) else 1 for shape in ((2, 3), (3, 4)))
    dy = torch.ones(2, 4, dtype=torch.float64)
    first, second = Asked(inner), Asked(outer)
    with handling(second), handling(first):
        made = a @ b  # saves both
    # The innermost handler is asked first, the outer one about the tensors that it passes.
    assert sorted(first.shapes) == [(2, 3), (3, 4)]
    assert set(second.shapes) == {(2, 3), (3, 4)} - {inner}
    found = torch.autograd.grad(made, factors, dy)
    assert torch.equal(found[0], dy @ (scale_b * b).T)
    assert torch.equal(found[1], (scale_a * a).T @ dy)


def test_nobody_is_asked_after_the_context_even_if_it_failed(factors):
    outer, inner = Asked(), Asked()
    with handling(outer):
        with pytest.raises(ZeroDivisionError), handling(inner):
            raise ZeroDivisionError
        torch.mm(*factors)
    torch.mm(*factors)
    assert inner.shapes == []
    assert len(outer.shapes) == 2


def test_views_share_a_key_and_copies_do_not():
    tensor = torch.zeros(4, 5)
    assert storage_key(tensor[1:].T) == storage_key(tensor.detach()) == storage_key(tensor)
    copy = tensor.clone()
    assert storage_key(copy) != storage_key(tensor)


def test_what_is_kept_beside_autograd_is_shown_to_the_handlers_too():
    outer, inner = Asked(), Asked(takes=(2, 3))
    taken, passed = torch.ones(2, 3), torch.ones(3, 4)
    with handling(outer), handling(inner):
        copy, own = save(taken), save(passed)
    assert outer.shapes == [(3, 4)]
    assert storage_key(copy.restore()) != storage_key(taken)
    assert torch.equal(copy.restore(), 2 * taken)
    assert own.restore() is passed
    assert save(taken).restore() is taken  # no handler is active
