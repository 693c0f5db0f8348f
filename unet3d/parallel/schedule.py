"""Which micro-batch runs where and when: pure functions that do not depend on devices.

A schedule is a list of actions in the order in which one process queues them. Devices work
asynchronously, so two actions on different stages overlap as far as their data allow. In the
timetables below a column is one unit of time, F2 is micro-batch 2 forward, B2 backward.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Action:
    """One pass of one micro-batch through one stage."""

    kind: Literal["forward", "backward"]
    micro_batch: int
    stage: int


def one_forward_one_backward(num_micro_batches: int, num_stages: int) -> Iterator[Action]:
    """Yield the 1F1B schedule (PipeDream-flush, Narayanan et al., arXiv 2006.09503).

    Each stage starts as many micro-batches as there are stages from it to the end, then
    alternates: so stage 0 keeps the activations of at most ``num_stages`` micro-batches, the last
    stage of one, however many there are::

        stage 0   F0 F1 .. B0 F2 B1 F3 B2 .. B3
        stage 1   .. F0 B0 F1 B1 F2 B2 F3 B3 ..

    With one stage this is gradient accumulation: F0 B0 F1 B1 and so on.
    """
    per_stage = []
    for stage in range(num_stages):
        ahead = min(num_micro_batches, num_stages - stage)
        order = [Action(kind="forward", micro_batch=i, stage=stage) for i in range(ahead)]
        for i in range(num_micro_batches):
            order.append(Action(kind="backward", micro_batch=i, stage=stage))
            if i + ahead < num_micro_batches:
                order.append(Action(kind="forward", micro_batch=i + ahead, stage=stage))
        per_stage.append(order)
    return _as_queued(per_stage)


def most_alive(num_micro_batches: int, num_stages: int) -> list[list[int]]:
    """Return the largest number of micro-batches in flight between two stages at a time.

    It is ``[maker][reader]``: how many the first has passed forward, but the second not yet
    backward. Where both are the same stage: how many micro-batches' activations it keeps.
    """
    stages = range(num_stages)
    alive = [[0] * num_stages for _ in stages]
    most = [[0] * num_stages for _ in stages]
    for action in one_forward_one_backward(num_micro_batches, num_stages):
        for other in stages:
            if action.kind == "forward":
                alive[action.stage][other] += 1
                now = alive[action.stage][other]
                most[action.stage][other] = max(most[action.stage][other], now)
            else:
                alive[other][action.stage] -= 1
    return most


def _as_queued(per_stage: Sequence[Sequence[Action]]) -> Iterator[Action]:
    """Merge the stages' own orders into one, as it would happen if every action took one unit.

    So no device waits for work that the process could have queued earlier.
    """
    next_of = [0] * len(per_stage)
    done: set[Action] = set()
    while len(done) < sum(map(len, per_stage)):
        now = []
        for stage, order in enumerate(per_stage):
            if next_of[stage] < len(order):
                action = order[next_of[stage]]
                if _needs(action, len(per_stage)) <= done:
                    now.append(action)
                    next_of[stage] += 1
        yield from now
        done.update(now)


def _needs(action: Action, num_stages: int) -> set[Action]:
    """Return the actions that must come before, on other stages or on this one."""
    if action.kind == "forward":
        return (
            {Action(kind="forward", micro_batch=action.micro_batch, stage=action.stage - 1)}
            if action.stage
            else set()
        )
    if action.stage == num_stages - 1:
        return {Action(kind="forward", micro_batch=action.micro_batch, stage=action.stage)}
    return {Action(kind="backward", micro_batch=action.micro_batch, stage=action.stage + 1)}
