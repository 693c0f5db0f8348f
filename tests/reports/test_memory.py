from matplotlib.figure import Figure

from tests.reports.records import (
    MIB,
    assert_is_picture,
    cells,
    legend,
    memory_of,
    printed,
    record_of,
    timeline,
)
from unet3d.reports.figures import write_figure
from unet3d.reports.memory import (
    ELSEWHERE,
    draw_timeline,
    memory_figure,
)
from unet3d.reports.tables import REST, memory_table

GPUS = ["cuda:0", "cuda:1"]
TWO = record_of(GPUS, [memory_of(180), memory_of(260)])


def bars(axes):
    """Return start and end of each bar, by the label of its part."""
    return {
        container.get_label(): [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in container]
        for container in axes.containers
    }


def test_the_table_has_a_row_for_each_slot_with_its_numbers():
    table = memory_table(TWO)
    assert "MiB" in table.title and "parallel mode model" in table.title
    assert table.whole_heads == [
        *("slot", "device", "blocks", "parameters", "gradients", "optimizer", "activations"),
        *("peak", "predicted", "device total"),
    ]
    numbers = ("7.00", "7.00", "7.00")
    assert cells(table) == [
        ("0", "cuda:0", "encoder.0.0 … encoder.1.1", *numbers, "180", "201", "202", "81,920"),
        ("1", "cuda:1", "decoder.0.skip … head", *numbers, "260", "281", "282", "81,920"),
    ]


def test_no_number_is_cut_off_on_a_narrow_terminal_and_large_ones_are_in_gib():
    record = record_of([f"cuda:{i}" for i in range(8)], [memory_of(20480, 64, 21504)] * 8)
    record["slots"][0]["predicted"] = None
    table = memory_table(record)
    numbers = ("0.062", "0.062", "0.062", "20.00", "21.00", "–", "80.00")
    assert cells(table)[0][-7:] == numbers and "GiB" in table.title
    record["slots"][0]["predicted"] = record["slots"][1]["predicted"]
    table = memory_table(record)
    text = printed(table, 80)
    for row in cells(table):
        assert all(text.count(cell) >= 8 for cell in row[3:])
        assert row[1] in text


def test_table_and_picture_say_what_a_peak_is():
    bound = "On a CPU the peak is the sum of the counted parts, so a lower bound."
    shared = "Slots that share a GPU each show the peak of the whole GPU."
    for devices, note in (("cpu", "cpu"), bound), (("cuda:0", "cuda:0"), shared), (GPUS, ""):
        record = record_of(devices, [memory_of(180), memory_of(260)])
        caption = " ".join(memory_table(record).notes)
        assert note in caption
        for device in devices:  # reserved memory is named once
            assert caption.count(f"on {device}.") == ("cpu" not in device)
        label = memory_figure(record).axes[0].get_xlabel()
        assert label == (f"MiB\n{note}" if note else "MiB")


def test_the_picture_has_a_bar_for_each_slot_divided_into_its_parts():
    axes = memory_figure(TWO).axes[0]
    assert bars(axes) == {
        "parameters": [(0, 7), (0, 7)],
        "gradients": [(7, 14), (7, 14)],
        "optimizer": [(14, 21), (14, 21)],
        "activations": [(21, 201), (21, 281)],
        REST: [(201, 201), (281, 281)],
    }
    (peaks,) = axes.collections
    assert [list(map(float, place)) for place in peaks.get_offsets()] == [[201, 0], [281, 1]]
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names[0].startswith("slot 0 on cuda:0\n") and names[1].startswith("slot 1 on cuda:1\n")
    first, _ = (text.get_text() for text in axes.texts)
    assert "activations 180" in first and "peak 201 of 81,920 MiB" in first
    low, high = axes.get_xlim()
    assert low == 0 and high >= 281


def test_the_rest_of_a_peak_is_counted_once_and_timelines_have_panels():
    memories = [memory_of(400, 0, 1000), memory_of(300, 0, 1000)]
    record = record_of(["cuda:0", "cuda:0"], memories)
    record["timeline"] = [timeline(2), timeline(2, "cuda:1", (1,))]
    axes, *panels = memory_figure(record).axes
    # 700 of the peak of 1000 MiB are counted on the GPU, so 300 are left.
    assert bars(axes)[REST] == [(400, 700), (300, 600)]
    titles = [axes.get_title(loc="left") for axes in panels]
    assert titles == ["One step on cuda:0, slot 0", "One step on cuda:1, slot 1"]
    assert [axes.get_ylabel() for axes in panels] == ["MiB", "MiB"]


def test_the_picture_is_written_and_has_room_for_every_slot(tmp_path):
    record = record_of([f"cuda:{i}" for i in range(8)], [memory_of(300)] * 8)
    record["timeline"] = [timeline(40)]
    write_figure(memory_figure(record), tmp_path / "memory.png")
    assert_is_picture(tmp_path / "memory.png")
    figure = memory_figure(record)
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    boxes.sort(key=lambda box: box.y0)
    for below, above in zip(boxes, boxes[1:], strict=False):
        assert below.y1 <= above.y0  # labels do not overlap


def test_on_one_cpu_the_process_counts_and_there_are_no_slots():
    record = record_of(["cpu"], [memory_of(180)])
    record["slots"][0]["measured"]["reserved_bytes"] = 600 * 1024**2
    table = memory_table(record)
    assert table.whole_heads[0] == "" and "slot" not in printed(table, 80)
    assert cells(table)[0][-3:] == ("600", "–", "81,920")
    record["timeline"] = [timeline(1, "cpu")]
    figure = memory_figure(record)
    axes, panel = figure.axes
    assert bars(axes)[REST] == [(201, 600)]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["the process"]
    assert "peak 600 of 81,920 MiB" in axes.texts[0].get_text()
    assert "lower bound" not in axes.get_xlabel() and "whole process" in axes.get_xlabel()
    assert panel.get_title(loc="left") == "One step on cpu"
    assert figure.get_suptitle() == "Memory in training, on one CPU"


def drawn_step(line):
    axes = Figure().add_subplot()
    draw_timeline(axes, line, "MiB", MIB)
    return axes


def test_a_bar_for_each_action_and_a_line_for_what_is_left_at_its_end():
    axes = drawn_step(timeline(2))
    (bars,) = axes.containers
    assert [bar.get_height() for bar in bars] == [100 - index for index in range(7)]
    (steps,) = axes.patches[7:]
    assert list(steps.get_data().values) == [50 + index for index in range(7)]
    assert axes.get_ylabel() == "MiB" and axes.get_ylim()[1] > 100


def test_actions_of_other_slots_are_told_apart():
    axes = drawn_step(timeline(2, slots=(1,)))
    names = ["loss", "backward", "optimizer", ELSEWHERE, "after each action"]
    assert legend(axes) == names
    (bars,) = axes.containers
    colours = [bar.get_facecolor() for bar in bars]
    assert colours[0] == colours[3] != colours[1] == colours[4]  # forward is of slot 0
