import pytest
import torch

from unet3d.config import ModelSettings
from unet3d.memory.measurement import measured_steps
from unet3d.model import UNet3d, dice_cross_entropy, plan_topology
from unet3d.parallel import Executor, Layout, parallelize

CPU = torch.device("cpu")


@pytest.fixture
def executor() -> Executor:
    topology = plan_topology(
        ModelSettings(base_channels=4, num_levels=2, deep_supervision=False),
        (8, 8, 8),
        (1.0, 1.0, 1.0),
        1,
        3,
    )
    layout = Layout(devices=(CPU, CPU), cuts=None, num_micro_batches=1)
    return parallelize(UNet3d(topology), layout)


def step(executor: Executor, optimizer: torch.optim.Optimizer) -> None:
    target = torch.zeros(1, 8, 8, 8, dtype=torch.uint8)
    executor.forward_backward(torch.zeros(1, 1, 8, 8, 8), target, dice_cross_entropy)
    optimizer.step()
    optimizer.zero_grad()


def test_steps_in_the_context_are_measured_and_no_others(executor: Executor) -> None:
    optimizer = torch.optim.SGD(executor.module.parameters(), lr=0.1, momentum=0.9)
    before = executor.observer
    with measured_steps(executor, optimizer) as meter:
        step(executor, optimizer)
    assert executor.observer is before
    measured = meter.read(optimizer)
    num_bytes = sum(4 * value.numel() for value in executor.module.parameters())
    for kind in ("parameters_bytes", "gradients_bytes", "optimizer_bytes"):
        assert sum(getattr(slot, kind) for slot in measured.values()) == num_bytes, kind
    assert all(slot.activations_bytes > 0 for slot in measured.values())
    marks = meter.timeline(measured)
    assert [line.marks[-1].kind for line in marks] == ["optimizer", "optimizer"]
    step(executor, optimizer)
    assert meter.read(optimizer) == measured
    assert meter.timeline(measured) == marks


def test_an_error_leaves_nothing_behind(executor: Executor) -> None:
    optimizer = torch.optim.SGD(executor.module.parameters(), lr=0.1)
    before = executor.observer
    with pytest.raises(KeyError), measured_steps(executor, optimizer) as meter:
        raise KeyError
    assert executor.observer is before
    step(executor, optimizer)
    assert all(slot.gradients_bytes == 0 for slot in meter.read(optimizer).values())
