import copy

import pytest
import torch
from torch import nn

from unet3d.config import ModelSettings, TrainingSettings
from unet3d.model import UNet3d, dice_cross_entropy, plan_topology
from unet3d.model import optimizer as optimizer_module
from unet3d.model.optimizer import Optimization
from unet3d.parallel import Layout, parallelize
from unet3d.parallel.precision import autocast_dtype

CPU = torch.device("cpu")


def make(module, precision="float32", **settings):
    return Optimization(module, TrainingSettings(**settings), precision)


def test_the_learning_rate_decays_polynomially_and_a_warm_up_rises_linearly_to_that():
    rate = make(nn.Linear(1, 1), learning_rate=0.02).learning_rate
    assert rate(0, 1000) == 0.02
    assert rate(500, 1000) == pytest.approx(0.02 * 0.5**0.9)
    assert rate(999, 1000) == pytest.approx(0.02 * 0.001**0.9)
    gentle = make(nn.Linear(1, 1), learning_rate=0.02, init="a.pt")
    for num_steps, expected in [
        (10_000, [1 / 251, 2 / 251, 3 / 251]),
        (20, [1 / 3, 2 / 3, 1, 1]),  # warm-up is at most a tenth of a short training
        (5, [1, 1]),
    ]:
        steps = range(len(expected))
        shares = [gentle.learning_rate(s, num_steps) / rate(s, num_steps) for s in steps]
        assert shares == pytest.approx(expected)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_steps_are_those_of_pytorch(optimizer):
    """With Nesterov's momentum or AdamW; a parameter may get its first gradient later."""
    module = nn.Linear(2, 1).double()
    plain = copy.deepcopy(module)
    optimization = make(module, optimizer=optimizer, weight_decay=0.1)
    reference = torch.optim.AdamW(plain.parameters(), weight_decay=0.1)
    if optimizer == "sgd":
        reference = torch.optim.SGD(
            plain.parameters(), 1, momentum=0.99, nesterov=True, weight_decay=0.1
        )
    for number, rate in enumerate((0.1, 0.05, 0.02, 0.01)):
        for one in (module, plain):
            one.weight.grad = torch.tensor([[0.1 * (number + 1), -3.0]], dtype=torch.float64)
            one.bias.grad = torch.full_like(one.bias, 0.2) if number > 1 else None
        optimization.step(rate)
        reference.param_groups[0]["lr"] = rate
        reference.step()
        for a, b in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gradients_are_clipped_together_and_cleared(monkeypatch):
    monkeypatch.setattr(optimizer_module, "MAX_GRADIENT_NORM", 2.0)
    module = nn.ParameterList([torch.zeros(size, dtype=torch.float64) for size in (2, 1)])
    optimization = make(module, weight_decay=0.0)
    module[0].grad = torch.tensor([3.0, 0.0], dtype=torch.float64)
    module[1].grad = torch.tensor([4.0], dtype=torch.float64)
    optimization.step(1.0)
    # The norm of all gradients is 5, so they are scaled by 2/5. Nesterov's first step is 1.99 times
    # the gradient.
    found = torch.cat([parameter.detach() for parameter in module])
    expected = 1.99 * torch.tensor([-1.2, 0.0, -1.6], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert all(parameter.grad is None for parameter in module.parameters())
    # A gradient below the limit is not scaled.
    before, buffer = module[1].item(), 0.99 * 1.6 + 1.5
    module[1].grad = torch.tensor([1.5], dtype=torch.float64)
    optimization.step(1.0)
    assert module[1].item() == pytest.approx(before - 1.5 - 0.99 * buffer, rel=1e-6)


def network():
    torch.manual_seed(0)
    settings = ModelSettings(base_channels=4, num_levels=2, deep_supervision=False)
    return UNet3d(plan_topology(settings, (16, 16, 16), (1.0, 1.0, 1.0), 1, 2))


def train_steps(devices, precision, num_steps=3, rate=0.01, **layout):
    executor = parallelize(network(), Layout(devices=tuple(map(torch.device, devices)), **layout))
    optimization = make(executor.module, precision)
    image = torch.randn(2, 1, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    target = (image[:, 0] > 0).to(executor.output_device, torch.uint8)
    image, losses = image.to(executor.input_device), []
    for _ in range(num_steps):
        terms = executor.forward_backward(image, target, dice_cross_entropy, optimization.scale)
        losses.append(terms.total.item())
        optimization.step(rate)
    return executor.module, optimization, losses


@pytest.mark.parametrize("num_devices", [1, 2])
def test_scaled_gradients_make_the_same_steps(num_devices):
    """The scale is a power of two, so scaling and unscaling change no bits."""
    plain, without, _ = train_steps(["cpu"], "float32")
    scaled, with_scale, _ = train_steps(["cpu"] * num_devices, "float16")
    assert (without.scale, with_scale.scale) == (1.0, 2.0**16)
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [("cuda:0",), ("cuda:0", "cpu"), ("cpu", "cuda:0")], ids=str)
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_lower_precision_learns_on_gpus(devices, precision):
    autocast = autocast_dtype(precision)
    module, _, losses = train_steps(devices, precision, 10, 0.05, autocast=autocast)
    assert losses[-1] < 0.9 * losses[0]
    assert {value.dtype for value in module.parameters()} == {torch.float32}


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_skips_the_step_and_lowers_the_scale(bad):
    module = nn.Linear(2, 1)
    before = copy.deepcopy(module.state_dict())
    optimization = make(module, "float16")
    module.weight.grad, module.bias.grad = torch.tensor([[1.0, bad]]), torch.ones(1)
    optimization.step(0.01)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert optimization.scale == 2.0**15
    assert module.weight.grad is None
    # The momentum has no trace of it.
    others = make(copy.deepcopy(module), "float32")
    for one, scale in ((optimization, 2.0**15), (others, 1.0)):
        for parameter in one.module.parameters():
            parameter.grad = torch.full_like(parameter, 0.25 * scale)
        one.step(0.01)
    for a, b in zip(module.parameters(), others.module.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("first", ["float16", "float32"])
@pytest.mark.parametrize("second", ["float16", "float32"])
def test_a_run_can_go_on_in_another_precision(first, second):
    """Its scale of the loss is kept, too."""
    module = nn.Linear(2, 1)
    optimization = make(module, first)
    for _ in range(3):
        module.weight.grad, module.bias.grad = torch.full((1, 2), float("inf")), torch.ones(1)
        optimization.step(0.01)
    assert optimization.scale == (2.0**13 if first == "float16" else 1)
    resumed = make(nn.Linear(2, 1), second)
    resumed.load_state_dict(optimization.state_dict())
    kept = 2.0**13 if first == "float16" else 2.0**16
    assert resumed.scale == (kept if second == "float16" else 1)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (torch.channels_last_3d, torch.contiguous_format),
        (torch.contiguous_format, torch.channels_last_3d),
    ],
)
def test_a_resumed_optimizer_takes_the_same_steps(earlier, later, optimizer):
    """Also if kernels are stored in another layout: on a GPU in float32 after bfloat16."""

    def take_steps(module, optimization, numbers):
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            for parameter in module.parameters():
                gradient = torch.randn(parameter.shape, generator=generator)
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
            optimization.step(0.01)

    def conv(layout):
        torch.manual_seed(0)
        return nn.Conv3d(3, 4, 2).to(memory_format=layout)

    before, whole, after = conv(earlier), conv(earlier), conv(later)
    take_steps(whole, make(whole, optimizer=optimizer), range(4))
    first, second = make(before, optimizer=optimizer), make(after, optimizer=optimizer)
    take_steps(before, first, range(2))
    after.load_state_dict(before.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    take_steps(after, second, range(2, 4))
    torch.testing.assert_close(after.weight, whole.weight, rtol=1e-6, atol=1e-7)
    for values in second.optimizer.state.values():
        for name, value in values.items():
            assert name == "step" or value.dim() == 1 or value.stride() == after.weight.stride()


def test_the_state_of_another_network_is_refused():
    optimization = make(nn.Linear(2, 1))
    with pytest.raises(ValueError, match="another number of parameters"):
        optimization.load_state_dict(make(nn.Linear(2, 1, bias=False)).state_dict())
