import itertools

import pytest

from unet3d.parallel.stages import Action, one_forward_one_backward


def needs(action, num_stages):
    """Return the actions that must precede an action, forward down the stages, backward up."""
    kind, stage = action.kind, action.stage
    if kind == "forward":
        return [action._replace(stage=stage - 1)] if stage else []
    below = [] if stage == num_stages - 1 else [action._replace(stage=stage + 1)]
    return [*below, action._replace(kind="forward")]


def begins_of(actions, num_stages, copying=0.0):
    """Return when each action begins, on devices that take one time unit each, in queued order.

    A copy between two stages takes ``copying``.
    """
    begins: dict[Action, float] = {}
    free = [0.0] * num_stages
    for action in actions:
        ready = [
            begins[needed] + 1 + (copying if needed.stage != action.stage else 0)
            for needed in needs(action, num_stages)
        ]
        begins[action] = max([free[action.stage], *ready])
        free[action.stage] = begins[action] + 1
    return begins


@pytest.mark.parametrize(
    "timetable",
    [
        ["F0 F1 F2 B0 F3 B1 .. B2 .. B3", ".. F0 B0 F1 B1 F2 B2 F3 B3 .."],
        [
            "F0 F1 F2 F3 .. B0 .. B1 .. B2 .. B3",
            ".. F0 F1 F2 B0 F3 B1 .. B2 .. B3 ..",
            ".. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..",
        ],
        ["F0 B0 F1 B1 F2 B2 F3 B3"],  # gradient accumulation
    ],
)
def test_the_timetable(timetable):
    num_stages = len(timetable)
    begins = begins_of(one_forward_one_backward(4, num_stages), num_stages)
    rows = [[".."] * (int(max(begins.values())) + 1) for _ in timetable]
    for action, time in begins.items():
        rows[action.stage][int(time)] = f"{action.kind[0].upper()}{action.micro_batch}"
    assert [" ".join(row) for row in rows] == timetable


def test_every_action_comes_once_and_after_what_it_needs():
    """Gradients of micro-batches are also added in the same order on every stage."""
    for num_micro_batches, num_stages in itertools.product((1, 2, 3, 5, 8), (1, 2, 3, 5)):
        actions = list(one_forward_one_backward(num_micro_batches, num_stages))
        assert len(set(actions)) == len(actions) == 2 * num_micro_batches * num_stages
        for stage, kind in itertools.product(range(num_stages), ("forward", "backward")):
            own = [a.micro_batch for a in actions if (a.kind, a.stage) == (kind, stage)]
            assert own == list(range(num_micro_batches))
        # Actions are queued in the order in which they begin, so no device waits for the host.
        begins = list(begins_of(actions, num_stages).values())
        assert begins == sorted(begins)
        if num_stages <= 2:  # no wait is longer than the pipeline's depth
            assert begins[-1] + 1 == 2 * (num_micro_batches + num_stages - 1)


def test_a_pipeline_waits_for_two_copies_only():
    """For the first copy and the last one; all others run while both devices compute."""
    num_micro_batches, copying = 8, 0.5
    begins = begins_of(one_forward_one_backward(num_micro_batches, 2), 2, copying)
    assert max(begins.values()) + 1 == 2 * (num_micro_batches + 1) + 2 * copying
