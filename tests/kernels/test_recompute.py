import gc
import weakref
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch

from unet3d.kernels import conv3x3x3, recomputed_in_backward
from unet3d.kernels import recompute as recomputing
from unet3d.kernels.conv.api import upsample
from unet3d.kernels.maps import detached, is_padded, mark_folded, mark_padded, was_folded
from unet3d.kernels.recompute import nothing_offered, offer
from unet3d.memory.saved_tensors import handling
from unet3d.torch_private import storage_key


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(recomputing, "MIN_ELEMENTS", 0)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.backends.mkldnn")
def test_what_autocast_lowered_is_recomputed_as_low():
    """Such as group normalisation on GPUs: its float32 results are lowered by autocast."""
    torch.manual_seed(0)
    x = torch.randn(1, 4, 4, 4, 4).contiguous(memory_format=torch.channels_last_3d)
    gradients = []
    for recomputes in (False, True):
        up = torch.randn(4, 4, 2, 2, 2, generator=torch.Generator().manual_seed(1))
        kernel = torch.randn(4, 4, 3, 3, 3, generator=torch.Generator().manual_seed(2))
        weights = [up.requires_grad_(), kernel.requires_grad_()]
        # Some CPUs lack the instructions that oneDNN needs for bfloat16.
        with torch.backends.mkldnn.flags(enabled=False):
            with recomputed_in_backward() if recomputes else nullcontext():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    y = conv3x3x3(upsample(x, up, (2, 2, 2)), kernel)
            y.square().sum().backward()
        gradients.append([weight.grad for weight in weights])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_view_comes_back_with_its_shape_and_strides():
    values, kept = torch.arange(24.0), []
    leaf = torch.ones(2, 3, requires_grad=True)
    recompute = Mock(side_effect=lambda: values.clone().view(4, 6))
    with handling(kept.append), recomputed_in_backward():
        tensor = recompute()
        offer(tensor, recompute, values)
        view = tensor[1:3, ::2]
        made = leaf * view
    assert storage_key(tensor) not in map(storage_key, kept)
    saved = made.grad_fn._saved_other
    assert (saved.shape, saved.stride(), saved.storage_offset()) == ((2, 3), (6, 2), 6)
    assert torch.equal(saved, view)
    assert storage_key(saved) != storage_key(tensor)
    assert recompute.call_count == 2


def test_a_dead_tensor_is_not_mistaken_for_another_in_its_place(monkeypatch):
    """All tensors get one key here, as a new tensor may get the key of one that was freed."""
    monkeypatch.setattr(recomputing, "storage_key", lambda tensor: 7)
    leaf = torch.ones(3, requires_grad=True)
    with recomputed_in_backward():
        first = torch.full((3,), 5.0)
        offer(first, lambda: torch.full((3,), 5.0), leaf)
        del first
        gc.collect()
        made = leaf * torch.full((3,), 2.0)
    made.sum().backward()
    assert leaf.grad.tolist() == [2.0, 2.0, 2.0]


def test_a_result_that_lives_on_keeps_nothing_alive():
    source = torch.ones(3)
    gone = weakref.ref(source)
    with recomputed_in_backward():
        result = source.clone()
        offer(result, source.clone, source)
    del source
    gc.collect()
    assert gone() is None
    assert result.tolist() == [1.0, 1.0, 1.0]


def test_what_is_offered_in_the_context_and_outside_of_parts_is_not_kept(monkeypatch):
    leaf, reading = torch.ones(3, requires_grad=True), []
    inside, outside, result, small, behind = (torch.full((3,), 2.0) for _ in range(5))
    with handling(reading.append), recomputed_in_backward():
        with nothing_offered():  # in a part that is recomputed as a whole
            offer(inside, inside.clone, leaf)
        leaf * inside
        offer(outside, outside.clone, leaf)
        leaf * outside
        monkeypatch.setattr(recomputing, "MIN_ELEMENTS", 10**9)
        offer(small, small.clone, leaf)
        leaf * small
        offer(result, lambda: torch.full((3,), 5.0))  # the result of such a part, of any size
        made = leaf * result
    with handling(reading.append):
        offer(behind, behind.clone, leaf)
        leaf * behind
    seen = set(map(storage_key, reading))
    kept = [storage_key(value) in seen for value in (inside, outside, small, result, behind)]
    assert kept == [True, False, True, False, True]
    made.sum().backward()
    assert leaf.grad.tolist() == [5.0, 5.0, 5.0]


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_detached_tensor_has_the_marks_of_its_own(is_marked):
    x = torch.ones(1, 2, 3, 3, 4, requires_grad=True) * 2
    if is_marked:
        mark_padded(mark_folded(x))
    alone = detached(x)
    assert not alone.requires_grad and storage_key(alone) == storage_key(x)
    assert is_padded(alone) == was_folded(alone) == is_marked
