import pytest

from tests.reports.records import cells, memory_of, record_of
from unet3d.reports.plan import plan_line, plan_table


def way(devices, **more):
    return {
        "parallel": "none" if len(devices) == 1 else "model",
        **{"replicas": 1, "num_micro_batches": 1, "balance": None, "asked": False, "fits": True},
        **{"step_seconds": None, "largest_shape": [320, 320, 256]},
        "slots": record_of(devices, [memory_of(100, 20, 200)] * len(devices))["slots"],
        **more,
    }


@pytest.fixture
def record():
    return {
        "batch_size": 2,
        "shape": [192, 192, 160],
        "precision": "bfloat16",
        "notes": ["A note."],
        "ways": [
            way(["cuda:0"], fits=False, largest_shape=None, step_seconds=0.1344),
            way(["cuda:0", "cuda:1"], num_micro_batches=4, asked=True, balance="time"),
            way(["cuda:0", "cuda:1", "cuda:2", "cuda:3"], replicas=2, step_seconds=0.00512),
        ],
    }


def test_the_table_has_a_row_for_each_slot_of_each_way(record):
    table = plan_table(record)
    assert "2 patches of 192x192x160 voxels, bfloat16" in table.title
    assert "MiB" in table.title
    assert " ".join(table.notes) == "A note."
    assert table.whole_heads == [
        *("parallel, micro-batches", "slot", "device", "parameters", "gradients", "optimizer"),
        *("activations", "rest", "peak", "device total", "fits"),
    ]
    parts = ("20.00", "20.00", "20.00", "100")
    rest = ("41.00", "201", "81,920")  # a peak of 201 MiB, of which 160 are counted
    assert cells(table) == [
        ("none, 1", "0", "cuda:0", *parts, *rest, "NO"),
        ("model, 4*", "0", "cuda:0", *parts, *rest, "yes"),
        ("", "1", "cuda:1", *parts, *rest, ""),
        ("2 x model, 1", "0", "cuda:0", *parts, *rest, "yes"),
        ("", "1", "cuda:1", *parts, *rest, ""),
        ("", "2", "cuda:2", *parts, *rest, ""),
        ("", "3", "cuda:3", *parts, *rest, ""),
    ]


def test_each_way_has_a_line_that_can_be_typed(record):
    assert [plan_line(way) for way in record["ways"]] == [
        "--parallel none --devices cuda:0 --micro-batches 1: 134 ms a step, not even the smallest "
        "volume fits",
        "--parallel model --devices cuda:0,cuda:1 --micro-batches 4 --set parallel.cuts=time: "
        "up to 320x320x256 voxels (chosen)",
        "--parallel model --devices cuda:0,cuda:1,cuda:2,cuda:3 --replicas 2 --micro-batches 1: "
        "5.1 ms a step, up to 320x320x256 voxels",
    ]


def test_equal_rows_of_many_devices_are_one(record):
    many = way([f"cuda:{index}" for index in range(64)], parallel="spatial")
    for index in (0, 63):  # the first and the last way
        predicted = many["slots"][index]["predicted"]
        many["slots"][index]["predicted"] = predicted | {"peak_bytes": 190 * 2**20}
    record["ways"] = [many, *(way(["cpu"] * 9, parallel="spatial") for _ in range(2))]
    table = plan_table(record)
    assert [row[:3] for row in cells(table)] == [
        ("spatial, 1", "0", "cuda:0"),
        ("", "1-62", "cuda:1-62"),
        ("", "63", "cuda:63"),
        *[("spatial, 1", "0-8", "cpu")] * 2,
    ]
    # A note on several ways is printed once.
    assert " ".join(table.notes) == (
        "A note. On a CPU the peak is the sum of the counted parts, so a lower bound."
    )
