"""Copies between devices: values arrive, and memory is not reused while it is still read."""

import pytest
import torch

from unet3d.parallel.mail import Transfer, _copy_streams

CPU = torch.device("cpu")
GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)
SIZE = 1 << 20
LONG = 1_000_000_000
"""About half a second of a GPU's clock cycles: other programs may use the GPUs, too."""


def test_on_one_device_nothing_is_copied_and_the_graph_ends():
    made = torch.randn(3, requires_grad=True) * 2
    received = Transfer(made, CPU).wait()
    assert received.data_ptr() == made.data_ptr()
    assert received.grad_fn is None and not received.requires_grad


def values_of(seed):
    generator = torch.Generator(GPU).manual_seed(seed)
    return torch.randn(SIZE, device=GPU, generator=generator)


@pytest.fixture
def streams():
    # The first use of a kernel loads it, which waits for running kernels.
    Transfer(torch.full((SIZE,), 0.0, device=GPU), OTHER).wait().add(1)
    torch.cuda.synchronize(GPU)
    torch.cuda.synchronize(OTHER)
    torch.cuda.empty_cache()
    return _copy_streams(GPU, OTHER)


@pytest.mark.multigpu
def test_memory_is_not_reused_before_it_was_sent(streams):
    expected = values_of(1).cpu()
    source = values_of(1)
    address = source.data_ptr()
    torch.cuda.synchronize(GPU)
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(LONG)  # the copy is late
    transfer = Transfer(source, OTHER)
    del source
    poison = [torch.full((SIZE,), torch.nan, device=GPU) for _ in range(4)]
    assert address not in [tensor.data_ptr() for tensor in poison]
    assert torch.equal(transfer.wait().cpu(), expected)
    del poison
    # Now it has been sent, and the memory is free again.
    torch.cuda.synchronize(GPU)
    torch.cuda.synchronize(OTHER)
    free = [torch.empty(SIZE, device=GPU) for _ in range(8)]
    assert address in [tensor.data_ptr() for tensor in free]


@pytest.mark.multigpu
def test_received_memory_is_not_reused_before_it_was_read(streams):
    expected = values_of(1).cpu() + 1
    nan = torch.full((SIZE,), torch.nan, device=GPU)
    received = Transfer(values_of(1), OTHER).wait()
    address = received.data_ptr()
    with torch.cuda.device(OTHER):
        torch.cuda._sleep(LONG)  # the reader is late
    result = received + 1
    del received
    poison = [Transfer(nan, OTHER) for _ in range(4)]
    assert address not in [transfer._tensor.data_ptr() for transfer in poison]
    assert torch.equal(result.cpu(), expected)


@pytest.mark.multigpu
def test_a_copy_waits_for_what_it_sends_and_its_reader_for_the_copy():
    expected = values_of(2).cpu()
    source = torch.full_like(expected, torch.nan, device=GPU)
    values = values_of(2)
    with torch.cuda.device(GPU):
        torch.cuda._sleep(LONG)
    source.copy_(values)
    assert torch.equal(Transfer(source, OTHER).wait().cpu(), expected)
