"""What the ranks of test_ranks.py do: gradients of slabs of their shares of batches."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which DDP imports, and the forks need not
from torch import Tensor

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
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.distributed.rendezvous import joined
from unet3d.model import (
    SegmentationLoss,
    Topology,
    UNet3d,
    dice_cross_entropy,
    plan_topology,
)
from unet3d.parallel import Layout
from unet3d.parallel.spatial import division
from unet3d.parallel.spatial.executor import SpatialExecutor
from unet3d.volumes.loader import share_of

CASES: tuple[tuple[int, int, int, int, bool, dict[str, Any]], ...] = (
    # replicas, shards, samples of the batch, micro-batches, whether sums are joined, options; in
    # all with joined sums a part of the voxels is ignored
    (1, 2, 1, 1, False, {}),
    (2, 2, 5, 2, False, {}),
    (2, 2, 1, 1, False, {"norm": "group"}),
    (1, 2, 3, 2, True, {"deep_supervision": True}),
    (2, 2, 3, 2, True, {"encoder": "residual", "deep_supervision": True}),
    (2, 2, 1, 1, True, {}),
    (2, 1, 3, 1, True, {}),
    (2, 2, 5, 2, True, {"regions": NESTED, **TRAINED_ELSEWHERE}),
    (1, 2, 2, 1, False, {"regions": NESTED, "kernels": "anisotropic"}),
    (1, 3, 2, 1, False, {"encoder": "residual", "kernels": "anisotropic", **TRAINED_ELSEWHERE}),
)
STEPS = 2

GPU_SIZE = (96, 64, 64)
GPU_CASES: tuple[dict[str, Any], ...] = (
    {"autocast": None},
    {"autocast": None, "recompute": "level"},
    {"autocast": torch.bfloat16},
    {"autocast": torch.bfloat16, "recompute": "off", "cuda_graphs": "off"},
    {"autocast": torch.bfloat16, "offload": "skips"},
)
GPU_STEPS = 6
"""The last ones are replayed, where steps are captured."""


def gpu_topology() -> Topology:
    """Return a network whose finest maps are folded and whose last levels are whole."""
    settings = ModelSettings(channels=(32, 64, 64, 64), deep_supervision=False)
    return plan_topology(settings, GPU_SIZE, (1.0, 1.0, 1.0), 1, 3)


def gpu_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    image = torch.randn(2, 1, *GPU_SIZE, generator=generator) + 2
    target = torch.randint(0, 3, (2, *GPU_SIZE), generator=generator, dtype=torch.uint8)
    return image, target


def on_cpus(folder: Path, group: Group, number: int) -> None:
    num_replicas, num_shards, num_samples, num_micro_batches, joins, own = CASES[number]
    options: dict[str, Any] = {**own}
    loss_fn = SegmentationLoss(joins_samples=joins, regions=options.pop("regions", ()))
    rank = group.ranks.rank
    replica, shard = divmod(rank, num_shards)
    model = make_network(make_topology(**options))
    if rank > 0:  # every rank begins with weights of its own: the first one's must win
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
    layout = Layout(
        devices=(torch.device("cpu"),),
        num_micro_batches=num_micro_batches,
        num_replicas=num_replicas,
        num_shards=num_shards,
        shard=shard,
    )
    executor = SpatialExecutor(model, layout, group)
    image, target = make_batch(num_samples, ignores=joins)
    mine = share_of(range(num_samples), replica, num_replicas)
    weight = len(mine) * num_replicas / num_samples
    rows = list(mine or range(1))
    slab = executor.rule.slab(shard, (16, 16, 8))
    for step in range(STEPS):
        model.zero_grad(set_to_none=step == 0)
        terms = executor.forward_backward(
            image[rows][:, :, slab.start : slab.stop],
            target[rows][:, slab.start : slab.stop],
            loss_fn,
            weight=weight,
            planes=16,
        )
    share = len(mine) / num_samples / num_shards
    (loss,) = group.sum([terms.total.item() * share])
    torch.save((loss, gradients_of(model)), folder / f"{number}-{rank}.pt")


def on_gpus(folder: Path, group: Group, number: int) -> None:
    rank = group.ranks.rank
    device = torch.device("cuda", rank)
    torch.manual_seed(1)
    model = UNet3d(gpu_topology())
    own = Layout(devices=(device,), num_shards=group.size, shard=rank, **GPU_CASES[number])
    executor = SpatialExecutor(model, own, group)
    image, target = gpu_batch()
    slab = executor.rule.slab(rank, GPU_SIZE)
    image = image[:, :, slab.start : slab.stop].to(device)
    target = target[:, slab.start : slab.stop].to(device)
    for _ in range(GPU_STEPS):
        model.zero_grad(set_to_none=False)
        terms = executor.forward_backward(image, target, dice_cross_entropy, planes=GPU_SIZE[0])
    gradients = {name: value.cpu() for name, value in gradients_of(model).items()}
    torch.save((terms.total.item(), gradients), folder / f"{number}-{rank}.pt")


def take_part(folder: Path, numbers: list[int], work: Callable[[Path, Group, int], None]) -> None:
    division.MIN_DIVIDED_ELEMENTS = 0 if work is on_cpus else 2**17
    with joined(Ranks.from_environment()) as group:
        group.open(60)
        for number in numbers:
            work(folder, group, number)


def main(folder: str, kind: str) -> None:
    is_cuda = kind == "cuda"
    sizes = [2] * len(GPU_CASES) if is_cuda else [case[0] * case[1] for case in CASES]
    work = on_gpus if is_cuda else on_cpus
    for size in set(sizes):
        numbers = [number for number, own in enumerate(sizes) if own == size]
        assert not any(in_ranks(size, partial(take_part, Path(folder), numbers, work)))
