"""If one rank cannot compile kernels whose messages differ, no rank uses them."""

from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch

from tests.plain_network import make_network, make_topology
from tests.rank_threads import place
from unet3d import parallel
from unet3d.distributed.group import Group
from unet3d.kernels import convolves_by_hand, triton_support
from unet3d.kernels.conv.hopper import api as hopper
from unet3d.parallel import Layout, parallelize

GPU = torch.device("cuda", 0)
ON_GPU = Mock(device=GPU, is_cuda=True)


@pytest.fixture(autouse=True)
def working_gpu(monkeypatch):
    """A GPU for which Triton compiles in this process."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(triton_support, "works", lambda: True)
    monkeypatch.setattr(triton_support, "_other_ranks_can", True)
    monkeypatch.setattr(hopper, "available", lambda device: True)
    monkeypatch.setattr(hopper, "_all_slabs_can", True)


@pytest.mark.parametrize("others_can", [True, False])
@pytest.mark.parametrize("mode", ["FlatExchange", "SpatialExecutor"])
def test_ranks_agree_when_a_network_is_placed(others_can, mode, monkeypatch, caplog):
    asked = []

    def exchange(own):
        asked.append(own)
        return [own, others_can]

    group = Group(place(0, 2))
    monkeypatch.setattr(group, "exchange", exchange)
    monkeypatch.setattr(parallel, "NetworkExecutor", Mock())
    monkeypatch.setattr("unet3d.parallel.spatial.executor.SpatialExecutor", Mock())
    layout = Layout(devices=(GPU,), num_shards=2 if mode == "SpatialExecutor" else 1)
    assert triton_support.triton_available(ON_GPU)
    parallelize(make_network(make_topology()), layout, group)
    has_slabs = mode == "SpatialExecutor"
    assert asked == [True] * (1 + has_slabs)
    assert triton_support.triton_available(ON_GPU) == others_can
    # Replicas exchange nothing about their convolutions.
    assert convolves_by_hand(GPU, torch.bfloat16) == (others_can or not has_slabs)
    said = ["Triton cannot compile in rank 1, so training is several times slower in all ranks"]
    if has_slabs:
        said.append("rank 1 does not have the hand-written convolutions, so all ranks use cuDNN")
    assert caplog.messages == ([] if others_can else said)


def test_what_is_planned_is_what_such_a_gpu_has(monkeypatch):
    hopper.agree([GPU], lambda own: [own, False])
    assert not convolves_by_hand(GPU, torch.bfloat16)
    assert convolves_by_hand(torch.device("cpu", 0), torch.bfloat16)  # a fake GPU


def test_a_rank_on_a_cpu_takes_part_and_asks_nobody(monkeypatch):
    monkeypatch.setattr(triton_support, "works", Mock(side_effect=AssertionError))
    answers = []
    triton_support.agree([torch.device("cpu")], lambda own: answers.append(own) or [own, True])
    assert answers == [True]
