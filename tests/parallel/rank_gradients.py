"""What the ranks of tests/parallel/test_replicas.py do: gradients of their shares of batches."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which DDP imports, and the forks need not

from tests.plain_network import NESTED, make_batch, make_topology
from tests.ranks import in_ranks
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.distributed.rendezvous import joined
from unet3d.model import SegmentationLoss, UNet3d
from unet3d.parallel import Layout, parallelize
from unet3d.volumes.loader import share_of

CASES: tuple[tuple[int, int, int, int, bool, dict[str, Any]], ...] = (
    # ranks, samples of the batch, stages, micro-batches, whether their sums are joined, options; in
    # all with joined sums a part of the voxels is ignored
    (2, 5, 1, 1, False, {}),
    (3, 5, 1, 3, False, {"encoder": "residual", "deep_supervision": True}),
    (3, 2, 1, 1, False, {}),
    (2, 1, 2, 1, False, {}),
    (2, 5, 3, 5, False, {"norm": "group", "deep_supervision": True}),
    (2, 5, 1, 3, True, {"deep_supervision": True, "norm": "group"}),
    (3, 2, 1, 1, True, {"encoder": "residual", "deep_supervision": True}),
    (2, 1, 1, 2, True, {}),
    (3, 7, 2, 2, True, {}),
    (2, 3, 2, 2, False, {"kernels": "anisotropic"}),
    (3, 5, 2, 2, True, {"regions": NESTED}),
)
STEPS = 2


def take_part(folder: Path) -> None:
    with joined(Ranks.from_environment()) as group:
        group.open(60)
        for number, case in enumerate(CASES):
            if case[0] == group.size:
                take_steps(folder, group, number)


def take_steps(folder: Path, group: Group, number: int) -> None:
    _, num_samples, num_stages, num_micro_batches, joins_samples, own = CASES[number]
    rank, options = group.ranks.rank, {**own}
    loss = SegmentationLoss(joins_samples=joins_samples, regions=options.pop("regions", ()))
    # Every rank begins with weights of its own: the first one's must win.
    torch.manual_seed(1 + rank)
    model = UNet3d(make_topology(**options)).double()
    layout = Layout(
        devices=(torch.device("cpu"),) * num_stages,
        cuts=None,
        num_micro_batches=num_micro_batches,
    )
    executor = parallelize(model, layout, group)
    image, target = make_batch(num_samples, ignores=joins_samples)
    mine = share_of(range(num_samples), rank, group.size)
    weight = len(mine) * group.size / num_samples
    rows = list(mine or range(1))
    steps = []
    for step in range(STEPS):  # DDP arranges its buckets anew after the first
        model.zero_grad(set_to_none=step == 0)
        terms = executor.forward_backward(image[rows], target[rows], loss, weight=weight)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        (total,) = group.sum([terms.total.item() * len(mine) / num_samples])
        steps.append((total, gradients))
    model.zero_grad()
    for stage in executor.stages:  # as after a step that a GPU has replayed
        parameters = [p for block in stage.blocks for p in block.module.parameters()]
        executor.exchange.add(stage, {p: torch.full_like(p, rank) for p in parameters})
    torch.save((steps, [p.grad for p in model.parameters()]), folder / f"{number}-{rank}.pt")


def main(folder: str) -> None:
    for size in {case[0] for case in CASES}:
        assert not any(in_ranks(size, partial(take_part, Path(folder))))
