"""A network on slabs gives the plain network's loss, gradients and logits, in float64.

Shards are threads of this process here (:mod:`tests.shards`), and processes in ``test_replicas``.
"""

import functools
import math
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests import plain_network
from tests.plain_network import assert_close, gradients_of
from tests.products import by_night, each_value
from tests.shards import run_shards
from unet3d.errors import ConfigError, DeviceError, RankError
from unet3d.kernels import recompute
from unet3d.kernels.conv.hopper import api as hopper
from unet3d.kernels.conv.hopper import op
from unet3d.kernels.norm import volume as norm
from unet3d.kernels.sharding import sharded
from unet3d.model import SegmentationLoss, Topology, UNet3d, dice_cross_entropy, layers
from unet3d.parallel import Layout, graph, parallelize, step
from unet3d.parallel.exchange import FlatExchange
from unet3d.parallel.spatial import division
from unet3d.parallel.spatial import executor as executors
from unet3d.parallel.spatial.executor import SpatialExecutor
from unet3d.parallel.spatial.shard import NoMessages, VolumeShard

TOLERANCE = 1e-10
CPU = torch.device("cpu")
HALVED = ((1, 1, 1), *[(2, 2, 2)] * 3)
SHALLOW = {"channels": (4, 8), "strides": HALVED[:2]}
MIXED = ((1, 1, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2))

CUBE = (3, 3, 3)
ACROSS_X = {
    "strides": ((1, 1, 1), (1, 2, 2), (1, 2, 2), (2, 1, 1)),
    "kernels": ((1, 3, 3), (1, 3, 3), CUBE, CUBE),
}
"""Strides and kernels for slices that are thick along the axis that is divided."""
ACROSS_Z = {
    "strides": ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 2)),
    "kernels": ((3, 3, 1), (3, 3, 1), CUBE, CUBE),
}


TRAINED_ELSEWHERE = plain_network.TRAINED_ELSEWHERE | {
    "units": (1, 3, 2, 1),
    "decoder_units": (2, 1, 3),
}


def topology_of(**options):
    given = {"in_channels": 2, "num_classes": 3, "channels": (4, 8, 12, 12), "strides": HALVED}
    return Topology(**given | options)


def network_of(topology):
    """Return a network whose normalisations are not the identity."""
    torch.manual_seed(1)
    network = UNet3d(topology).double()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return network


def batch_of(topology, size, num_samples):
    """Return images whose mean is far from zero, and targets."""
    generator = torch.Generator().manual_seed(7)
    shape = (num_samples, topology.in_channels, *size)
    image = torch.randn(shape, generator=generator, dtype=torch.float64) + 3
    target = torch.randint(0, topology.num_classes, (num_samples, *size), generator=generator)
    return image, target.to(torch.uint8)


class Case:
    """One network, one volume, and the plain network's results."""

    def __init__(self, topology, size, num_samples=1, loss_fn=dice_cross_entropy):
        self.topology, self.size, self.loss_fn = topology, size, loss_fn
        self.image, self.target = batch_of(topology, size, num_samples)
        self.plain = network_of(topology)
        self.loss = loss_fn(self.plain(self.image), self.target).total
        self.loss.backward()
        with torch.no_grad():
            self.logits = self.plain.eval()(self.image)

    def run(self, num_shards, num_steps=1, **layout):
        """Return executor, loss, logits and messages of each shard."""
        # Threads share the random state, so all networks are made here.
        networks = [network_of(self.topology) for _ in range(num_shards)]

        def work(index, messages):
            network = networks[index]
            own = Layout(devices=(CPU,), num_shards=num_shards, shard=index, **layout)
            executor = SpatialExecutor(network, own, messages=messages)
            slab = executor.rule.slab(index, self.size)
            planes = slice(slab.start, slab.stop)
            batch = self.image[:, :, planes], self.target[:, planes]
            for _ in range(num_steps):
                loss = executor.forward_backward(*batch, self.loss_fn, planes=self.size[0])
            network.eval()
            return executor, loss.total, executor.predict(self.image), messages.log

        return run_shards(num_shards, work)

    def check(self, num_shards, **layout):
        """Check that the shards have the plain network's loss, gradients and logits."""
        shards = self.run(num_shards, **layout)
        for _, loss, logits, _ in shards:
            assert abs(loss - self.loss) <= TOLERANCE * abs(self.loss)
            torch.testing.assert_close(logits, self.logits, rtol=TOLERANCE, atol=TOLERANCE)
        found = [gradients_of(executor.module) for executor, *_ in shards]
        for name, gradient in gradients_of(self.plain).items():
            assert_close(torch.stack([own[name] for own in found]).mean(0), gradient, name)
        kinds = [[(kind, size) for kind, size in log if kind != "swap"] for *_, log in shards]
        assert all(log == kinds[0] for log in kinds)
        assert len({len(log) for *_, log in shards}) == 1


@functools.cache
def cubes():
    """Return a case with 3x3x3 kernels; tests must not change it."""
    return Case(topology_of(), (40, 16, 8))


@pytest.fixture(autouse=True)
def divides_small_maps(monkeypatch):
    """Divide levels of any size, and recompute everything that can be recomputed."""
    monkeypatch.setattr(division, "MIN_DIVIDED_ELEMENTS", 0)
    monkeypatch.setattr(recompute, "MIN_ELEMENTS", 0)


@pytest.mark.parametrize("num_shards", [3, 7, *by_night(1, 5)])
def test_slabs_are_transparent(num_shards):
    # With 5 planes at the lowest level it is whole for 7 slabs; 3 slabs are uneven at every level.
    cubes().check(num_shards)


@each_value(
    kernels=[{}, ACROSS_X | {"upsampling_bias": True}, ACROSS_Z, {"upsampling_bias": True}],
    num_divided=[1, 2, 3, 4],
    recompute_mode=["off", "norm", "level"],
    num_shards=[2, 3],
)
def test_levels_may_be_whole(kernels, num_divided, recompute_mode, num_shards, monkeypatch):
    """With 40 planes, ends of slabs do not fall between planes of whole levels."""
    topology, size = topology_of(**kernels), (40, 16, 8)
    steps = np.prod(np.cumprod(topology.strides, axis=0), axis=1)
    elements = [
        c * math.prod(size) // int(n) for c, n in zip(topology.channels, steps, strict=True)
    ]
    smallest = 0 if num_divided == 4 else elements[num_divided]
    monkeypatch.setattr(division, "MIN_DIVIDED_ELEMENTS", smallest)
    rule = division.SlabRule(topology=topology, num_shards=num_shards)
    assert rule.divide(size).num_divided == num_divided
    Case(topology, size, num_samples=2).check(num_shards, recompute=recompute_mode)


@pytest.mark.parametrize(
    ("joins_samples", "deep_supervision", "num_micro_batches"),
    [(False, False, 3), (True, True, 2), *by_night((True, False, 1), (True, False, 3))],
)
def test_batches_are_divided_and_batch_dice_is_that_of_whole_volumes(
    joins_samples, deep_supervision, num_micro_batches
):
    topology = topology_of(deep_supervision=deep_supervision)
    case = Case(topology, (24, 16, 8), 5, SegmentationLoss(joins_samples=joins_samples))
    case.check(3, num_micro_batches=num_micro_batches)


@pytest.mark.parametrize(
    "options",
    [
        {"encoder": "residual", "deep_supervision": True},
        ACROSS_X | {"encoder": "residual", "deep_supervision": True},
        TRAINED_ELSEWHERE | {"strides": ((1, 1, 1), (3, 2, 2), (1, 2, 2), (2, 2, 2))},
        *by_night(
            {"encoder": "residual", **SHALLOW},
            TRAINED_ELSEWHERE,
            TRAINED_ELSEWHERE | {"encoder": "residual", "deep_supervision": True},
            TRAINED_ELSEWHERE | ACROSS_Z,
            {"strides": MIXED},
            {"norm": "group", "deep_supervision": True},
            TRAINED_ELSEWHERE | ACROSS_X,
        ),
    ],
    ids=str,
)
def test_every_network_is_transparent(options):
    Case(topology_of(**options), (24, 16, 8), num_samples=2).check(3)


def test_the_head_follows_whole_levels(monkeypatch):
    # With one unit per level, upsampling from whole maps, unit and head are one block.
    monkeypatch.setattr(division, "MIN_DIVIDED_ELEMENTS", 2**40)
    Case(topology_of(encoder="residual", **SHALLOW), (14, 8, 8)).check(3)


@each_value(options=[{}, {"encoder": "residual"}], smallest=[0, 12 * 40 * 4 * 2])
def test_hand_written_convolutions_are_transparent(options, smallest, monkeypatch):
    """Slabs exchange planes before normalisation, which the reader does, and add skips."""
    monkeypatch.setattr(division, "MIN_DIVIDED_ELEMENTS", smallest)
    case = Case(topology_of(**options), (40, 16, 8), num_samples=2)
    monkeypatch.setattr(hopper, "suits", lambda x, inputs, outputs: True)
    monkeypatch.setattr(layers, "CHANNELS_BY_HAND", case.plain.topology.channels)
    monkeypatch.setattr(step, "convolves_by_hand", lambda device, lowered: True)
    halos, convolve, sums, add = [], op.convolve, [], op.add_convolution

    def convolving(x, kernel, *given, **sides):
        halos.append([plane is not None for plane in given[4:]])
        return convolve(x, kernel, *given, **sides)

    def adding(y, *given, **sides):
        sums.append(y.shape)
        return add(y, *given, **sides)

    monkeypatch.setattr(op, "convolve", convolving)
    monkeypatch.setattr(op, "add_convolution", adding)
    seen, merge = [], norm.reference.merge

    def watched(moments, *numbers):
        seen.append(moments.shape[1])
        return merge(moments, *numbers)

    monkeypatch.setattr(norm.reference, "merge", watched)
    case.check(3, recompute="norm")
    assert 4 in seen  # from a convolution
    assert all(one in halos for one in ([False, True], [True, True], [True, False]))
    assert sums


@pytest.mark.parametrize(
    "threshold", [4 * 14 * 16 * 8, *by_night(8 * 7 * 8 * 4, 12 * (3 * 4 * 2 + 6))]
)
def test_thresholds_between_two_slabs_change_no_message(threshold, monkeypatch):
    """Slabs of 16, 12 and 12 planes, with each threshold of the kernels between their sizes."""
    monkeypatch.setattr(recompute, "MIN_ELEMENTS", threshold)
    cubes().check(3, recompute="norm")
    cubes().check(3, recompute="level")


def test_all_slabs_choose_one_version_of_a_normalisation(monkeypatch):
    monkeypatch.setattr(norm, "triton_available", lambda x: True)
    monkeypatch.setattr(norm, "MIN_ELEMENTS", 4 * 14 * 16 * 8)
    uneven = division.divide(40, 3, (1, 2, 4), 3)
    chosen = []
    for index in range(3):
        x = torch.empty(1, 4, len(uneven.slab(index)), 16, 8)
        with sharded(VolumeShard(index, uneven, NoMessages())):
            chosen.append(norm.stages_for(x))
    assert chosen == [norm.op] * 3
    assert norm.stages_for(torch.empty(1, 4, 12, 16, 8)) is norm.reference


def test_gradients_add_up_over_batches():
    case = Case(topology_of(), (16, 16, 8))
    shards = case.run(2, num_steps=2)
    first, second = (gradients_of(executor.module) for executor, *_ in shards)
    for name, gradient in gradients_of(case.plain).items():
        mean = (first[name] + second[name]) / 2
        torch.testing.assert_close(mean, 2 * gradient, rtol=1e-8, atol=1e-10)


def test_what_cannot_be_divided_is_refused():
    layout = Layout(devices=(CPU,), num_shards=9)
    with pytest.raises(ConfigError, match=r"batch normalisation.*model\.norm=instance"):
        parallelize(UNet3d(topology_of(norm="batch")), layout)
    executor = parallelize(UNet3d(topology_of()), layout)
    with pytest.raises(DeviceError, match="8 planes.*at most 8"):
        executor.predict(torch.zeros(1, 2, 8, 16, 16))


def test_each_shard_gathers_the_numbers_of_all_in_their_order():
    """Such as statistics of patches that are augmented in slabs."""

    def gathered(index, messages):
        layout = Layout(devices=(CPU,), num_shards=3, shard=index)
        executor = SpatialExecutor(UNet3d(topology_of()), layout, messages=messages)
        own = torch.tensor([[index, 0.25], [-index, 7]])
        return [executor.gather(own[:, 0].to(dtype)) for dtype in dtypes]  # not contiguous

    dtypes = (torch.float32, torch.float64)
    for results in run_shards(3, gathered):
        for found, dtype in zip(results, dtypes, strict=True):
            expected = torch.tensor([[0, 0], [1, -1], [2, -2]], dtype=dtype)
            assert found.dtype == dtype and torch.equal(found, expected)


@pytest.mark.parametrize("fitting", [{0, 1, 2}, {0, 2}, set()], ids=str)
def test_a_step_is_captured_by_all_shards_or_none(fitting, monkeypatch):
    """If the graphs of one shard do not fit into its memory, all shards launch their steps."""
    shards: dict[int, int] = {}

    class Captured:
        gradients = ()
        averages = True

        def __init__(self, *_):
            if shards[threading.get_ident()] not in fitting:
                raise torch.OutOfMemoryError("no room")

        def replay(self, *_):
            return "replayed"

    monkeypatch.setattr(step, "CapturedDeviceStep", Captured)
    monkeypatch.setattr(graph, "POOLS", {"cpu": None})
    topology = topology_of(**SHALLOW)
    networks = [network_of(topology) for _ in range(3)]
    image, target = batch_of(topology, (24, 8, 8), 1)

    def work(index, messages):
        shards[threading.get_ident()] = index
        own = Layout(devices=(CPU,), num_shards=3, shard=index)
        executor = SpatialExecutor(networks[index], own, messages=messages)
        planes = slice(8 * index, 8 * index + 8)
        batch = image[:, :, planes], target[:, planes], dice_cross_entropy
        steps = [executor.forward_backward(*batch, planes=24) for _ in range(5)]
        return [step == "replayed" for step in steps]

    replays = [False] * 3 + [len(fitting) == 3] * 2
    assert run_shards(3, work) == [replays] * 3


class Alone:
    """Messages of a shard whose neighbours send zeros, and never ask for anything."""

    def __init__(self):
        self.num_asked = 0

    def swap(self, neighbours):
        for swap in neighbours.values():
            swap.received.zero_()

    def gather(self, received, sent):
        received.copy_(sent.flatten().repeat(received.numel() // sent.numel()).view_as(received))

    def sum(self, values):
        self.num_asked += values.numel() == 1


@pytest.mark.nightly
def test_uneven_slabs_ask_alike_whether_a_step_is_captured(monkeypatch):
    """Also if a run resumes at the smaller last batch of an epoch."""
    monkeypatch.setattr(graph, "POOLS", {"cpu": None})
    topology = topology_of()
    image, target = batch_of(topology, (24, 8, 8), 2)
    # Slabs of 16 and 8 planes: with two samples the first is above the limit, with one sample
    # neither is.
    monkeypatch.setattr(executors, "MAX_CAPTURED", image[:1].numel())
    for index, planes in enumerate((slice(0, 16), slice(16, 24))):
        messages = Alone()
        layout = Layout(devices=(CPU,), num_shards=2, shard=index)
        executor = SpatialExecutor(network_of(topology), layout, messages=messages)
        for num_samples in (1, 2, 2, 2, 2, 2, 1, 1, 1, 1):
            batch = image[:num_samples, :, planes], target[:num_samples, planes]
            executor.forward_backward(*batch, dice_cross_entropy, planes=24)
        assert messages.num_asked == 1


def test_what_shards_agree_on_is_watched_and_a_rank_that_is_lost_meanwhile_is_named():
    log: list[str] = []

    @contextmanager
    def watching():
        log.append("begin")
        yield
        log.append("end")

    @contextmanager
    def translated():
        try:
            yield
        except RuntimeError as error:
            raise RankError("rank 1 is gone") from error

    class OtherAgrees(Alone):
        def sum(self, values):
            log.append("sum")
            values += 1

    # Passed by hand, because a real group only shows that it watches when a rank hangs.
    nothing: Any = SimpleNamespace(blocks=(), slot=SimpleNamespace(device=CPU))
    exchange = FlatExchange((nothing,), None, 2, OtherAgrees())
    exchange.watching, exchange.errors = watching, translated
    assert exchange.all_agree(True) and not exchange.all_agree(False)
    assert log == ["begin", "sum", "end"] * 2

    def fails(values):
        raise RuntimeError("gloo")

    exchange.messages.sum = fails
    with pytest.raises(RankError, match="rank 1 is gone"):
        exchange.all_agree(True)
