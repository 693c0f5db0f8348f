import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.cpu_graphs import CpuGraphPool
from tests.plain_network import gradients_of
from unet3d.config import ModelSettings, TrainingSettings
from unet3d.kernels import recompute as recomputing
from unet3d.memory.measurement import measured_steps
from unet3d.model import SegmentationLoss, Topology, UNet3d, dice_cross_entropy, plan_topology
from unet3d.model.optimizer import Optimization
from unet3d.parallel import (
    Executor,
    Layout,
    cuda_graphs,
    image_dtype,
    parallelize,
    static_mail,
    step_capture,
)
from unet3d.parallel.captured_step import aliased
from unet3d.parallel.partition import make_stages
from unet3d.parallel.step_capture import NUM_WARM_UP_STEPS

TOPOLOGY = Topology(
    in_channels=1, num_classes=3, channels=(4, 8, 16), strides=((1, 1, 1), (2, 2, 2), (2, 2, 2))
)


DEEP = replace(
    TOPOLOGY, channels=(4, 4, 8, 8), strides=((1, 1, 1), (2, 2, 2), (2, 2, 2), (1, 1, 1))
)
CPU = torch.device("cpu")
SIZE = 16 if torch.cuda.is_available() else 8


def make_executor(devices: tuple[torch.device, ...], **options: Any) -> Executor:
    torch.manual_seed(0)
    fields = {name: options.pop(name, False) for name in ("deep_supervision", "upsampling_bias")}
    model = UNet3d(replace(options.pop("topology", TOPOLOGY), **fields))
    on_gpu = devices[0].type == "cuda"
    if not on_gpu:
        model.double()
    autocast = torch.bfloat16 if on_gpu else None
    return parallelize(model, Layout(devices=devices, autocast=autocast, **options))


def make_batch(number: int, num_samples: int = 2, size: int = SIZE) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    image = torch.randn(num_samples, 1, size, size, size, generator=generator)
    target = torch.randint(0, 3, (num_samples, size, size, size), generator=generator)
    return image, target.to(torch.uint8)


def train(executor: Executor, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    optimization = Optimization(executor.module, TrainingSettings(), "bfloat16")
    dtype = image_dtype(executor.module)
    losses = []
    for image, target in batches:
        terms = executor.forward_backward(
            image.to(executor.input_device, dtype),
            target.to(executor.output_device),
            dice_cross_entropy,
        )
        losses.append(terms.total)
        optimization.step(0.01)
    return [*losses, *(value.detach() for value in executor.module.parameters())]


def assert_close(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance / 10)


def check_replayed_steps(
    devices: tuple[torch.device, ...], tolerance: float = 2e-3, **options: Any
) -> None:
    size = 8 if devices[0] == CPU else 16
    batches = [make_batch(number, 4, size) for number in range(NUM_WARM_UP_STEPS + 4)]
    # A last batch that is smaller, as every epoch has one, does not make the capture useless.
    batches.insert(NUM_WARM_UP_STEPS + 2, make_batch(99, 1, size))
    replayed = train(make_executor(devices, **options), batches)
    launched = train(make_executor(devices, cuda_graphs="off", **options), batches)
    assert_close(replayed, launched, tolerance)


@pytest.fixture
def cpu_graphs(monkeypatch):
    """Let steps on CPUs be captured."""
    monkeypatch.setitem(cuda_graphs.POOLS, "cpu", CpuGraphPool)
    monkeypatch.setattr(CpuGraphPool, "num_captured", 0)
    return CpuGraphPool


@pytest.mark.parametrize(
    ("cuts", "num_micro_batches", "schedule", "recompute", "by_buffer", "bias"),
    [
        ((), 1, "1f1b", "norm", False, False),
        ((), 2, "all-forward", "level", False, False),
        ((6,), 1, "1f1b", "level", True, True),  # a bias begins at zero, and changes in each step
        ((6,), 2, "1f1b", "norm", False, True),
        ((6,), 4, "all-forward", "level", True, False),
        ((2, 9), 2, "1f1b", "level", True, False),
        ((2, 9), 2, "all-forward", "norm", False, False),
    ],
)
def test_replayed_steps_train_as_launched_ones_on_a_cpu(
    cpu_graphs, monkeypatch, cuts, num_micro_batches, schedule, recompute, by_buffer, bias
):
    monkeypatch.setattr(recomputing, "MIN_ELEMENTS", 0)
    if by_buffer:  # as between two GPUs
        monkeypatch.setattr(static_mail, "stays", lambda tensor, device: False)
    check_replayed_steps(
        (CPU,) * (len(cuts) + 1),
        tolerance=1e-10,
        cuts=cuts,
        num_micro_batches=num_micro_batches,
        schedule=schedule,
        recompute=recompute,
        upsampling_bias=bias,
    )
    num_stages = len(cuts) + 1
    assert cpu_graphs.num_captured == num_micro_batches * (2 * num_stages + 1)


def test_coarse_logits_of_an_earlier_stage_reach_the_loss(cpu_graphs):
    names = [block.name for block in UNet3d(replace(DEEP, deep_supervision=True)).blocks()]
    more = {"topology": DEEP, "deep_supervision": True, "cuts": (names.index("head.1") + 1,)}
    check_replayed_steps((CPU, CPU), 1e-10, num_micro_batches=2, **more)
    assert cpu_graphs.num_captured > 0


def take_steps(
    executor: Executor, number: int = NUM_WARM_UP_STEPS + 2, loss: Any = dice_cross_entropy
) -> dict[str, Tensor]:
    """Take steps on one batch, and return the gradients, and as one of them the loss."""
    image, target = make_batch(1)
    for _ in range(number):
        executor.module.zero_grad()
        terms = executor.forward_backward(image.double(), target, loss)
    return {"loss": terms.total, **gradients_of(executor.module)}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert_close(list(found.values()), list(expected.values()), 1e-10)


@pytest.mark.parametrize(("num_micro_batches", "num_captured"), [(1, 5), (2, 0)])
def test_batch_dice_is_captured_where_its_sums_are_those_of_one_micro_batch(
    cpu_graphs, num_micro_batches, num_captured
):
    replayed, launched = (
        make_executor((CPU, CPU), num_micro_batches=num_micro_batches, cuda_graphs=choice)
        for choice in ("auto", "off")
    )
    loss = SegmentationLoss(joins_samples=True)
    assert_same(take_steps(replayed, loss=loss), take_steps(launched, loss=loss))
    assert cpu_graphs.num_captured == num_captured


def test_a_changed_network_is_captured_anew(cpu_graphs):
    """Other storage, other frozen parameters, another mode: none of it is in the old graphs."""

    def changed(choice):
        executor = make_executor((CPU, CPU), cuda_graphs=choice)
        take_steps(executor)
        for index, parameter in enumerate(executor.module.parameters()):
            parameter.data = parameter.data * 1.5
            parameter.requires_grad_(index > 0)
        return take_steps(executor)

    assert_same(changed("auto"), changed("off"))


def test_a_weight_that_modules_share_gets_the_gradient_of_both(cpu_graphs):
    found = []
    for choice in ("auto", "off"):
        executor = make_executor((CPU,), cuda_graphs=choice)
        first, second = executor.module.decoder.levels["0"]["units"]  # type: ignore[attr-defined]
        second.norm.weight = first.norm.weight
        executor = parallelize(executor.module, Layout(devices=(CPU,), cuda_graphs=choice))  # type: ignore[arg-type]
        found.append(take_steps(executor))
    assert cpu_graphs.num_captured > 0
    assert_same(*found)


def test_a_loss_that_cannot_be_captured_is_launched(cpu_graphs, caplog):
    is_captured = [False]

    def loss(logits, target):
        if cpu_graphs.num_captured > 0 and not is_captured[0]:
            is_captured[0] = True
            raise RuntimeError("operation not permitted when stream is capturing")
        return dice_cross_entropy(logits, target)

    found = take_steps(make_executor((CPU,)), NUM_WARM_UP_STEPS + 3, loss)
    assert is_captured[0] and found["loss"].isfinite()
    (record,) = caplog.records
    assert "parallel.cuda_graphs=off" in record.getMessage() and "\n" not in record.getMessage()


def test_gradients_that_are_there_are_added_to_on_a_cpu(cpu_graphs):
    check_accumulation(make_executor((CPU, CPU), num_micro_batches=2), tolerance=1e-10)
    assert cpu_graphs.num_captured > 0


def check_accumulation(executor: Executor, tolerance: float) -> None:
    image, target = make_batch(1)
    dtype, parameters = image_dtype(executor.module), list(executor.module.parameters())
    image, target = image.to(executor.input_device, dtype), target.to(executor.output_device)

    def added() -> list[Tensor]:
        executor.forward_backward(image, target, dice_cross_entropy)
        return [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]

    for _ in range(NUM_WARM_UP_STEPS + 2):
        executor.module.zero_grad()
        once = added()
    assert_close(added(), [2 * gradient for gradient in once], tolerance)
    for parameter in parameters:  # a gradient of somebody else's making
        parameter.grad = torch.ones_like(parameter)
    assert_close(added(), [1 + gradient for gradient in once], tolerance)


def test_a_large_or_uneven_batch_is_launched_and_with_off_all_are(cpu_graphs, monkeypatch):
    train(make_executor((CPU,), cuda_graphs="off"), [make_batch(1)] * (NUM_WARM_UP_STEPS + 2))
    train(make_executor((CPU,), num_micro_batches=2), [make_batch(1, 3)] * (NUM_WARM_UP_STEPS + 2))
    monkeypatch.setattr(step_capture, "MAX_ELEMENTS", 1000)
    train(make_executor((CPU,)), [make_batch(1)] * (NUM_WARM_UP_STEPS + 2))
    assert cpu_graphs.num_captured == 0


def test_a_capture_that_runs_out_of_memory_is_not_tried_again(cpu_graphs, monkeypatch):
    tries = []

    def full(self, device):
        tries.append(device)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(CpuGraphPool, "__init__", full)
    batches = [make_batch(number) for number in range(NUM_WARM_UP_STEPS + 3)]
    failed = train(make_executor((CPU,)), batches)
    assert tries == [CPU]
    assert_close(failed, train(make_executor((CPU,), cuda_graphs="off"), batches), 1e-12)


def test_what_a_capture_does_leaves_the_parameters_alone():
    model = UNet3d(TOPOLOGY)
    calls: list[Tensor] = []
    stages = make_stages(model.blocks(), (CPU, CPU), (6,), model.outputs())
    executor = parallelize(model, Layout(devices=(CPU, CPU), cuts=(6,)))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(calls.append)
    image, target = make_batch(1)
    with aliased(stages[0]) as first, aliased(stages[1]) as last:
        executor.forward_backward(image, target, dice_cross_entropy)
    assert not calls
    assert all(parameter.grad is None for parameter in model.parameters())
    made = first | last
    assert set(made) == set(model.parameters())
    executor.forward_backward(image, target, dice_cross_entropy)
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad, made[parameter])


@pytest.mark.gpu
@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "all-forward"])
@pytest.mark.parametrize(
    "indices",
    [(0,), (0, 0), (0, 0, 0), pytest.param((0, 1), marks=pytest.mark.multigpu)],
    ids=str,
)
def test_replayed_steps_train_as_launched_ones(indices, schedule, num_micro_batches):
    gpus = tuple(torch.device("cuda", index) for index in indices)
    options = {"schedule": schedule, "num_micro_batches": num_micro_batches}
    check_replayed_steps(gpus, **options)
    if indices in ((0,), (0, 0)):
        check_replayed_steps(gpus, recompute="level", **options)
    if len(indices) == 1:
        check_replayed_steps(gpus, upsampling_bias=True, **options)


@pytest.mark.gpu
def test_gradients_that_are_there_are_added_to():
    check_accumulation(make_executor((torch.device("cuda", 0),)), tolerance=1e-2)


@pytest.mark.gpu
def test_what_is_measured_is_the_launched_step_and_all_that_is_reserved():
    executor = make_executor((torch.device("cuda", 0),), num_micro_batches=2)
    optimization = Optimization(executor.module, TrainingSettings(), "bfloat16")
    with measured_steps(executor, optimization.optimizer) as meter:
        image, target = (value.cuda() for value in make_batch(7))
        for _ in range(NUM_WARM_UP_STEPS + 2):
            executor.forward_backward(image, target, dice_cross_entropy)
            optimization.step(0.01)
    measured = meter.read(optimization.optimizer)[0]
    assert measured.activations_bytes > 0
    assert measured.reserved_bytes >= torch.cuda.memory_reserved(0)
    (line,) = meter.timeline({0: measured})
    kinds = [mark.kind for mark in line.marks]
    assert kinds == ["forward", "loss", "backward"] * 2 + ["optimizer"]


@pytest.mark.gpu
@pytest.mark.parametrize("indices", [(0,), (0, 0)])
def test_a_captured_step_takes_little_more_than_a_launched_one(indices):
    """However many micro-batches are captured, they share memory."""
    gpu = torch.device("cuda", 0)
    peaks = []
    for num_steps in (NUM_WARM_UP_STEPS, NUM_WARM_UP_STEPS + 2):
        torch.manual_seed(0)
        model = UNet3d(
            plan_topology(ModelSettings(deep_supervision=False), (96,) * 3, (1.0,) * 3, 1, 3)
        )
        layout = Layout(devices=(gpu,) * len(indices), num_micro_batches=8, autocast=torch.bfloat16)
        executor = parallelize(model, layout)
        image = torch.randn(8, 1, 96, 96, 96, device=gpu)
        target = torch.zeros(8, 96, 96, 96, dtype=torch.uint8, device=gpu)
        for _ in range(num_steps):
            model.zero_grad()
            executor.forward_backward(image, target, dice_cross_entropy)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.memory_reserved(gpu))
        del executor, model, image, target
        gc.collect()
        torch.cuda.empty_cache()
    launched, captured = peaks
    assert captured < 1.2 * launched


@pytest.mark.gpu
def test_another_shape_that_stays_is_captured_instead():
    gpu = (torch.device("cuda", 0),)
    batches = [make_batch(number) for number in range(NUM_WARM_UP_STEPS + 2)]
    batches += [make_batch(number, 1) for number in range(NUM_WARM_UP_STEPS + 2)]
    batches += [make_batch(number) for number in range(NUM_WARM_UP_STEPS + 2)]
    launched = train(make_executor(gpu, cuda_graphs="off"), batches)
    assert_close(train(make_executor(gpu), batches), launched, 2e-3)
