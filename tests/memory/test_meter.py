import gc
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.steps import CPU, SMALL, make_step
from unet3d.config import TrainingSettings
from unet3d.kernels import recompute as remake
from unet3d.memory.meter import Mark, MemoryMeter, SlotMemory, Timeline, measured_steps
from unet3d.memory.record import device_bytes, memory_record, merged_records, reserved_bytes
from unet3d.model import LossTerms, Topology, UNet3d, dice_cross_entropy
from unet3d.model.optimizer import Optimization
from unet3d.parallel import Executor, Layout, parallelize
from unet3d.parallel.stages import one_forward_one_backward


def small_topology(**options: object) -> Topology:
    return make_step((CPU,), model=SMALL.model_copy(update=options)).topology


def spread(
    num_devices: int, topology: Topology | None = None, device: torch.device = CPU, **layout: Any
) -> Executor:
    """Return a network with fixed weights, cut over this many devices."""
    torch.manual_seed(0)
    model = UNet3d(topology or small_topology())
    return parallelize(model, Layout(devices=(device,) * num_devices, **layout))


def make_batch(num_samples: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(num_samples, 2, 16, 16, 16, generator=generator)
    target = torch.randint(0, 3, (num_samples, 16, 16, 16), generator=generator)
    return image, target.to(torch.uint8)  # the loader's type


def measure(
    executor: Executor, optimizer: str = "sgd", num_samples: int = 2
) -> tuple[MemoryMeter, dict[int, SlotMemory]]:
    """Run one step like a training step."""
    optimization = Optimization(executor.module, TrainingSettings(optimizer=optimizer), "float32")
    meter = MemoryMeter(executor.slots, executor.module)
    meter.start()
    executor.observer = meter
    optimization.optimizer.register_step_post_hook(lambda *_: meter.end_step())
    executor.forward_backward(*make_batch(num_samples), dice_cross_entropy)
    meter.note_gradients()
    optimization.step(0.01)
    return meter, meter.read(optimization.optimizer)


@pytest.mark.parametrize(
    ("recompute", "min_elements", "remakes"),
    [("off", 0, False), ("norm", 0, True), ("norm", 10**9, False)],
)
def test_activations_are_the_tensors_that_the_layers_keep(
    recompute, min_elements, remakes, monkeypatch
):
    """Counted by hand for two levels, in float32, for one sample.

    A convolution saves its input. InstanceNorm with its activation saves its input, and mean and 1
    / deviation of each channel. Its result is saved once, by the next convolution, or recomputed.
    """
    monkeypatch.setattr(remake, "MIN_ELEMENTS", min_elements)
    topology = Topology(
        in_channels=1, num_classes=2, channels=(3, 5), strides=((1, 1, 1), (2, 2, 2))
    )
    executor = spread(2, topology, recompute=recompute)
    meter = MemoryMeter(executor.slots, executor.module)
    executor.observer = meter

    def mean_of_squares(logits, target):
        """A loss for which autograd saves only the logits."""
        loss = (logits * logits).mean()
        return LossTerms(total=loss, dice=loss, cross_entropy=loss)

    image = torch.randn(1, 1, 8, 8, 8)
    executor.forward_backward(image, torch.zeros(1, 8, 8, 8), mean_of_squares)
    measured = meter.read(torch.optim.SGD(executor.module.parameters()))
    full, half = 8**3, 4**3

    def unit(channels, voxels, is_read=True):
        """Return a unit's saved elements: the norm's input, statistics, and the result if read."""
        result = channels * voxels if is_read and not remakes else 0
        return channels * voxels + 2 * channels + result

    # In the encoder no convolution reads the last unit's result.
    encoder = 1 * full + 2 * unit(3, full) + unit(5, half) + unit(5, half, is_read=False)
    # Skip and lowest features come from the encoder: to the decoder they are leaves, which are
    # never recomputed.
    upsampled = 0 if remakes else 3 * full
    decoder = 3 * full + 5 * half + upsampled + 2 * unit(3, full)
    logits = 2 * full
    assert measured[0].activations_bytes == 4 * encoder
    assert measured[1].activations_bytes == 4 * (decoder + logits)


@pytest.mark.parametrize("num_devices", [1, 3])
def test_everything_is_let_go_after_backward(num_devices, request):
    """By reference counts alone: tensors that wait for the garbage collector would fill a GPU."""
    gc.collect()
    gc.disable()
    request.addfinalizer(gc.enable)
    executor = spread(num_devices, small_topology(deep_supervision=True), num_micro_batches=2)
    optimizer = torch.optim.SGD(executor.module.parameters())
    meter = MemoryMeter(executor.slots, executor.module)
    executor.observer = meter
    peaks = []
    for _ in range(3):
        executor.forward_backward(*make_batch(), dice_cross_entropy)
        peaks.append([memory.activations_bytes for memory in meter.read(optimizer).values()])
        meter.start()  # forgets all tensors but those that are still kept
        for memory in meter.read(optimizer).values():
            assert (memory.activations_bytes, memory.gradients_bytes) == (0, 0)
            assert memory.parameters_bytes > 0
    assert all(peak > 16**3 * 4 for peak in peaks[0])
    assert peaks == [peaks[0]] * 3  # nothing accumulates over steps


@pytest.mark.parametrize(
    ("optimizer", "states", "counters"), [("sgd", 1, 0), ("adamw", 2, 1)], ids=["sgd", "adamw"]
)
def test_parameters_gradients_and_optimizer_by_arithmetic(optimizer, states, counters):
    executor = spread(2, small_topology(norm="batch"))
    meter, measured = measure(executor, optimizer)
    assert all(value.grad is None for value in executor.module.parameters())
    meter.note_gradients()  # gradients are cleared by now, but were noted before
    later = meter.read(torch.optim.SGD(executor.module.parameters()))
    halves = (executor.module.encoder, executor.module.decoder)
    for slot, half in zip(executor.slots, halves, strict=True):
        parameters = list(half.parameters())
        numbers = sum(value.nbytes for value in parameters)
        buffers = sum(value.nbytes for value in half.buffers())
        found = measured[slot.index]
        assert buffers > 0
        assert found.parameters_bytes == numbers + buffers
        assert found.gradients_bytes == later[slot.index].gradients_bytes == numbers
        assert found.optimizer_bytes == states * numbers + counters * 4 * len(parameters)
        kept = found.parameters_bytes + found.gradients_bytes + found.optimizer_bytes
        assert found.peak_bytes == kept + found.activations_bytes


def process_peak():
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))


def test_the_records_of_ranks_are_numbered_through():
    executor = spread(2)
    _, measured = measure(executor)
    predicted = {index: replace(memory, peak_bytes=7) for index, memory in measured.items()}
    marks = (
        Mark(slot=0, kind="forward", micro_batch=0, bytes=1, peak_bytes=2),
        Mark(slot=1, kind="loss", micro_batch=0, bytes=3, peak_bytes=4),
        Mark(slot=None, kind="optimizer", micro_batch=None, bytes=5, peak_bytes=6),
    )
    lines = [Timeline(device="cpu", slots=(index,), marks=marks) for index in range(2)]
    own = memory_record("model", executor.slots, measured, predicted, lines)
    assert own["parallel"] == "model"
    blocks = [name for row in own["slots"] for name in row["blocks"]]
    assert blocks == [block.name for block in executor.module.blocks()]
    merged = merged_records([own, own, own])
    assert [(row["slot"], row["rank"]) for row in merged["slots"]] == [
        (number, number // 2) for number in range(6)
    ]
    assert [line["slots"] for line in merged["timeline"]] == [[number] for number in range(6)]
    last = merged["timeline"][-1]
    assert (last["rank"], [mark["slot"] for mark in last["marks"]]) == (2, [4, 5, None])
    for row in merged["slots"]:
        assert (row["device"], row["device_bytes"]) == ("cpu", device_bytes(CPU))
        found = measured[row["slot"] % 2]
        assert row["measured"].items() >= found.to_dict().items()
        # A CPU's allocator reserves nothing: the process's own peak is reported.
        assert 0.9 * process_peak() <= row["measured"]["reserved_bytes"] <= process_peak()
        assert row["predicted"] == found.to_dict() | {"peak_bytes": 7}
    (row, _) = memory_record("model", executor.slots, measured, None, lines)["slots"]
    assert row["predicted"] is None


def test_the_memory_of_the_machine():
    with open("/proc/meminfo") as file:
        kibibytes = int(next(line.split()[1] for line in file if line.startswith("MemTotal")))
    assert device_bytes(CPU) == kibibytes * 1024


def test_the_timeline_has_a_mark_for_each_action_of_the_last_step():
    executor = spread(2, num_micro_batches=3)
    measure(executor, num_samples=3)
    meter, measured = measure(executor, num_samples=3)
    expected: list[tuple[int | None, str, int | None]] = []
    for action in one_forward_one_backward(3, 2):
        expected.append((action.stage, action.kind, action.micro_batch))
        if action.kind == "forward" and action.stage == 1:
            expected.append((1, "loss", action.micro_batch))
    expected.append((None, "optimizer", None))
    lines = meter.timeline(measured)
    assert [line.slots for line in lines] == [(0,), (1,)]
    for line in lines:
        assert [(m.slot, m.kind, m.micro_batch) for m in line.marks] == expected
        found = measured[line.slots[0]]
        still = found.peak_bytes - found.activations_bytes
        # At the end no activations are kept, and the gradients exist.
        assert line.marks[-1].bytes == still
        without_gradients = still - found.gradients_bytes
        first = next(m for m in line.marks if m.slot == line.slots[0])
        assert first.bytes > without_gradients
        assert all(mark.peak_bytes >= mark.bytes for mark in line.marks[:-1])
        for before, mark in itertools.pairwise(line.marks):  # an idle slot's memory is constant
            assert mark.slot in (None, *line.slots) or mark.bytes == before.bytes
        peak = max(mark.peak_bytes for mark in line.marks)
        assert without_gradients + found.activations_bytes <= peak <= found.peak_bytes


def test_steps_in_the_context_are_measured_and_no_others():
    executor = spread(2)
    optimizer = torch.optim.SGD(executor.module.parameters(), lr=0.1, momentum=0.9)

    def step():
        executor.forward_backward(*make_batch(), dice_cross_entropy)
        optimizer.step()
        optimizer.zero_grad()

    before = executor.observer
    with pytest.raises(KeyError), measured_steps(executor, optimizer) as failed:
        raise KeyError
    assert executor.observer is before
    with measured_steps(executor, optimizer) as meter:
        step()
    assert executor.observer is before
    assert failed.read(optimizer)[0].gradients_bytes == 0
    measured = meter.read(optimizer)
    num_bytes = sum(4 * value.numel() for value in executor.module.parameters())
    for kind in ("parameters_bytes", "gradients_bytes", "optimizer_bytes"):
        assert sum(getattr(slot, kind) for slot in measured.values()) == num_bytes, kind
    assert all(slot.activations_bytes > 0 for slot in measured.values())
    marks = meter.timeline(measured)
    assert [line.marks[-1].kind for line in marks] == ["optimizer", "optimizer"]
    step()
    assert meter.read(optimizer) == measured
    assert meter.timeline(measured) == marks


@pytest.mark.gpu
def test_a_gpu_is_measured_by_its_allocator():
    gpu = torch.device("cuda", 0)
    executor = spread(1, device=gpu, num_micro_batches=2, captures=False)
    optimizer = torch.optim.SGD(executor.module.parameters())
    meter = MemoryMeter(executor.slots, executor.module)
    image, target = (value.to(gpu) for value in make_batch())
    for _ in range(2):
        optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats(gpu)
        executor.forward_backward(image, target, dice_cross_entropy)
    unobserved_bytes = torch.cuda.max_memory_allocated(gpu)
    optimizer.zero_grad()
    meter.start()
    executor.observer = meter
    executor.forward_backward(image, target, dice_cross_entropy)
    found = meter.read(optimizer)[0]
    assert found.peak_bytes == pytest.approx(unobserved_bytes, rel=0.02)
    (line,) = meter.timeline({0: found})
    assert line.device == "cuda:0"
    assert [mark.kind for mark in line.marks] == 2 * ["forward", "loss", "backward"]
    # Marks do not hide the peak of the step.
    assert max(mark.peak_bytes for mark in line.marks) == found.peak_bytes
    now = torch.cuda.memory_allocated(gpu)  # the returned loss is a smaller tensor
    assert now <= line.marks[-1].bytes <= now + 2**16
    assert torch.cuda.memory_reserved(gpu) <= reserved_bytes(gpu)
    assert found.peak_bytes >= found.parameters_bytes + found.activations_bytes
    assert device_bytes(gpu) == torch.cuda.mem_get_info(gpu)[1]
