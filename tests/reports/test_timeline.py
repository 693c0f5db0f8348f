from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.reports.records import MIB, timeline
from unet3d.reports.timeline import ELSEWHERE, draw_timeline


def drawn(line: dict[str, Any], device_mib: int = 80 * 1024) -> Axes:
    axes = Figure().add_subplot()
    draw_timeline(axes, line, device_mib * MIB, "MiB", MIB)
    return axes


def legend(axes: Axes) -> list[str]:
    found = axes.get_legend()
    assert found is not None
    return [text.get_text() for text in found.get_texts()]


def test_a_bar_for_each_action_and_a_line_for_what_is_left_at_its_end():
    axes = drawn(timeline(2))
    (bars,) = axes.containers
    assert [bar.get_height() for bar in bars] == [100 - index for index in range(7)]
    (steps,) = axes.patches[7:]
    assert list(steps.get_data().values) == [50 + index for index in range(7)]  # type: ignore[attr-defined]
    assert axes.get_ylabel() == "MiB"
    assert axes.get_ylim()[1] > 100


def test_actions_of_other_slots_are_told_apart_and_not_numbered():
    axes = drawn(timeline(2, slots=(1,)))
    assert legend(axes) == [
        *("loss", "backward", "optimizer", ELSEWHERE, "at the end of each action")
    ]
    (bars,) = axes.containers
    colours = [bar.get_facecolor() for bar in bars]
    assert colours[0] == colours[3] != colours[1] == colours[4]  # forward is of slot 0
    numbers = [(text.get_text(), text.xy[0]) for text in axes.texts]  # type: ignore[attr-defined]
    assert numbers == [("1", 1), ("1", 2), ("2", 4), ("2", 5)]


def test_a_single_micro_batch_has_no_number():
    axes = drawn(timeline(1, slots=(0, 1)))
    assert not axes.texts and "numbers" not in axes.get_xlabel()
    assert "with the numbers of their micro-batches" in drawn(timeline(2)).get_xlabel()


def test_numbers_that_could_not_be_read_are_left_out():
    assert drawn(timeline(20, slots=(0, 1))).texts
    assert not drawn(timeline(40, slots=(0, 1))).texts


@pytest.mark.parametrize(("device_mib", "is_shown"), [(140, True), (160, False), (90, True)])
def test_the_total_of_a_device_is_shown_where_it_is_near(device_mib, is_shown):
    axes = drawn(timeline(1), device_mib)
    assert ("device total" in legend(axes)) == is_shown
    totals = [line.get_ydata()[0] for line in axes.get_lines()]
    assert totals == ([device_mib] if is_shown else [])
    if is_shown:
        assert axes.get_ylim()[1] > device_mib
