"""What the ranks of ``test_shared_executor.py`` do: share windows, and fail in some of them."""

import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # which building a network imports, and the forks need not

from tests.networks import place, random_checkpoint
from tests.ranks import ends_of, in_ranks, start_ranks
from tests.volumes.samples import noise, write_volume
from unet3d.config import InferenceSettings, ParallelSettings
from unet3d.distributed.group import Group
from unet3d.distributed.purpose import PREDICTION
from unet3d.distributed.ranks import Ranks
from unet3d.distributed.rendezvous import joined
from unet3d.errors import Unet3dError
from unet3d.inference.networks import Networks
from unet3d.inference.placing import PlacedNetworks
from unet3d.inference.predictor import Predictor
from unet3d.inference.shared_executor import SharedExecutor
from unet3d.interruption import Interrupted
from unet3d.parallel import Executor
from unet3d.parallel.spatial.shard import GroupMessages
from unet3d.volumes.scans import Scan, read_scan

LARGE, SMALL = (24, 16, 16), (16, 16, 16)
MESSAGES_BEFORE = 2
"""Of a window, after which a rank fails: it is then in the middle of the network."""

ON_GPUS = "gpus" in sys.argv[2:]

CHECKPOINT = random_checkpoint(dtype=torch.float64, patch_size=None)


def image_of(shape: tuple[int, ...], batch_size: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn((batch_size, 1, *shape), generator=generator, dtype=torch.float64)


def spread(num_ranks: int, timeout_seconds: float = 60) -> ParallelSettings:
    devices = tuple(map(str, range(num_ranks))) if ON_GPUS else ("cpu",) * num_ranks
    return ParallelSettings(mode="spatial", devices=devices, timeout_seconds=timeout_seconds)


def predicted(executor: SharedExecutor, image: torch.Tensor) -> torch.Tensor:
    return executor.predict(image.to(executor.input_device)).cpu()


def shared(group: Group, timeout_seconds: float = 60) -> SharedExecutor:
    networks = Networks.of(CHECKPOINT)
    executor = PlacedNetworks(networks, spread(group.size, timeout_seconds), group).executor
    assert isinstance(executor, SharedExecutor)
    return executor


def in_group(work: Callable[[Group], None], timeout_seconds: float = 60) -> None:
    with joined(Ranks.from_environment(), PREDICTION) as group:
        group.open(timeout_seconds)
        work(group)


def plain() -> Executor:
    executor = place(CHECKPOINT).executor
    assert not isinstance(executor, SharedExecutor)
    return executor


def failing(group: Group, rank: int, fail: Callable[[], object]) -> None:
    """Have a rank fail in the middle of every window of the large size."""
    if group.ranks.rank != rank:
        return
    swap, predict, counts = GroupMessages.swap, SharedExecutor._forward, [0]

    def counted(self: GroupMessages, *arguments: Any) -> None:
        counts[0] += 1
        if counts[0] == MESSAGES_BEFORE:
            fail()
        swap(self, *arguments)

    def armed(self: SharedExecutor, image: Callable[[], torch.Tensor]) -> torch.Tensor:
        made = image()
        counts[0] = 0 if made.shape[2:] == LARGE else MESSAGES_BEFORE
        return predict(self, lambda: made)

    GroupMessages.swap = counted  # type: ignore[method-assign]
    SharedExecutor._forward = armed  # type: ignore[method-assign]


def run_out() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has none.")


def error_of(executor: SharedExecutor, shape: tuple[int, ...]) -> str:
    """Return the error of a window, and that it comes soon."""
    began = time.monotonic()
    try:
        predicted(executor, image_of(shape))
    except (Unet3dError, Interrupted) as error:
        assert time.monotonic() - began < 20
        return f"{type(error).__name__}: {error}"
    raise AssertionError("there was no error")


def follow_and_keep_nothing(executor: SharedExecutor) -> None:
    """See that logits are freed in a rank which only takes part."""
    compute, seen = executor._compute, []

    def watched(*arguments: Any) -> torch.Tensor:
        assert all(logits() is None for logits in seen)
        made = compute(*arguments)
        seen.append(weakref.ref(made))
        return made

    executor._compute = watched  # type: ignore[method-assign]
    executor.follow()
    assert len(seen) == 4 and all(logits() is None for logits in seen)


def check_windows(group: Group) -> None:
    """Compare windows of many shapes with what one process computes."""
    executor = shared(group)
    if not group.is_first:
        follow_and_keep_nothing(executor)
        return
    for shape, batch_size in (((16, 8, 8), 1), ((10, 12, 6), 3), ((30, 8, 8), 1), ((8, 12, 6), 2)):
        image = image_of(shape, batch_size)
        difference = predicted(executor, image) - plain().predict(image)
        assert difference.abs().max() < 1e-10, shape
    executor.end()


MEMBERS = (
    CHECKPOINT,
    random_checkpoint(dtype=torch.float64, patch_size=None, seed=8),
    random_checkpoint(dtype=torch.float64, patch_size=None, channels=(6, 8)),
    random_checkpoint(dtype=torch.float32, patch_size=None),
)
"""Two that differ in their weights, one of another topology and one of another type."""


def check_networks(group: Group) -> None:
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


def check_memory(group: Group, out: Path, fails: int) -> None:
    """Run out of memory in one rank, and go on."""
    failing(group, fails, run_out)
    executor = shared(group)
    if not group.is_first:
        executor.follow()
        return
    errors = []
    for _ in range(2):
        errors.append(error_of(executor, LARGE))
        image = image_of(SMALL)
        assert torch.allclose(predicted(executor, image), plain().predict(image))
    assert errors[0] == errors[1]
    executor.end()
    (out / f"memory-{fails}.txt").write_text(errors[0])


def check_planes(group: Group, out: Path) -> None:
    """Ask for a window of fewer planes than ranks, then for one that is large enough."""
    executor = shared(group)
    if not group.is_first:
        executor.follow()
        return
    error = error_of(executor, (2, 16, 16))
    assert predicted(executor, image_of(SMALL)).shape == (1, 3, *SMALL)
    executor.end()
    (out / "planes.txt").write_text(error)


def check_smaller_windows(group: Group, folder: Path) -> None:
    """Segment a scan that does not fit into the memory of the second rank in one piece."""
    failing(group, 1, run_out)
    predictor = Predictor(Networks.of(CHECKPOINT), spread(group.size), [InferenceSettings()], group)
    if not group.is_first:
        predictor.follow()
        return
    path = write_volume(folder / "scan.nii", noise(LARGE))
    image = read_scan(Scan(images=(path,), output=folder / "unused.nii"))
    found = predictor.segment(image)
    predictor.end()
    halves = InferenceSettings(window=(12, 16, 16))
    np.testing.assert_array_equal(found, place(CHECKPOINT, inference=halves).segment(image))
    assert len(np.unique(found)) == 3


LOSSES: dict[str, tuple[Callable[[], object], float]] = {
    "killed": (lambda: os._exit(0), 60),
    "faulty": (lambda: 1 / 0, 60),
    "hanging": (lambda: time.sleep(5), 1),
    "stopped": (lambda: signal.raise_signal(signal.SIGTERM), 60),
}
"""What happens to a rank, and after how many seconds of silence it counts as hanging."""


LATE_SECONDS = 1
"""Silence after which a rank counts as hanging that does not ask for a window."""


def check_late(group: Group, out: Path) -> None:
    """Have the second rank hang after a window, before it hears of the next one."""
    executor = shared(group, LATE_SECONDS)
    if group.is_first:
        predicted(executor, image_of(SMALL))
        (out / "late.txt").write_text(error_of(executor, SMALL))
        os._exit(0)
    compute = executor._compute

    def sleepy(*arguments: Any) -> torch.Tensor:
        logits = compute(*arguments)
        time.sleep(5)
        return logits

    executor._compute = sleepy  # type: ignore[method-assign]
    try:
        executor.follow()
    finally:
        os._exit(0)


def check_loss(group: Group, out: Path, name: str, fail: Callable[[], object]) -> None:
    """Lose the second rank in the middle of a window."""
    failing(group, 1, fail)
    executor = shared(group)
    if group.is_first:
        (out / f"{name}.txt").write_text(error_of(executor, LARGE))
        os._exit(0)
    try:
        executor.follow()
    finally:
        os._exit(0)


def main_on_gpus(out: Path) -> None:
    statuses = in_ranks(2, lambda: in_group(check_windows))
    statuses += in_ranks(2, lambda: in_group(check_networks))
    for fails in (0, 1):
        statuses += in_ranks(
            2,
            lambda fails=fails: in_group(  # type: ignore[misc]
                lambda group: check_memory(group, out, fails)
            ),
        )
    statuses += in_ranks(2, lambda: in_group(lambda group: check_smaller_windows(group, out)))
    sys.exit(any(statuses))


def main(out: Path) -> None:
    statuses = in_ranks(3, lambda: in_group(check_windows))
    statuses += in_ranks(2, lambda: in_group(check_networks))
    statuses += in_ranks(2, lambda: in_group(lambda group: check_memory(group, out, 1)))
    statuses += in_ranks(3, lambda: in_group(lambda group: check_memory(group, out, 0)))
    statuses += in_ranks(3, lambda: in_group(lambda group: check_planes(group, out)))
    statuses += in_ranks(2, lambda: in_group(lambda group: check_smaller_windows(group, out)))
    waiting = []  # which they do most of the time, and so all at once
    for name, (fail, limit) in LOSSES.items():
        waiting += start_ranks(
            2,
            lambda name=name, fail=fail, limit=limit: in_group(  # type: ignore[misc]
                lambda group: check_loss(group, out, name, fail), limit
            ),
        )
    late = partial(check_late, out=out)
    waiting += start_ranks(2, lambda: in_group(late, LATE_SECONDS))
    sys.exit(any(statuses + ends_of(waiting)))


if __name__ == "__main__":
    (main_on_gpus if ON_GPUS else main)(Path(sys.argv[1]))
