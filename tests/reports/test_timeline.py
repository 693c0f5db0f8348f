from matplotlib.figure import Figure

from tests.reports.records import MIB, legend, timeline
from unet3d.reports.timeline import ELSEWHERE, draw_timeline


def drawn(line, device_mib=80 * 1024):
    axes = Figure().add_subplot()
    draw_timeline(axes, line, device_mib * MIB, "MiB", MIB)
    return axes


def test_a_bar_for_each_action_and_a_line_for_what_is_left_at_its_end():
    axes = drawn(timeline(2))
    (bars,) = axes.containers
    assert [bar.get_height() for bar in bars] == [100 - index for index in range(7)]
    (steps,) = axes.patches[7:]
    assert list(steps.get_data().values) == [50 + index for index in range(7)]
    assert axes.get_ylabel() == "MiB" and axes.get_ylim()[1] > 100
    assert "with the numbers of their micro-batches" in axes.get_xlabel()


def test_actions_of_other_slots_are_told_apart_and_not_numbered():
    axes = drawn(timeline(2, slots=(1,)))
    names = ["loss", "backward", "optimizer", ELSEWHERE, "at the end of each action"]
    assert legend(axes) == names
    (bars,) = axes.containers
    colours = [bar.get_facecolor() for bar in bars]
    assert colours[0] == colours[3] != colours[1] == colours[4]  # forward is of slot 0
    numbers = [(text.get_text(), text.xy[0]) for text in axes.texts]
    assert numbers == [("1", 1), ("1", 2), ("2", 4), ("2", 5)]


def test_numbers_that_say_nothing_or_could_not_be_read_are_left_out():
    axes = drawn(timeline(1, slots=(0, 1)))
    assert not axes.texts and "numbers" not in axes.get_xlabel()
    assert drawn(timeline(20, slots=(0, 1))).texts and not drawn(timeline(40, slots=(0, 1))).texts


def test_the_total_of_a_device_is_shown_where_it_is_near():
    for device_mib, is_shown in ((140, True), (160, False), (90, True)):
        axes = drawn(timeline(1), device_mib)
        assert ("device total" in legend(axes)) == is_shown
        totals = [line.get_ydata()[0] for line in axes.get_lines()]
        assert totals == ([device_mib] if is_shown else [])
        assert not is_shown or axes.get_ylim()[1] > device_mib
