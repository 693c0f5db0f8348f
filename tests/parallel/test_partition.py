import itertools
import math
import random

import pytest
import torch
from torch import nn

from tests.plain_network import make_topology
from unet3d.config import ModelSettings
from unet3d.errors import DeviceError
from unet3d.model import Block, UNet3d, plan_topology
from unet3d.parallel import Layout, parallelize
from unet3d.parallel.partition import balanced_cuts, block_flops, default_cuts, make_stages

CPU = torch.device("cpu")


def make_model(**options):
    return UNet3d(make_topology(**options))


def dearest(costs, cuts):
    return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))


def test_balanced_cuts_are_as_good_as_the_best_of_all():
    generator = random.Random(0)
    for num_blocks in [*range(2, 10)] * 3:
        costs = [generator.choice([0, 1, 1, 5, 40]) for _ in range(num_blocks)]
        for num_stages in range(1, num_blocks + 1):
            cuts = balanced_cuts(costs, num_stages)
            assert len(cuts) == num_stages - 1
            assert all(a < b for a, b in itertools.pairwise((0, *cuts, num_blocks)))
            choices = itertools.combinations(range(1, num_blocks), num_stages - 1)
            assert dearest(costs, cuts) == min(dearest(costs, choice) for choice in choices)


def on(num_stages, kind="cpu", autocast=None):
    indices = range(num_stages) if kind == "cuda" else [None] * num_stages
    devices = tuple(torch.device(kind, index) for index in indices)
    return Layout(devices=devices, autocast=autocast)


def test_the_default_is_encoder_and_decoder_and_for_more_balances_multiplications():
    model = make_model()
    (cut,) = default_cuts(model, on(2))
    starts = [block.name.startswith("encoder.") for block in model.blocks()]
    assert starts == [index < cut for index in range(len(starts))]
    assert default_cuts(model, on(1)) == ()
    costs = block_flops(model, torch.empty(1, 2, 16, 16, 16, device="meta"))
    assert default_cuts(model, on(4)) == balanced_cuts(costs, 4)


def test_more_stages_than_blocks_are_refused():
    model = make_model()
    num_blocks = len(model.blocks())
    assert len(default_cuts(model, on(num_blocks))) == num_blocks - 1
    with pytest.raises(DeviceError, match=rf"{num_blocks + 1} devices are more than the .* blocks"):
        parallelize(model, Layout(devices=(CPU,) * (num_blocks + 1)))


@pytest.mark.parametrize(
    ("num_devices", "cuts"),
    [(2, ()), (1, (3,)), (2, (3, 5)), (3, (5, 3)), (3, (3, 3)), (2, (0,)), (2, (12,)), (2, (-1,))],
)
def test_cuts_that_do_not_fit_are_refused(num_devices, cuts):
    model = make_model()
    assert len(model.blocks()) == 12
    with pytest.raises(DeviceError, match="do not divide 12 blocks over") as caught:
        parallelize(model, Layout(devices=(CPU,) * num_devices, cuts=cuts))
    assert "\n" not in str(caught.value)


def test_stages_say_what_they_read_and_what_is_read_of_them():
    names = {
        "a": ("image",),
        "b": ("a",),
        "c": ("b", "image"),
        "d": ("c", "a"),
        "e": ("d", "c"),
    }
    blocks = [
        Block(name=name, module=nn.Identity(), inputs=inputs) for name, inputs in names.items()
    ]
    devices = [CPU, torch.device("meta"), CPU]
    stages = make_stages(blocks, devices, [2, 4], ["e", "b"])
    assert [stage.inputs for stage in stages] == [("image",), ("b", "image", "a"), ("d", "c")]
    assert [stage.outputs for stage in stages] == [("a", "b"), ("c", "d"), ("e",)]
    assert [stage.slot.blocks for stage in stages] == [("a", "b"), ("c", "d"), ("e",)]
    assert [stage.slot.index for stage in stages] == [0, 1, 2]
    assert [stage.slot.device for stage in stages] == devices


def multiplications(topology, size, composes):
    """Return the multiplications of each block's convolutions, computed by hand."""
    channels, classes, counts = topology.channels, topology.num_classes, {}
    voxels = [math.prod(size) // 8**level for level in range(len(channels))]
    for level, width in enumerate(channels):
        before = channels[level - 1] if level else topology.in_channels
        counts[f"encoder.{level}.0"] = 27 * before * width * voxels[level]
        counts[f"encoder.{level}.1"] = 27 * width * width * voxels[level]
    for level, width in enumerate(channels[:-1]):
        below, num_below = channels[level + 1], voxels[level + 1]
        counts[f"decoder.{level}.skip"] = 27 * width * width * voxels[level]
        if level in composes:  # a coarse voxel reaches 4^3 voxels; composing counts
            made = 64 * 27 * below * width * width
            counts[f"decoder.{level}.0"] = 64 * below * width * num_below + made
        else:
            up = 8 * below * width * num_below
            counts[f"decoder.{level}.0"] = up + 27 * width * width * voxels[level]
        last = 27 * width * width * voxels[level]
        counts[f"decoder.{level}.1" if level else "head"] = last
    counts["head"] += channels[0] * classes * voxels[0]
    return counts


@pytest.mark.parametrize(
    ("kind", "autocast", "composes"),
    [
        ("cuda", torch.bfloat16, {0, 1}),
        ("cuda", torch.float16, {0, 1}),
        ("cuda", None, set()),
        ("cpu", torch.bfloat16, set()),
    ],
)
def test_stages_share_the_multiplications_that_their_devices_do(kind, autocast, composes):
    """On GPUs upsampling and convolution are one, with 64 taps instead of 8 times 27."""
    settings = ModelSettings(channels=(32, 64, 128, 256, 320, 320), deep_supervision=False)
    topology = plan_topology(settings, (128, 128, 128), (1.0, 1.0, 1.0), 1, 3)
    with torch.device("meta"):
        model = UNet3d(topology)
    counts = multiplications(topology, (128, 128, 128), composes)
    costs = [counts[block.name] for block in model.blocks()]
    lowered = autocast if kind == "cuda" else None
    assert list(block_flops(model, model.example_input(), lowered)) == [2 * one for one in costs]
    cuts = default_cuts(model, on(3, kind, autocast))
    choices = itertools.combinations(range(1, len(costs)), 2)
    assert dearest(costs, cuts) == min(dearest(costs, choice) for choice in choices)


@pytest.mark.nightly
def test_the_flops_are_those_of_the_convolutions_and_nothing_is_computed():
    model = make_model(norm="batch")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names = [block.name for block in model.blocks()]
    counted = block_flops(model, torch.empty(1, 2, 16, 8, 8, device="meta"))
    flops = dict(zip(names, counted, strict=True))
    voxels = 16 * 8 * 8
    assert flops["encoder.0.0"] == 2 * 27 * 2 * 4 * voxels
    assert flops["encoder.0.1"] == 2 * 27 * 4 * 4 * voxels
    assert flops["encoder.1.0"] == 2 * 27 * 4 * 8 * voxels // 4
    assert flops["decoder.0.skip"] == 2 * 27 * 4 * 4 * voxels
    assert flops["decoder.0.0"] == 2 * 4 * 8 * 4 * voxels // 4 + 2 * 27 * 4 * 4 * voxels
    assert flops["head"] == 2 * 27 * 4 * 4 * voxels + 2 * 4 * 3 * voxels
    # More devices than any machine could have.
    block_flops(model, torch.empty(1, 2, 4096, 4096, 4096, device="meta"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
