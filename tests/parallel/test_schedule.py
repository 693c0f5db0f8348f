import itertools
from collections import Counter

import pytest

from unet3d.parallel.schedule import (
    Action,
    Schedule,
    all_forward,
    all_forward_all_backward,
    one_forward_one_backward,
)

SCHEDULES = [one_forward_one_backward, all_forward_all_backward]
SIZES = list(itertools.product((1, 2, 3, 5, 8), (1, 2, 3, 5)))
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.__name__)
each_size = pytest.mark.parametrize(("num_micro_batches", "num_stages"), SIZES)


def needs(action: Action, num_stages: int) -> list[Action]:
    """What a U-Net's data ask for: forward down the stages, backward up again."""
    kind, micro_batch, stage = action.kind, action.micro_batch, action.stage
    if kind == "forward":
        return [Action(kind="forward", micro_batch=micro_batch, stage=stage - 1)] if stage else []
    if stage == num_stages - 1:
        return [Action(kind="forward", micro_batch=micro_batch, stage=stage)]
    return [
        Action(kind="backward", micro_batch=micro_batch, stage=stage + 1),
        Action(kind="forward", micro_batch=micro_batch, stage=stage),
    ]


def run(schedule: Schedule, num_micro_batches: int, num_stages: int) -> dict[Action, int]:
    """Return when each action begins, on devices that take one unit for it, in queued order."""
    begins: dict[Action, int] = {}
    free = [0] * num_stages
    for action in schedule(num_micro_batches, num_stages):
        ready = [begins[needed] + 1 for needed in needs(action, num_stages)]
        begins[action] = max([free[action.stage], *ready])
        free[action.stage] = begins[action] + 1
    return begins


@pytest.mark.parametrize(
    ("schedule", "timetable"),
    [
        (
            one_forward_one_backward,
            [
                "F0 F1 .. B0 F2 B1 F3 B2 .. B3",
                ".. F0 B0 F1 B1 F2 B2 F3 B3 ..",
            ],
        ),
        (
            all_forward_all_backward,
            [
                "F0 F1 F2 F3 .. .. B0 B1 B2 B3",
                ".. F0 F1 F2 F3 B0 B1 B2 B3 ..",
            ],
        ),
        (
            one_forward_one_backward,
            [
                "F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3",
                ".. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..",
                ".. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..",
            ],
        ),
    ],
)
def test_the_timetable(schedule: Schedule, timetable: list[str]) -> None:
    begins = run(schedule, 4, len(timetable))
    length = max(begins.values()) + 1
    rows = [[".."] * length for _ in timetable]
    for action, time in begins.items():
        rows[action.stage][time] = f"{action.kind[0].upper()}{action.micro_batch}"
    drawn = [" ".join(row) for row in rows]
    assert drawn == timetable
    if len(timetable) == 2:  # what the documentation shows is what happens
        assert schedule.__doc__ is not None
        for stage, row in enumerate(drawn):
            assert f"stage {stage}   {row}\n" in schedule.__doc__


@each_schedule
@each_size
def test_every_action_comes_once_and_after_what_it_needs(
    schedule: Schedule, num_micro_batches: int, num_stages: int
) -> None:
    done: set[Action] = set()
    for action in schedule(num_micro_batches, num_stages):
        assert action not in done
        assert done.issuperset(needs(action, num_stages))
        done.add(action)
    assert done == {
        Action(kind=kind, micro_batch=micro_batch, stage=stage)
        for kind in ("forward", "backward")
        for micro_batch in range(num_micro_batches)
        for stage in range(num_stages)
    }


@each_schedule
@each_size
def test_gradients_are_added_in_the_same_order_on_every_stage(
    schedule: Schedule, num_micro_batches: int, num_stages: int
) -> None:
    for stage in range(num_stages):
        for kind in ("forward", "backward"):
            order = [
                action.micro_batch
                for action in schedule(num_micro_batches, num_stages)
                if (action.kind, action.stage) == (kind, stage)
            ]
            assert order == list(range(num_micro_batches))


def most_alive(schedule: Schedule, num_micro_batches: int, num_stages: int) -> list[int]:
    """Return, per stage, the most micro-batches whose activations it keeps at one time."""
    alive: Counter[int] = Counter()
    most = [0] * num_stages
    for action in schedule(num_micro_batches, num_stages):
        alive[action.stage] += 1 if action.kind == "forward" else -1
        most[action.stage] = max(most[action.stage], alive[action.stage])
    return most


@each_size
def test_one_forward_one_backward_keeps_few(num_micro_batches: int, num_stages: int) -> None:
    assert most_alive(one_forward_one_backward, num_micro_batches, num_stages) == [
        min(num_micro_batches, num_stages - stage) for stage in range(num_stages)
    ]


@each_size
def test_all_forward_keeps_everything(num_micro_batches: int, num_stages: int) -> None:
    most = most_alive(all_forward_all_backward, num_micro_batches, num_stages)
    assert most == [num_micro_batches] * num_stages


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 8, 20])
@each_schedule
def test_two_stages_wait_no_longer_than_the_pipeline_is_deep(
    schedule: Schedule, num_micro_batches: int
) -> None:
    begins = run(schedule, num_micro_batches, 2)
    assert max(begins.values()) + 1 == 2 * (num_micro_batches + 1)


def test_one_stage_is_gradient_accumulation() -> None:
    drawn = [f"{a.kind[0]}{a.micro_batch}" for a in one_forward_one_backward(3, 1)]
    assert drawn == ["f0", "b0", "f1", "b1", "f2", "b2"]


def test_work_is_queued_as_early_as_it_can_run() -> None:
    """In the order of their beginnings: no device waits for the process."""
    for schedule in SCHEDULES:
        times = list(run(schedule, 6, 3).values())
        assert times == sorted(times)


@each_size
def test_all_forward_is_a_pipeline_without_backward(
    num_micro_batches: int, num_stages: int
) -> None:
    begins = run(all_forward, num_micro_batches, num_stages)
    assert {action.kind for action in begins} == {"forward"}
    assert len(begins) == num_micro_batches * num_stages
    assert max(begins.values()) + 1 == num_micro_batches + num_stages - 1
