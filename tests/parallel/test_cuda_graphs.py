from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from unet3d.config import TrainingSettings
from unet3d.memory.meter import MemoryMeter
from unet3d.model import Topology, UNet3d, dice_cross_entropy
from unet3d.model.optimizer import Optimization
from unet3d.parallel import Executor, Layout, parallelize
from unet3d.parallel import cuda_graphs as graphs
from unet3d.parallel.cuda_graphs import NUM_WARM_UP_STEPS, RecordedPipeline

TOPOLOGY = Topology(
    in_channels=1, num_classes=3, channels=(8, 16, 32), strides=((1, 1, 1), (2, 2, 2), (2, 2, 2))
)


def make_executor(
    num_micro_batches: int = 1,
    devices: tuple[int, ...] = (0,),
    schedule: Literal["1f1b", "all-forward"] = "1f1b",
) -> Executor:
    torch.manual_seed(0)
    model = UNet3d(TOPOLOGY)
    gpus = tuple(torch.device("cuda", index) for index in devices)
    return parallelize(
        model,
        Layout(
            devices=gpus,
            cuts=None,
            num_micro_batches=num_micro_batches,
            autocast=torch.bfloat16,
            schedule=schedule,
        ),
    )


def make_batch(number: int, num_samples: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    image = torch.randn(num_samples, 1, 32, 32, 32, generator=generator)
    target = torch.randint(0, 3, (num_samples, 32, 32, 32), generator=generator)
    return image, target.to(torch.uint8)


def train(executor: Executor, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    optimization = Optimization(executor.module, TrainingSettings(), "bfloat16")
    losses = []
    for image, target in batches:
        losses.append(
            executor.forward_backward(
                image.to(executor.input_device),
                target.to(executor.output_device),
                dice_cross_entropy,
            ).total
        )
        optimization.step(0.01)
    return [*losses, *(value.detach() for value in executor.module.parameters())]


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)


def check_replayed_steps(
    monkeypatch: pytest.MonkeyPatch, num_micro_batches: int, **choices: Any
) -> None:
    batches = [make_batch(number, 4) for number in range(NUM_WARM_UP_STEPS + 5)]
    # A last batch that is smaller, as every epoch has one, does not make the recording useless.
    batches.insert(NUM_WARM_UP_STEPS + 2, make_batch(99, num_samples=1))
    executor = make_executor(num_micro_batches, **choices)
    assert isinstance(executor, RecordedPipeline)
    replayed = train(executor, batches)
    assert executor._lanes is not None
    monkeypatch.setattr(graphs, "MAX_ELEMENTS", 0)
    launched = make_executor(num_micro_batches, **choices)
    assert_close(replayed, train(launched, batches))
    assert launched._lanes is None


@pytest.mark.gpu
@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "all-forward"])
@pytest.mark.parametrize("devices", [(0,), (0, 0), (0, 0, 0)])
def test_replayed_steps_train_as_launched_ones(
    devices: tuple[int, ...],
    schedule: str,
    num_micro_batches: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_replayed_steps(monkeypatch, num_micro_batches, devices=devices, schedule=schedule)


@pytest.mark.multigpu
@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
def test_replayed_steps_over_two_gpus(
    num_micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_replayed_steps(monkeypatch, num_micro_batches, devices=(0, 1))


@pytest.mark.gpu
def test_a_step_that_is_measured_is_launched() -> None:
    executor = make_executor()
    batches = [make_batch(number) for number in range(NUM_WARM_UP_STEPS + 1)]
    train(executor, batches)
    meter = MemoryMeter(executor.slots, executor.module)
    executor.observer = meter
    meter.start()
    image, target = (value.cuda() for value in make_batch(7))
    executor.forward_backward(image, target, dice_cross_entropy)
    optimization = Optimization(executor.module, TrainingSettings(), "bfloat16")
    assert meter.read(optimization.optimizer)[0].activations_bytes > 0


@pytest.mark.gpu
def test_gradients_that_are_there_are_added_to() -> None:
    executor = make_executor()
    image, target = (value.cuda() for value in make_batch(1))
    for _ in range(NUM_WARM_UP_STEPS + 1):
        executor.module.zero_grad()
        executor.forward_backward(image, target, dice_cross_entropy)
    once = [parameter.grad.clone() for parameter in executor.module.parameters()]
    executor.forward_backward(image, target, dice_cross_entropy)
    for parameter, gradient in zip(executor.module.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient, rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
def test_another_shape_that_stays_is_recorded_instead() -> None:
    executor = make_executor()
    train(executor, [make_batch(number) for number in range(NUM_WARM_UP_STEPS + 1)])
    first = executor._lanes
    train(executor, [make_batch(number, 1) for number in range(NUM_WARM_UP_STEPS + 1)])
    assert executor._lanes is not None and executor._lanes is not first


def test_what_is_recorded_leaves_the_parameters_alone() -> None:
    """What a recording does to gradients needs no GPU."""
    model = UNet3d(TOPOLOGY)
    calls: list[Tensor] = []
    cpu = torch.device("cpu")
    executor = parallelize(model, Layout(devices=(cpu, cpu)))
    assert isinstance(executor, RecordedPipeline)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(calls.append)
    image, target = make_batch(1)
    names = {parameter: name for name, parameter in model.named_parameters()}
    before = model.state_dict()
    with graphs._aliased(executor.stages[0]) as first, graphs._aliased(executor.stages[1]) as last:
        dice_cross_entropy(model(image), target).total.backward()
        assert not any(parameter.grad is not None for parameter in names)
    assert dict(model.named_parameters()) == {name: p for p, name in names.items()}
    assert all(value.data_ptr() == before[n].data_ptr() for n, value in model.state_dict().items())
    assert not calls
    dice_cross_entropy(model(image), target).total.backward()
    for parameter, gradient in (first | last).items():
        assert torch.equal(gradient, parameter.grad), names[parameter]
    assert len(calls) == len(names) == len(first) + len(last)
