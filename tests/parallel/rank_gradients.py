"""What the ranks of test_replicas.py do: gradients of shares of batches, or of slabs."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel.cpu_graphs import CpuGraphPool
from tests.plain_network import (
    NESTED,
    TRAINED_ELSEWHERE,
    gradients_of,
    make_batch,
    make_network,
    make_topology,
)
from tests.ranks import in_ranks
from unet3d.config import ModelSettings
from unet3d.distributed.ranks import Ranks
from unet3d.distributed.rendezvous import joined
from unet3d.kernels import triton_support
from unet3d.kernels.conv.hopper import api as hopper
from unet3d.model import SegmentationLoss, UNet3d, plan_topology
from unet3d.parallel import Layout, exchange, graph, parallelize
from unet3d.parallel.exchange import FlatExchange
from unet3d.parallel.graph import NUM_WARM_UP_STEPS
from unet3d.parallel.spatial import division
from unet3d.patches.loader import share_of

RESIDUAL = {"encoder": "residual", "deep_supervision": True}
CASES = (
    # replicas, shards, samples of the batch, stages, micro-batches, whether the loss joins the sums
    # of samples (batch Dice), options; with joined sums some voxels are ignored
    (3, 1, 2, 1, 1, True, {"overlaps": True, **RESIDUAL}),
    (2, 1, 5, 1, 1, True, {"captured": True}),
    (2, 1, 5, 1, 2, False, {"captured": True, "adds": True}),  # the second rank captures alone
    (2, 2, 5, 1, 2, True, {"regions": NESTED, **TRAINED_ELSEWHERE}),
    (1, 3, 2, 1, 1, False, {"encoder": "residual", "kernels": "anisotropic", **TRAINED_ELSEWHERE}),
    (2, 1, 5, 1, 1, False, {}),
    (3, 1, 2, 1, 1, False, {}),
    (2, 1, 1, 2, 1, False, {}),
    (2, 1, 5, 1, 3, True, {"deep_supervision": True, "norm": "group"}),
    (3, 1, 2, 1, 1, True, RESIDUAL),
    (3, 1, 7, 2, 2, True, {}),
    (2, 1, 3, 2, 2, False, {"kernels": "anisotropic"}),
    (2, 1, 5, 2, 2, False, {"overlaps": True}),
    (3, 1, 2, 2, 1, True, {"captured": True, **RESIDUAL}),
    (1, 2, 1, 1, 1, False, {}),
    (2, 2, 5, 1, 2, False, {}),
    (2, 2, 1, 1, 1, False, {"norm": "group"}),
    (1, 2, 3, 1, 2, True, {"deep_supervision": True}),
    (2, 2, 3, 1, 2, True, RESIDUAL),
    (1, 2, 2, 1, 1, False, {"regions": NESTED, "kernels": "anisotropic"}),
    (3, 1, 5, 2, 2, True, {"regions": NESTED}),
    (2, 1, 1, 1, 2, True, {}),
    (2, 2, 1, 1, 1, True, {}),
    (3, 1, 5, 1, 3, False, RESIDUAL),
    (2, 1, 5, 3, 5, False, {"norm": "group", "deep_supervision": True}),
)
BY_DAY = range(5)
"""The cases that are run by day."""
WAYS = ("captured", "overlaps", "adds")
"""Options for how steps are run; the other options are those of a topology."""
STEPS = 2
GROUPS = []
"""Process groups over which sums are taken; the last one is current."""
CAPTURED_STEPS = NUM_WARM_UP_STEPS + 3

GPU_SIZE = (96, 64, 64)
GPU_CASES = (
    {"autocast": None, "recompute": "level"},
    {"autocast": torch.bfloat16},
    {"autocast": torch.bfloat16, "offload": "skips"},
    {"autocast": torch.bfloat16, "num_replicas": 2},  # batch Dice, with a message in the graph
    {"autocast": torch.bfloat16, "triton": False},  # Triton does not compile in the second rank
    {"autocast": torch.bfloat16, "by_hand": False},  # the second rank has no hand-written ones
)


def slab_of(layout, topology, *tensors):
    """Return a shard's planes of images (N, C, X, Y, Z) and targets (N, X, Y, Z)."""
    rule = division.SlabRule(topology=topology, num_shards=layout.num_shards)
    slab, device = rule.slab(layout.shard, tensors[-1].shape[1:]), layout.devices[0]
    return [one.narrow(one.dim() - 3, slab.start, len(slab)).to(device) for one in tensors]


@torch.library.custom_op("unet3d_tests::sum_over_ranks", mutates_args=())
def sum_over_ranks(sums: Tensor) -> Tensor:
    """Add up in one operation that waits: a recording on a CPU does not wait for messages."""
    total = sums.clone()
    if not CpuGraphPool.is_capturing:
        dist.all_reduce(total, group=GROUPS[-1])
    return total


def recorded_total(own, sums):
    """Replacement for the exchange's own method, which a GPU captures."""
    GROUPS.append(own._groups[own._stages[0].slot.index])
    return sum_over_ranks(sums)


def recorded_mean(own, flat, kind, group):
    """Replacement for the message of gradients, which a GPU captures."""
    GROUPS.append(group)
    flat.copy_(sum_over_ranks(flat))


def watched_pieces(own):
    """Return a list that gets, whenever a piece is sent, the number of gradients still missing."""
    send, sent = own._send, []

    def watched(piece):
        sent.append(sum(len(one.missing) for one in own._pieces))
        send(piece)

    own._send = watched
    return sent


def take_steps(folder, group, number):
    """Run steps on a share of the batch, and keep losses and gradients."""
    is_captured = CASES[number][-1].get("captured", False)
    with pytest.MonkeyPatch.context() as patch:
        if is_captured:
            patch.setitem(graph.POOLS, "cpu", CpuGraphPool)
            patch.setattr(CpuGraphPool, "num_captured", 0)
            patch.setattr(FlatExchange, "total", recorded_total)
            patch.setattr(FlatExchange, "_reduce", recorded_mean)
        patch.setattr(exchange, "PIECE_BYTES", 2000)
        take_steps_on_share(folder, group, number)
        launches = CASES[number][-1].get("adds") and group.ranks.is_first
        assert bool(CpuGraphPool.num_captured) == (is_captured and not launches)


def take_steps_on_share(folder, group, number):
    num_replicas, num_shards, num_samples, num_stages, num_micro_batches, joins, own = CASES[number]
    options = {**own}
    is_captured, overlaps = options.pop("captured", False), options.pop("overlaps", False)
    adds = options.pop("adds", False)
    loss_fn = SegmentationLoss(joins_samples=joins, regions=options.pop("regions", ()))
    rank, topology = group.ranks.rank, make_topology(**options)
    model = make_network(topology)
    if rank > 0:  # each rank begins with its own weights, which the first rank's must replace
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
    replica, shard = divmod(rank, num_shards)
    layout = Layout(
        devices=(torch.device("cpu"),) * num_stages,
        num_micro_batches=num_micro_batches,
        num_replicas=num_replicas,
        num_shards=num_shards,
        shard=shard,
    )
    executor = parallelize(model, layout, group)
    if overlaps:  # as between machines
        executor.exchange._overlaps = True
        sent = watched_pieces(executor.exchange)
    image, target = slab_of(layout, topology, *make_batch(num_samples, ignores=joins))
    mine = share_of(range(num_samples), replica, num_replicas)
    weight = len(mine) * num_replicas / num_samples
    rows, planes = list(mine or range(1)), 16 if num_shards > 1 else None
    steps = []
    for step in range(CAPTURED_STEPS if is_captured else STEPS):
        before = gradients_of(model) if adds and step else {}
        before = {name: value.clone() for name, value in before.items()}
        if not adds:
            model.zero_grad(set_to_none=step == 0)
        terms = executor.forward_backward(
            image[rows], target[rows], loss_fn, weight=weight, planes=planes
        )
        share = len(mine) / num_samples / num_shards
        (total,) = group.sum([terms.total.item() * share])
        added = {name: p - before.get(name, 0) for name, p in gradients_of(model).items()}
        steps.append((total, added))
    if overlaps:  # some pieces before all gradients were there, the last one after
        assert len(sent) > 3 * STEPS and max(sent) > 0 and sent[-1] == 0
    model.zero_grad()
    if num_shards == 1:  # like a step that a GPU has replayed
        with executor.exchange.averaging():
            for stage in executor.stages:
                for parameter in (p for block in stage.blocks for p in block.module.parameters()):
                    parameter.grad = torch.full_like(parameter, rank)
    replayed = list(gradients_of(model).values())
    torch.save((steps, replayed), folder / f"{number}-{rank}.pt")


def gpu_gradients(layout, group=None, *, joins_samples=False):
    """Return loss and gradients of a network with folded large maps and whole lowest levels."""
    settings = ModelSettings(channels=(32, 64, 64, 64), deep_supervision=False)
    torch.manual_seed(1)
    model = UNet3d(plan_topology(settings, GPU_SIZE, (1.0, 1.0, 1.0), 1, 3))
    executor = parallelize(model, layout, group)
    generator = torch.Generator().manual_seed(3)
    image = torch.randn(2, 1, *GPU_SIZE, generator=generator) + 2
    target = torch.randint(0, 3, (2, *GPU_SIZE), generator=generator, dtype=torch.uint8)
    if layout.num_replicas > 1:
        rank = group.ranks.rank
        image, target = image[rank : rank + 1], target[rank : rank + 1]
    batch = slab_of(layout, model.topology, image, target)
    planes = GPU_SIZE[0] if layout.num_shards > 1 else None
    loss_fn = SegmentationLoss(joins_samples=joins_samples)
    for _ in range(6):  # if steps are captured, the last ones are replayed
        model.zero_grad(set_to_none=False)
        terms = executor.forward_backward(*batch, loss_fn, planes=planes)
    if layout.num_replicas > 1:
        assert executor._capture._captured is not None
    return terms.total.item(), {name: p.cpu() for name, p in gradients_of(model).items()}


def share_a_volume(folder, group, number):
    """Keep the results of :func:`gpu_gradients` for a slab."""
    rank = group.ranks.rank
    devices, case = (torch.device("cuda", rank),), {**GPU_CASES[number]}
    has_replicas = "num_replicas" in case
    slab = {} if has_replicas else {"num_shards": group.size, "shard": rank}
    with pytest.MonkeyPatch.context() as patch:
        if not case.pop("triton", True):
            patch.setattr(triton_support, "works", lambda: rank == 0)
        if not case.pop("by_hand", True):
            patch.setattr(hopper, "available", lambda device: rank == 0)
        found = gpu_gradients(
            Layout(devices=devices, **slab, **case), group, joins_samples=has_replicas
        )
    torch.save(found, folder / f"{number}-{rank}.pt")


def take_part(folder, numbers, work):
    division.MIN_DIVIDED_ELEMENTS = 0 if work is take_steps else 2**17
    with joined(Ranks.from_environment()) as group:
        group.open(60)
        for number in numbers:
            work(folder, group, number)


def main(folder, kind):
    is_cuda = kind == "cuda"
    sizes = [2] * len(GPU_CASES) if is_cuda else [case[0] * case[1] for case in CASES]
    chosen = {
        "day": BY_DAY,
        "night": range(len(BY_DAY), len(CASES)),
        "cuda": range(len(GPU_CASES)),
    }[kind]
    work = share_a_volume if is_cuda else take_steps
    for size in set(sizes):
        numbers = [number for number in chosen if sizes[number] == size]
        assert not any(in_ranks(size, partial(take_part, Path(folder), numbers, work)))
