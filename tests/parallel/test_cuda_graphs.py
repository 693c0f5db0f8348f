import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.parallel.cpu_graphs import CpuGraphPool
from tests.plain_network import gradients_of
from tests.products import by_night
from unet3d.config import ModelSettings, TrainingSettings
from unet3d.kernels import recompute as recomputing
from unet3d.memory.meter import measured_steps
from unet3d.model import (
    SegmentationLoss,
    SequentialNetwork,
    Topology,
    UNet3d,
    dice_cross_entropy,
    plan_topology,
)
from unet3d.model.optimizer import Optimization
from unet3d.parallel import Layout, graph, image_dtype, parallelize, pipeline, step
from unet3d.parallel.graph import NUM_WARM_UP_STEPS
from unet3d.parallel.losses import weighted

TOPOLOGY = Topology(
    in_channels=1, num_classes=3, channels=(4, 8, 16), strides=((1, 1, 1), (2, 2, 2), (2, 2, 2))
)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
DEVICES = [CPU, pytest.param(GPU, marks=pytest.mark.gpu)]


def make_executor(devices, topology=TOPOLOGY, **options):
    torch.manual_seed(0)
    on_gpu = devices[0] != CPU
    model = UNet3d(topology) if on_gpu else UNet3d(topology).double()
    autocast = torch.bfloat16 if on_gpu else None
    return parallelize(model, Layout(devices=devices, autocast=autocast, **options))


def make_batch(executor, number, num_samples=2):
    size = 8 if executor.input_device == CPU else 16
    generator = torch.Generator().manual_seed(number)
    image = torch.randn(num_samples, 1, size, size, size, generator=generator)
    target = torch.randint(0, 3, (num_samples, size, size, size), generator=generator)
    image = image.to(executor.input_device, image_dtype(executor.module))
    return image, target.to(executor.output_device, torch.uint8)


def train(executor, batches, optimization=None):
    """Run steps on batches, given as numbers or also as numbers of samples; return all results."""
    optimization = optimization or Optimization(executor.module, TrainingSettings(), "bfloat16")
    losses = []
    for batch in batches:
        batch = (batch,) if isinstance(batch, int) else batch
        terms = executor.forward_backward(*make_batch(executor, *batch), dice_cross_entropy)
        losses.append(terms.total)
        optimization.step(0.01)
    return [*losses, *(value.detach() for value in executor.module.parameters())]


def assert_close(actual, expected, tolerance):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance / 10)


def check_replayed_steps(devices, batches=None, **options):
    """Check that replayed steps train like launched ones."""
    if batches is None:
        batches = [(number, 4) for number in range(NUM_WARM_UP_STEPS + 4)]
        # A smaller last batch, as in every epoch, does not invalidate the graph.
        batches.insert(NUM_WARM_UP_STEPS + 2, (99, 1))
    replayed = train(make_executor(devices, **options), batches)
    launched = train(make_executor(devices, captures=False, **options), batches)
    assert_close(replayed, launched, 1e-10 if devices[0] == CPU else 2e-3)


@pytest.fixture
def cpu_graphs(monkeypatch):
    """Let steps on CPUs be captured."""
    monkeypatch.setitem(graph.POOLS, "cpu", CpuGraphPool)
    monkeypatch.setattr(CpuGraphPool, "num_captured", 0)
    return CpuGraphPool


@pytest.mark.parametrize(
    ("cuts", "num_micro_batches", "recompute", "by_buffer", "bias"),
    [
        ((), 1, "norm", False, False),
        ((6,), 1, "level", True, True),  # a bias begins at zero, and changes in each step
        ((2, 9), 2, "level", True, False),
        *by_night(
            ((), 2, "level", False, False),
            ((6,), 2, "norm", False, True),
            ((6,), 4, "level", True, False),
            ((2, 9), 2, "norm", False, False),
        ),
    ],
)
def test_replayed_steps_train_as_launched_ones_on_a_cpu(
    cpu_graphs, monkeypatch, cuts, num_micro_batches, recompute, by_buffer, bias
):
    monkeypatch.setattr(recomputing, "MIN_ELEMENTS", 0)
    if by_buffer:  # as between two GPUs
        monkeypatch.setattr(pipeline, "stays", lambda tensor, device: False)
    check_replayed_steps(
        (CPU,) * (len(cuts) + 1),
        topology=replace(TOPOLOGY, upsampling_bias=bias),
        cuts=cuts,
        num_micro_batches=num_micro_batches,
        recompute=recompute,
    )
    num_stages = len(cuts) + 1
    of_actions = num_micro_batches * (2 * num_stages + 1)
    assert cpu_graphs.num_captured == (of_actions if cuts else min(num_micro_batches, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
@pytest.mark.parametrize(
    "indices", [(0,), (0, 0), (0, 0, 0), pytest.param((0, 1), marks=pytest.mark.multigpu)], ids=str
)
def test_replayed_steps_train_as_launched_ones_on_gpus(indices, num_micro_batches):
    gpus = tuple(torch.device("cuda", index) for index in indices)
    check_replayed_steps(gpus, num_micro_batches=num_micro_batches)
    biased = {"topology": replace(TOPOLOGY, upsampling_bias=True), "recompute": "level"}
    check_replayed_steps(gpus, num_micro_batches=num_micro_batches, **biased)


def test_coarse_logits_of_an_earlier_stage_reach_the_loss(cpu_graphs):
    strides = ((1, 1, 1), (2, 2, 2), (2, 2, 2), (1, 1, 1))
    deep = replace(TOPOLOGY, channels=(4, 4, 8, 8), strides=strides, deep_supervision=True)
    names = [block.name for block in UNet3d(deep).blocks()]
    cuts = (names.index("head.1") + 1,)
    check_replayed_steps((CPU, CPU), topology=deep, cuts=cuts, num_micro_batches=2)
    assert cpu_graphs.num_captured > 0


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_another_shape_that_stays_is_captured_instead(device, cpu_graphs):
    numbers = range(NUM_WARM_UP_STEPS + 2)
    shapes = [[(number, num_samples) for number in numbers] for num_samples in (2, 1, 2)]
    check_replayed_steps((device,), sum(shapes, []))
    assert cpu_graphs.num_captured == (3 if device == CPU else 0)


def take_steps(executor, number=NUM_WARM_UP_STEPS + 2, loss=dice_cross_entropy):
    """Run steps on one batch, and return the gradients with the loss as a further one."""
    batch = make_batch(executor, 1)
    for _ in range(number):
        executor.module.zero_grad()
        terms = executor.forward_backward(*batch, loss)
    return {"loss": terms.total, **gradients_of(executor.module)}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert_close(list(found.values()), list(expected.values()), 1e-10)


@pytest.mark.parametrize(("num_micro_batches", "num_captured"), [(1, 5), (2, 0)])
def test_batch_dice_is_captured_where_its_sums_are_those_of_one_micro_batch(
    cpu_graphs, num_micro_batches, num_captured
):
    replayed, launched = (
        make_executor((CPU, CPU), num_micro_batches=num_micro_batches, captures=choice)
        for choice in (True, False)
    )
    loss = SegmentationLoss(joins_samples=True)
    assert_same(take_steps(replayed, loss=loss), take_steps(launched, loss=loss))
    assert cpu_graphs.num_captured == num_captured


def test_a_changed_network_is_captured_anew(cpu_graphs):
    """New storage, other frozen parameters or another mode are not in the old graphs."""

    def changed(choice):
        executor = make_executor((CPU, CPU), captures=choice)
        take_steps(executor)
        for index, parameter in enumerate(executor.module.parameters()):
            parameter.data = parameter.data * 1.5
            parameter.requires_grad_(index > 0)
        return take_steps(executor)

    assert_same(changed(True), changed(False))


class TwoNames(nn.Module):
    """Has one parameter with two names."""

    def __init__(self):
        super().__init__()
        self.weight = self.same = nn.Parameter(torch.randn(3, 1, 1, 1))

    def forward(self, x):
        return x * self.weight + self.same


def with_two_names():
    torch.manual_seed(0)
    chain = nn.Sequential(nn.Conv3d(1, 3, 1), TwoNames()).double()
    return SequentialNetwork(chain, (1, 8, 8, 8))


def shared_by_modules():
    torch.manual_seed(0)
    network = UNet3d(TOPOLOGY).double()
    last = network.decoder.levels["0"]["units"][-1]
    last.norm.weight = network.encoder.levels[0][0].norm.weight
    return network


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("make", [with_two_names, shared_by_modules])
def test_a_weight_in_two_places_gets_the_gradient_of_both(make, num_stages, cpu_graphs):
    """Also with two stages on one device."""
    replayed, launched = (
        take_steps(parallelize(make(), Layout(devices=(CPU,) * num_stages, captures=choice)))
        for choice in (True, False)
    )
    assert cpu_graphs.num_captured > 0
    assert_same(replayed, launched)


def test_a_loss_that_cannot_be_captured_is_launched(cpu_graphs, caplog):
    is_captured = [False]

    def loss(logits, target):
        if cpu_graphs.num_captured > 0 and not is_captured[0]:
            is_captured[0] = True
            raise RuntimeError("operation not permitted when stream is capturing")
        return dice_cross_entropy(logits, target)

    executor = make_executor((CPU,))
    found = take_steps(executor, NUM_WARM_UP_STEPS + 3, loss)
    assert is_captured[0] and found["loss"].isfinite()
    num_captured = cpu_graphs.num_captured
    train(executor, [(1, 1)] * (NUM_WARM_UP_STEPS + 2))  # another shape and another loss
    assert cpu_graphs.num_captured > num_captured
    (record,) = caplog.records
    assert "UNET3D_CUDA_GRAPHS=0 in the" in record.getMessage() and "\n" not in record.getMessage()


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_replay_that_is_interrupted_leaves_nothing_to_the_next(
    cpu_graphs, monkeypatch, num_stages
):
    executor = make_executor((CPU,) * num_stages, num_micro_batches=2)
    expected = take_steps(executor)
    assert cpu_graphs.num_captured > 0
    copied = []

    def once(loss, weight):
        if copied:
            raise KeyboardInterrupt
        copied.append(loss)
        return weighted(loss, weight)

    with monkeypatch.context() as patch:
        patch.setattr(step if num_stages == 1 else pipeline, "weighted", once)
        with pytest.raises(KeyboardInterrupt):
            take_steps(executor, 1)
    assert_same(take_steps(executor, 1), expected)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_gradients_that_are_there_are_added_to(device, cpu_graphs):
    executor = make_executor((device, device), num_micro_batches=2)
    batch, parameters = make_batch(executor, 1), list(executor.module.parameters())
    tolerance = 1e-10 if device == CPU else 1e-2

    def added():
        executor.forward_backward(*batch, dice_cross_entropy)
        return [parameter.grad.clone() for parameter in parameters]

    for _ in range(NUM_WARM_UP_STEPS + 2):
        executor.module.zero_grad()
        once = added()
    assert_close(added(), [2 * gradient for gradient in once], tolerance)
    for parameter in parameters:  # gradients that other code made
        parameter.grad = torch.ones_like(parameter)
    assert_close(added(), [1 + gradient for gradient in once], tolerance)
    assert cpu_graphs.num_captured > 0 or device == GPU


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_what_is_measured_is_the_launched_step(device, cpu_graphs):
    executor = make_executor((device,), num_micro_batches=2)
    optimization = Optimization(executor.module, TrainingSettings(), "bfloat16")
    with measured_steps(executor, optimization.optimizer) as meter:
        train(executor, [7] * (NUM_WARM_UP_STEPS + 2), optimization)
    measured = meter.read(optimization.optimizer)
    assert measured[0].activations_bytes > 0
    (line,) = meter.timeline(measured)
    kinds = [mark.kind for mark in line.marks]
    assert kinds == ["forward", "loss", "backward"] * 2 + ["optimizer"]


@pytest.mark.gpu
@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_captured_step_takes_little_more_than_a_launched_one(num_slots):
    """Captured micro-batches share memory, however many there are."""
    settings = ModelSettings(deep_supervision=False)
    topology = plan_topology(settings, (96,) * 3, (1.0,) * 3, 1, 3)
    image = torch.randn(8, 1, 96, 96, 96, device=GPU)
    target = torch.zeros(8, 96, 96, 96, dtype=torch.uint8, device=GPU)
    peaks = []
    for num_steps in (NUM_WARM_UP_STEPS, NUM_WARM_UP_STEPS + 2):
        executor = make_executor((GPU,) * num_slots, topology, num_micro_batches=8)
        for _ in range(num_steps):
            executor.module.zero_grad()
            executor.forward_backward(image, target, dice_cross_entropy)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.memory_reserved(GPU))
        del executor
        gc.collect()
        torch.cuda.empty_cache()
    launched, captured = peaks
    assert captured < 1.2 * launched


def test_a_large_or_uneven_batch_is_launched_and_with_off_all_are(cpu_graphs, monkeypatch):
    train(make_executor((CPU,), captures=False), [1] * (NUM_WARM_UP_STEPS + 2))
    train(make_executor((CPU,), num_micro_batches=2), [(1, 3)] * (NUM_WARM_UP_STEPS + 2))
    monkeypatch.setattr(graph, "MAX_ELEMENTS", 1000)
    train(make_executor((CPU,)), [1] * (NUM_WARM_UP_STEPS + 2))
    assert cpu_graphs.num_captured == 0


def test_a_capture_that_runs_out_of_memory_is_not_tried_again(cpu_graphs, monkeypatch):
    tries = []

    def full(self, device):
        tries.append(device)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(CpuGraphPool, "__init__", full)
    check_replayed_steps((CPU,))
    assert tries == [CPU]
