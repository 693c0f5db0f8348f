"""What the ranks of ``test_validation.py`` do: validate in replicas of two shards."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import ends_of, start_ranks
from tests.training.known_answers import Reader, assert_right, made_cases, validator
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.distributed.rendezvous import joined
from unet3d.interruption import InterruptionRequest

NUM_SHARDS = 2
LIMIT_SECONDS = 20


class SharedReader(Reader):
    """Answers when all shards have asked for the same window."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._shards = group.new_subgroup(torch.device("cpu"), NUM_SHARDS)

    def predict(self, image: Tensor) -> Tensor:
        total = image.clone()
        dist.all_reduce(total, group=self._shards)
        assert torch.equal(total, NUM_SHARDS * image)
        return super().predict(image)


class LateRequest(InterruptionRequest):
    """Says from some moment on that somebody asked to stop."""

    def __init__(self, num_asked: int) -> None:
        self._num_left = num_asked

    @property  # type: ignore[override]
    def signal_number(self) -> int | None:
        self._num_left -= 1
        return 15 if self._num_left < 0 else None


def check_scores(group: Group) -> None:
    """Three cases for the first replica, two for the second."""
    cases, executor = made_cases(), SharedReader(group)
    told: list[tuple[int, ...]] = []
    found = validator(cases, group, NUM_SHARDS, executor).validate(
        1, 10, InterruptionRequest(), lambda *progress: told.append(progress)
    )
    assert_right(found, cases)
    # The first shard alone scores a case, and reports its windows.
    is_told = group.exchange(any(num_done for _, _, num_done, _ in told))
    assert is_told == [True, False, True, False]
    counts = group.exchange(executor.num_windows)
    assert counts[0] == counts[1] > counts[2] == counts[3] > 0


def check_stops(group: Group) -> None:
    """Each rank is asked to stop before another case, or not at all."""
    for moments in ((0, 1, 2, 9), (9, 1, 9, 9), (9, 9, 0, 9), (2, 9, 9, 1)):
        executor = SharedReader(group)
        request = LateRequest(moments[group.ranks.rank])
        found = validator(made_cases(), group, NUM_SHARDS, executor).validate(1, 10, request)
        assert found.stop == 15 and found.dice == {}
        counts = group.exchange(executor.num_windows)
        assert counts[0] == counts[1] and counts[2] == counts[3]


def work() -> None:
    with joined(Ranks.from_environment()) as group:
        group.open(LIMIT_SECONDS)
        check_scores(group)
        check_stops(group)


def main() -> None:
    sys.exit(any(ends_of(start_ranks(4, work))))
