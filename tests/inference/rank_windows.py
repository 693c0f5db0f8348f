"""What the ranks of ``test_shared_executor.py`` do: share windows, and fail in some of them."""

import itertools
import os
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which building a network imports, and the forks need not
import torch.distributed as dist

from tests.networks import place, random_checkpoint
from tests.ranks import ends_of, start_ranks
from unet3d.config import ParallelSettings
from unet3d.distributed import watch
from unet3d.distributed.ranks import PREDICTION, Ranks
from unet3d.distributed.rendezvous import joined
from unet3d.errors import Unet3dError
from unet3d.inference.networks import Networks
from unet3d.inference.placing import PlacedNetworks
from unet3d.inference.shared_executor import SharedExecutor
from unet3d.interruption import Interrupted
from unet3d.parallel.spatial.shard import GroupMessages

LARGE, SMALL = (24, 16, 16), (16, 16, 16)

PATIENT_SECONDS, HANGING_SECONDS = 120, 5
"""Silence after which a rank counts as hanging, where it does not hang and where it does."""

ON_GPUS = "gpus" in sys.argv[2:]

CHECKPOINT = random_checkpoint(dtype=torch.float64, patch_size=None)


def image_of(shape, batch_size=1):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn((batch_size, 1, *shape), generator=generator, dtype=torch.float64)


def spread(num_ranks, timeout_seconds=PATIENT_SECONDS):
    devices = tuple(map(str, range(num_ranks))) if ON_GPUS else ("cpu",) * num_ranks
    return ParallelSettings(mode="spatial", devices=devices, timeout_seconds=timeout_seconds)


def predicted(executor, image):
    return executor.predict(image.to(executor.input_device)).cpu()


def shared(group, timeout_seconds=PATIENT_SECONDS):
    networks = Networks.of(CHECKPOINT)
    executor = PlacedNetworks(networks, spread(group.size, timeout_seconds), group).executor
    assert isinstance(executor, SharedExecutor)
    return executor


def failing(group, rank, fail):
    """Have a rank fail in the middle of every window of the large size, at its second message."""
    if group.ranks.rank != rank:
        return
    swap, broadcast, counts = GroupMessages.swap, dist.broadcast, [2]

    def counted(self, *arguments):
        counts[0] += 1
        if counts[0] == 2:
            fail()
        swap(self, *arguments)

    def armed(tensor, *arguments, **names):
        if tensor.dim() == 5:
            counts[0] = 0 if tensor.shape[2:] == LARGE else 2
        return broadcast(tensor, *arguments, **names)

    GroupMessages.swap = counted  # type: ignore[method-assign]
    dist.broadcast = armed


def run_out():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has none.")


def error_of(executor, shape):
    """Return the error of a window, which comes long before any limit."""
    began = time.monotonic()
    try:
        predicted(executor, image_of(shape))
    except (Unet3dError, Interrupted) as error:
        assert time.monotonic() - began < PATIENT_SECONDS / 2
        return f"{type(error).__name__}: {error}"
    raise AssertionError("there was no error")


def check_windows(group):
    """Compare windows of many shapes with what one process computes."""
    executor = shared(group)
    if not group.is_first:
        predict, seen = executor.placed.predict, []

        def watched(image):
            assert all(logits() is None for logits in seen)
            logits = predict(image)
            seen.append(weakref.ref(logits))
            return logits

        vars(executor.placed)["predict"] = watched
        executor.follow()
        # A rank that only takes part keeps nothing.
        assert len(seen) == 4 and all(logits() is None for logits in seen)
        return
    for shape, batch_size in (((16, 8, 8), 1), ((10, 12, 6), 3), ((30, 8, 8), 1), ((8, 12, 6), 2)):
        image = image_of(shape, batch_size)
        difference = predicted(executor, image) - place(CHECKPOINT).executor.predict(image)
        assert difference.abs().max() < 1e-10, shape
    executor.end()


MEMBERS = (
    CHECKPOINT,
    random_checkpoint(dtype=torch.float64, patch_size=None, seed=8),
    random_checkpoint(dtype=torch.float64, patch_size=None, channels=(6, 8)),
    random_checkpoint(dtype=torch.float32, patch_size=None),
)
"""Two that differ in their weights, one of another topology and one of another type."""


def check_networks(group):
    """Compare windows of several networks in turn with what one process computes."""
    placed = PlacedNetworks(Networks.of(*MEMBERS), spread(group.size), group)
    if not group.is_first:
        placed.follow()
        return
    for index in (1, 0, 2, 2, 3, 0):
        placed.use(index)
        image = image_of((16, 8, 8)).to(MEMBERS[index].dtype)
        expected = place(MEMBERS[index]).executor.predict(image)
        limit = 1e-10 if MEMBERS[index].dtype == torch.float64 else 1e-3
        assert isinstance(placed.executor, SharedExecutor)
        assert (predicted(placed.executor, image) - expected).abs().max() < limit, index
    placed.end()


def check_memory(group, out, fails):
    """Run out of memory in one rank, or have too few planes for all of them, and go on."""
    failing(group, fails, run_out)
    executor = shared(group)
    if not group.is_first:
        executor.follow()
        return
    errors = [("memory", LARGE), ("again", LARGE)]
    if group.size > 2:
        errors.append(("planes", (2, 16, 16)))
    for name, shape in errors:
        (out / f"{name}-{fails}.txt").write_text(error_of(executor, shape))
        image = image_of(SMALL)
        expected = place(CHECKPOINT).executor.predict(image)
        assert torch.allclose(predicted(executor, image), expected)
    executor.end()


def hang_until(path):
    """Say nothing until the first rank has written what it is told."""
    began = time.monotonic()
    while not path.exists() and time.monotonic() - began < PATIENT_SECONDS:
        time.sleep(0.05)


def check_loss(group, out, name):
    """Lose the second rank in the middle of a window, or before it hears of the second one."""
    path = out / f"{name}.txt"
    if name != "late":
        failing(group, 1, lambda: os._exit(0) if name == "killed" else hang_until(path))
    executor = shared(group, HANGING_SECONDS if name in ("hanging", "late") else PATIENT_SECONDS)
    try:
        if group.is_first:
            if name == "late":
                predicted(executor, image_of(SMALL))
            error = error_of(executor, LARGE)
            path.with_suffix(".new").write_text(error)
            path.with_suffix(".new").rename(path)
        else:
            if name == "late":
                hang_at_the_second_window(path)
            executor.follow()
    finally:
        os._exit(0)


def hang_at_the_second_window(path):
    broadcast, commands = dist.broadcast, itertools.count()

    def late(tensor, *arguments, **names):
        if not tensor.is_floating_point() and next(commands) == 1:
            hang_until(path)
        return broadcast(tensor, *arguments, **names)

    dist.broadcast = late


def start(num_ranks, work, *arguments, limit=PATIENT_SECONDS):
    """Start ranks that are connected and do some work; return their ids."""

    def connected():
        with joined(Ranks.from_environment(), PREDICTION) as group:
            group.open(limit)
            work(group, *arguments)

    return start_ranks(num_ranks, connected)


def main(out):
    """Run every check; on GPUs, leave out the losses of ranks, which need none."""
    watch.GRACE_SECONDS = 0.1  # before each error of two ranks, of which one is lost
    three = 2 if ON_GPUS else 3
    calls: tuple[tuple[Any, ...], ...] = (
        (three, check_windows),
        (2, check_networks),
        (2, check_memory, out, 1),
        (three, check_memory, out, 0),
    )
    statuses = [status for call in calls for status in ends_of(start(*call))]
    if not ON_GPUS:  # ranks that wait most of the time, and so all of them at once
        waiting = start(2, check_loss, out, "killed")
        for name in ("hanging", "late"):
            waiting += start(2, check_loss, out, name, limit=HANGING_SECONDS)
        statuses += ends_of(waiting)
    sys.exit(any(statuses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
