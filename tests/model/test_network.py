"""How blocks run, and other networks than U-Nets: MONAI's 3-D ResNet-50 on executors."""

import copy
import gc
import weakref
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from monai.networks.nets.resnet import resnet50
from torch import nn
from torch.nn import functional

from tests.products import by_night
from unet3d.errors import ConfigError, DeviceError, VolumeError
from unet3d.model import (
    Block,
    SequentialNetwork,
    UNet3d,
    in_running_order,
    run_blocks,
    sequential_blocks,
)
from unet3d.parallel import Layout, graph, parallelize
from unet3d.parallel.graph import NUM_WARM_UP_STEPS
from unet3d.parallel.partition import default_cuts

from ..parallel.cpu_graphs import CpuGraphPool
from ..plain_network import assert_close
from .shapes import topology_of

CPU = torch.device("cpu")
SHAPE = (1, 32, 32, 16)
PARTS = ("conv1", "bn1", "act", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool")


class Add(nn.Module):
    """Adds its inputs and a number, and records which earlier results are alive."""

    def __init__(self, number, seen):
        super().__init__()
        self.number = number
        self.seen = seen
        self.alive = []

    def forward(self, *inputs):
        gc.collect()
        self.alive = [reference() is not None for reference in self.seen]
        out = sum(inputs) + self.number
        self.seen.append(weakref.ref(out))
        return out


def chain(**inputs):
    names = inputs.items()
    return [Block(name=name, module=nn.Identity(), inputs=tuple(read)) for name, read in names]


def test_blocks_run_in_order_and_a_tensor_is_freed_after_its_last_reader():
    seen = []
    modules = [Add(10**index, seen) for index in range(5)]
    # Block d reads a twice.
    inputs = {"a": ["image"], "b": ["a"], "c": ["b"], "d": ["a", "c", "a"], "e": ["d", "image"]}
    blocks = chain(**inputs)
    blocks = [replace(block, module=m) for block, m in zip(blocks, modules, strict=True)]
    tensors = {"image": torch.zeros(2)}
    result = run_blocks(blocks, tensors, ["e", "d"])
    assert not tensors  # the caller keeps no input alive
    assert {name: value.tolist() for name, value in result.items()} == {
        "d": [1113.0, 1113.0],
        "e": [11113.0, 11113.0],
    }
    assert modules[3].alive == [True, False, True]  # a has a further reader, b has none
    assert modules[4].alive == [False, False, False, True]


def test_a_block_that_reads_one_tensor_follows_the_first_reader_of_it():
    blocks = chain(a=["image"], b=["a"], c=["b"], skip_b=["b"], d=["skip_b", "c"], skip_a=["a"])
    blocks += chain(e=["d", "skip_a"], end=["e"])
    ordered = [block.name for block in in_running_order(blocks)]
    assert ordered == ["a", "b", "skip_a", "c", "skip_b", "d", "e", "end"]
    # Inputs from other blocks change no order: of a decoder alone, or of a chain.
    for blocks in (
        chain(low=["c"], skip_a=["a"], e=["low", "skip_a"]),
        chain(a=["image"], b=["a"], c=["b"]),
    ):
        assert in_running_order(blocks) == tuple(blocks)


@pytest.mark.parametrize("encoder", ["plain", "residual"])
def test_every_convolution_of_a_skip_runs_behind_the_next_level_s_first_unit(encoder):
    model = UNet3d(topology_of(encoder=encoder))
    names = [block.name for block in in_running_order(model.blocks())]
    assert sorted(names) == sorted(block.name for block in model.blocks())
    for level in range(2):
        place = names.index(f"encoder.{level + 1}.0")
        assert names[place + 1] == f"decoder.{level}.skip"


def make_resnet(norm="batch"):
    """Return MONAI's network, but narrow; MONAI itself passes ``norm`` to the stem only."""
    torch.manual_seed(3)
    network = resnet50(
        spatial_dims=3, n_input_channels=1, num_classes=4, widen_factor=1 / 16, conv1_t_size=3
    )
    if norm == "instance":
        for parent in list(network.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.BatchNorm3d):
                    setattr(parent, name, nn.InstanceNorm3d(child.num_features, affine=True))
    return network.double()


def as_network(resnet):
    parts = [(name, getattr(resnet, name)) for name in PARTS]
    chain = nn.Sequential(OrderedDict([*parts, ("flatten", nn.Flatten()), ("fc", resnet.fc)]))
    return SequentialNetwork(chain, SHAPE)


def make_batch(num_samples):
    generator = torch.Generator().manual_seed(num_samples)
    image = torch.randn(num_samples, *SHAPE, generator=generator, dtype=torch.float64)
    return image, torch.randint(4, (num_samples,), generator=generator)


@pytest.mark.parametrize(
    ("norm", "num_samples", "options"),
    [
        ("batch", 3, {"cuts": (1,)}),
        ("instance", 5, {"num_micro_batches": 3}),
        ("batch", 2, {"devices": (CPU,) * 3, "recompute": "level"}),
        *by_night(("batch", 3, {}), ("instance", 2, {"num_micro_batches": 4})),
    ],
    ids=str,
)
def test_resnet50_is_transparent(norm, num_samples, options):
    """One step and a prediction equal those of MONAI's module, parameter by parameter."""
    plain, placed = make_resnet(norm), make_resnet(norm)
    image, target = make_batch(num_samples)
    loss = functional.cross_entropy(plain(image), target)
    loss.backward()
    network = as_network(placed)
    assert network.samples_are_independent == (norm == "instance")
    executor = parallelize(network, Layout(**{"devices": (CPU, CPU), **options}))
    terms = executor.forward_backward(image, target, functional.cross_entropy)
    assert_close(terms.total, loss.detach(), "loss")
    for (name, actual), expected in zip(placed.named_parameters(), plain.parameters(), strict=True):
        assert expected.grad is not None
        # A bias before a normalisation has no effect: its gradient is rounding error.
        if expected.grad.norm() > 1e-12:
            assert_close(actual.grad, expected.grad, name)
    for (name, actual), expected in zip(placed.named_buffers(), plain.buffers(), strict=True):
        assert_close(actual.double(), expected.double(), name)
    executor.module.eval()
    assert_close(executor.predict(image), plain.eval()(image).detach(), "logits")


def test_the_chain_is_taken_apart_down_to_the_bottlenecks():
    resnet = make_resnet()
    blocks = as_network(resnet).blocks()
    names = [block.name for block in blocks]
    bottlenecks = [f"chain.layer{i + 1}.{j}" for i, n in enumerate((3, 4, 6, 3)) for j in range(n)]
    ends = ["chain.avgpool", "chain.flatten", "chain.fc"]
    # The stem's activation works in place, so it stays in one block with its normalisation.
    assert names == ["chain.conv1", "chain.bn1", "chain.maxpool", *bottlenecks, *ends]
    assert len({block.level for block in blocks if "layer3" in block.name}) == 1
    assert [block.inputs for block in blocks] == [("image",), *((name,) for name in names[:-1])]
    network = as_network(resnet)
    assert list(network.chain.state_dict()) == list(resnet.state_dict())
    with pytest.raises(ConfigError, match="batch normalisation with 2 micro-batches"):
        parallelize(network, Layout(devices=(CPU, CPU), num_micro_batches=2))
    # A chain of blocks can follow another.
    (first,) = sequential_blocks(nn.Sequential(nn.Linear(2, 3)), "encoder")
    (second,) = sequential_blocks(nn.Sequential(nn.Linear(3, 1)), "head", first.name)
    assert (first.name, first.inputs, first.path) == ("encoder.0", ("image",), "encoder")
    assert (second.name, second.inputs, second.path) == ("head.0", ("encoder.0",), "head")


class Doubled(nn.Sequential):
    """A Sequential whose forward does more than run its modules."""

    def forward(self, image):
        return 2 * super().forward(image)


def check_chain(chain, cuts, inputs):
    expected = chain(inputs)
    loss = expected.square().mean()
    gradients = torch.autograd.grad(loss, list(chain.parameters()))
    network = SequentialNetwork(chain, inputs.shape[1:])
    assert torch.equal(network(inputs), expected)
    layout = Layout(devices=(CPU,) * (len(cuts) + 1), cuts=cuts, num_micro_batches=2)
    executor = parallelize(network, layout)
    terms = executor.forward_backward(inputs, expected, lambda made, _: made.square().mean())
    assert_close(terms.total, loss.detach(), "loss")
    for (name, actual), gradient in zip(chain.named_parameters(), gradients, strict=True):
        assert_close(actual.grad, gradient, name)
    assert_close(executor.predict(inputs), expected.detach(), "result")


@pytest.mark.parametrize("cuts", [(1,), (2,), (1, 2, 3)], ids=str)
def test_a_module_in_place_or_used_again_runs_in_every_cut(cuts):
    relu = nn.ReLU(inplace=True)
    chain = nn.Sequential(
        nn.Linear(3, 8),
        relu,
        Doubled(nn.Linear(8, 8), nn.Tanh()),
        relu,
        nn.Linear(8, 8),
        nn.Sequential(relu, nn.Sequential(), nn.Linear(8, 2)),
    ).double()
    blocks = sequential_blocks(chain)
    assert [block.name for block in blocks] == ["chain.0", "chain.2", "chain.4", "chain.5.2"]
    torch.manual_seed(0)
    check_chain(chain, cuts, torch.randn(5, 3, dtype=torch.float64))


def test_a_stage_without_parameters_keeps_the_precision():
    torch.manual_seed(0)
    chain = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    check_chain(chain, (1,), torch.randn(4, 1, 9, 9, dtype=torch.float64))


def test_shared_parameters_other_shapes_too_many_stages_and_losses_of_samples_are_refused():
    linear = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"chain\.0 and chain\.2 share a parameter"):
        SequentialNetwork(nn.Sequential(linear, nn.Tanh(), linear), (2,))
    with pytest.raises(ConfigError, match="a chain of 0 modules"):
        SequentialNetwork(nn.Sequential(), (2,))
    network = SequentialNetwork(nn.Sequential(nn.Conv3d(2, 4, 3), nn.Tanh()), (2, 8, 8, 8))
    executor = parallelize(network, Layout(devices=(CPU, CPU)))
    assert executor.predict(torch.zeros(1, 2, 9, 7, 5)).shape == (1, 4, 7, 5, 3)
    for shape in ((1, 3, 8, 8, 8), (2, 8, 8, 8)):
        with pytest.raises(VolumeError, match=r"samples of shape \(2, 8, 8, 8\)"):
            executor.predict(torch.zeros(shape))
    with pytest.raises(DeviceError, match="3 devices are more than the 2 blocks"):
        parallelize(network, Layout(devices=(CPU,) * 3))
    # One value per sample.
    with pytest.raises(ConfigError, match=r"returned a tensor of shape \(2,\); return a scalar"):
        executor.forward_backward(*[torch.zeros(2, 2, 8, 8, 8)] * 2, lambda y, _: y[:, 0, 0, 0, 0])


def test_batch_norms_of_any_rank_count_a_batch_once_where_levels_are_recomputed():
    torch.manual_seed(0)
    chain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
    plain = copy.deepcopy(chain)
    image = torch.randn(5, 4, dtype=torch.float64)
    plain(image)
    layout = Layout(devices=(CPU, CPU), cuts=(2,), recompute="level")
    executor = parallelize(SequentialNetwork(chain, (4,)), layout)
    executor.forward_backward(image, image[:, :2], functional.mse_loss)
    for actual, expected in zip(chain.buffers(), plain.buffers(), strict=True):
        assert torch.equal(actual, expected)
    # Cuts are found for such a norm, too.
    chain = nn.Sequential(nn.Flatten(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    assert default_cuts(SequentialNetwork(chain, (2, 2, 2)), Layout(devices=(CPU, CPU))) == (2,)


@pytest.mark.nightly
def test_a_captured_step_takes_a_plain_scalar_too(monkeypatch):
    monkeypatch.setitem(graph.POOLS, "cpu", CpuGraphPool)
    monkeypatch.setattr(CpuGraphPool, "num_captured", 0)
    losses, predictions = [], []
    image, labels = make_batch(2)
    target = functional.one_hot(labels, 4).double()
    for graphs in (True, False):
        network = as_network(make_resnet("instance"))
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
        layout = Layout(devices=(CPU, CPU), num_micro_batches=2, captures=graphs)
        executor = parallelize(network, layout)
        for _ in range(NUM_WARM_UP_STEPS + 3):
            losses.append(executor.forward_backward(image, target, functional.mse_loss).total)
            optimizer.step()
            optimizer.zero_grad()
        predictions.append(executor.predict(image))
    assert CpuGraphPool.num_captured == 2 * (2 * 2 + 1)
    steps = len(losses) // 2
    for replayed, launched in zip(losses[:steps], losses[steps:], strict=True):
        assert_close(replayed, launched, "loss")
    assert len({loss.item() for loss in losses[:steps]}) == steps  # no loss was overwritten
    assert_close(*predictions, "logits")
