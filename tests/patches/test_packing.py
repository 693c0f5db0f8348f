import pytest
import torch

from unet3d.patches.packing import packed, page_locked_memory, shared_memory, unpacking

TENSORS = (
    torch.arange(6, dtype=torch.uint8).view(2, 3),
    torch.linspace(0, 1, 7, dtype=torch.float64),
    torch.empty(0, 3, dtype=torch.float16),
    torch.tensor(3, dtype=torch.int64),
    torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),  # not contiguous
    torch.tensor([1.5], dtype=torch.float16),
)


def test_tensors_of_all_types_come_out_as_they_went_in():
    assert packed((), shared_memory).nbytes == 0
    memory = packed(TENSORS, shared_memory)
    assert memory.is_shared() and memory.dtype == torch.uint8
    taken = unpacking(memory)
    for tensor in TENSORS:
        own = taken(tensor.to("meta"))
        assert own.dtype == tensor.dtype and own.shape == tensor.shape
        assert torch.equal(own, tensor)
        assert own.untyped_storage().data_ptr() == memory.data_ptr()


@pytest.mark.gpu
def test_page_locked_memory_is_page_locked():
    memory = packed(TENSORS, page_locked_memory)
    taken = unpacking(memory)
    assert all(taken(tensor).is_pinned() for tensor in TENSORS if tensor.nbytes)
