import functools
import itertools
import json
import logging
import math

import pytest
import torch

from tests.plain_network import make_topology
from tests.products import pairwise
from unet3d.errors import CacheError
from unet3d.memory.meter import MemoryMeter
from unet3d.model import UNet3d, dice_cross_entropy
from unet3d.parallel import Layout, parallelize, precision
from unet3d.parallel.balance import block_costs as costs
from unet3d.parallel.balance import stopwatch as timings
from unet3d.parallel.balance.block_costs import block_bytes, block_seconds, known_seconds
from unet3d.parallel.schedule import most_alive

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
SIZE = (16, 16, 8)


def make_model(**options):
    return UNet3d(make_topology(**options))


@functools.cache
def counted(num_samples, **options):
    return block_bytes(make_model(**options), SIZE, num_samples, None, CPU)


def measured_activations(model, layout, batch_size):
    """Run a step and return what autograd kept at most, slot by slot."""
    executor = parallelize(model, layout)
    meter = MemoryMeter(executor.slots, model)
    executor.observer = meter
    image = torch.randn(batch_size, 2, *SIZE, device=executor.input_device)
    target = torch.zeros(batch_size, *SIZE, dtype=torch.uint8, device=executor.output_device)
    executor.forward_backward(image, target, dice_cross_entropy)
    measured = meter.read(torch.optim.SGD(model.parameters()))
    return [measured[slot.index].activations_bytes for slot in executor.slots]


def kept_bytes(run):
    """Return what autograd keeps of one micro-batch; what two blocks keep counts once."""
    return sum({name: size for entry in run for name, size in entry.kept.items()}.values())


def counted_activations(entries, layout, cuts):
    num_stages, num_blocks = len(layout.devices), len(entries) - 1
    alive = most_alive(layout.num_micro_batches, num_stages)
    activations = [
        alive[stage][stage] * kept_bytes(entries[start:end])
        for stage, (start, end) in enumerate(itertools.pairwise((0, *cuts, num_blocks)))
    ]
    activations[-1] += kept_bytes(entries[-1:])  # the loss goes backward before anything else
    return activations


@pairwise(
    options=[{}, {"encoder": "residual", "deep_supervision": True}, {"norm": "group"}],
    cuts=[(1,), (8,), (11,), (3, 6, 9)],
    num_micro_batches=[1, 4],
)
def test_what_is_counted_is_what_a_training_step_keeps(options, cuts, num_micro_batches):
    model, batch_size = make_model(**options), 4
    layout = Layout(
        devices=(CPU,) * (len(cuts) + 1),
        cuts=cuts,
        num_micro_batches=num_micro_batches,
    )
    entries = counted(batch_size // num_micro_batches, **options)
    expected = counted_activations(entries, layout, cuts)
    # The first convolution keeps the image, a view of the batch that is there anyway.
    expected[0] += batch_size * 2 * 16 * 16 * 8 * 4
    # So does the loss the target, of which one micro-batch's part is counted.
    expected[-1] += (batch_size - batch_size // num_micro_batches) * 16 * 16 * 8
    assert measured_activations(model, layout, batch_size) == expected


def test_counting_grows_with_the_samples_and_works_for_a_volume_of_any_size():
    model = make_model()
    one, two = counted(1), counted(2)
    assert [entry.name for entry in one] == [*(b.name for b in model.blocks()), "loss"]
    assert [entry.output_bytes for entry in two[:-1]] == [2 * e.output_bytes for e in one[:-1]]
    own = [*model.parameters(), *model.buffers()]
    assert sum(entry.parameters_bytes for entry in one) == sum(4 * p.numel() for p in own)
    entries = block_bytes(model, (1024, 1024, 1024), 1, None, CPU)
    assert entries[0].output_bytes == 4 * 4 * 1024**3
    # Lower precision halves what crosses, and keeps lowered weights.
    full, lowered = (
        block_bytes(model, SIZE, 1, autocast, GPU) for autocast in (None, torch.bfloat16)
    )
    assert [e.output_bytes for e in full[:-1]] == [2 * e.output_bytes for e in lowered[:-1]]
    assert kept_bytes(full[:-1]) > kept_bytes(lowered[:-1]) > kept_bytes(full[:-1]) / 2


def test_the_time_of_a_block_is_the_median_of_its_passes(tmp_path, monkeypatch):
    model, now, passes = make_model(), [0.0], itertools.count()
    durations = [float(2**index) for index in range(len(model.blocks()))]
    for block, duration in zip(model.blocks(), durations, strict=True):

        def advance(*_, duration=duration):
            # Some passes are slow, the first one too, as the compilation of a kernel is.
            now[0] += duration if next(passes) % 4 else 100 * duration

        block.module.register_forward_hook(advance)
    monkeypatch.setattr(timings.time, "perf_counter", lambda: now[0])
    assert block_seconds(model, CPU, SIZE, 2, None, tmp_path) == (*durations, 0.0)


def test_times_are_real_and_remembered(tmp_path, monkeypatch):
    model, folder = make_model(), tmp_path / "new" / "timings"
    first = block_seconds(model, CPU, SIZE, 1, None, folder)
    assert all(seconds > 0 for seconds in first)
    assert len(first) == len(model.blocks()) + 1

    def refuse(*arguments):
        raise AssertionError("measured again")

    monkeypatch.setattr(costs, "median_seconds", refuse)
    assert block_seconds(make_model(), CPU, SIZE, 1, None, folder) == first
    # A CPU without bfloat16 computes in float32, whatever the GPUs beside it do.
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: False)
    assert block_seconds(model, CPU, SIZE, 1, torch.bfloat16, folder) == first


@pytest.fixture
def a_second_each(monkeypatch):
    """Take no times: each block takes a second."""
    monkeypatch.setattr(costs, "median_seconds", lambda run, devices: 1.0)


@pytest.mark.usefixtures("a_second_each")
def test_other_circumstances_are_measured_anew(tmp_path, monkeypatch):
    def ask(model, size=SIZE, num_samples=1):
        found = known_seconds(model, CPU, size, num_samples, None, tmp_path)
        return None if found is None else set(found)

    block_seconds(make_model(), CPU, SIZE, 1, None, tmp_path)
    assert ask(make_model(), size=(16, 16, 16)) is None
    assert ask(make_model(), num_samples=2) is None
    assert ask(make_model(norm="group")) is None
    assert ask(make_model().double()) is None
    for name, other in (("get_num_threads", lambda: 1000), ("__version__", "9.9.9")):
        with monkeypatch.context() as patch:
            patch.setattr(torch, name, other)
            assert ask(make_model()) is None, name
    assert ask(make_model()) == {1.0}


DAMAGES = (
    *("", "[]", '{"seconds": null}', '{"seconds": [1, 2]}'),
    *(json.dumps({"seconds": [value] * 13}) for value in ("1", math.nan, -1.0, 10**400)),
)


@pytest.mark.usefixtures("a_second_each")
def test_a_damaged_memory_of_times_is_replaced(tmp_path):
    model = make_model()
    first = block_seconds(model, CPU, SIZE, 1, None, tmp_path)
    assert len(first) == 13
    (file,) = tmp_path.iterdir()
    for damage in DAMAGES:
        file.write_text(damage)
        assert known_seconds(model, CPU, SIZE, 1, None, tmp_path) is None, damage
    assert block_seconds(model, CPU, SIZE, 1, None, tmp_path) == first
    assert json.loads(file.read_text())["seconds"] == list(first)
    with pytest.raises(CacheError, match=r"cannot write .*data\.cache") as caught:
        block_seconds(model, CPU, SIZE, 1, None, file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_counting_and_timing_leave_no_trace(tmp_path, caplog):
    model = make_model(norm="batch")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    with caplog.at_level(logging.INFO):
        block_bytes(model, SIZE, 2, None, CPU)
        block_seconds(model, CPU, SIZE, 2, None, tmp_path)
    assert "measuring the time of each block on cpu" in caplog.text
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_what_is_counted_is_what_a_gpu_keeps(autocast):
    model, gpu, cuts = make_model(), torch.device("cuda:0"), (6,)
    entries = block_bytes(model, SIZE, 2, autocast, gpu)
    layout = Layout(devices=(gpu, gpu), cuts=cuts, num_micro_batches=2, autocast=autocast)
    expected = counted_activations(entries, layout, cuts)
    measured = measured_activations(model, layout, 4)
    image_bytes = 4 * 2 * 16 * 16 * 8 * 4
    assert measured[0] == pytest.approx(expected[0], rel=0.03, abs=image_bytes)
    assert measured[1] == pytest.approx(expected[1], rel=0.03)


@pytest.mark.gpu
def test_a_gpu_and_a_cpu_are_timed_apart(tmp_path):
    model, gpu = make_model(), torch.device("cuda:0")
    for device in (gpu, CPU):
        assert all(s > 0 for s in block_seconds(model, device, SIZE, 1, torch.bfloat16, tmp_path))
    assert len(list(tmp_path.iterdir())) == 2
