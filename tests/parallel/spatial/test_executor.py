"""A network on slabs gives the plain network's loss, gradients and logits, in float64.

The shards are threads of this process (:mod:`tests.shards`); ``test_ranks`` has processes.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.shards import ThreadMessages, run_shards
from unet3d.config import Recompute, Shape
from unet3d.errors import ConfigError, DeviceError, RankError
from unet3d.kernels import recompute
from unet3d.kernels.norm import api as norm
from unet3d.kernels.sharding import sharded
from unet3d.model import SegmentationLoss, Topology, UNet3d, dice_cross_entropy
from unet3d.parallel import Layout, parallelize, step_capture
from unet3d.parallel.spatial import division
from unet3d.parallel.spatial import executor as executors
from unet3d.parallel.spatial.executor import SpatialExecutor
from unet3d.parallel.spatial.flat_exchange import FlatExchange
from unet3d.parallel.spatial.shard import NoMessages, Swap, VolumeShard

TOLERANCE = 1e-10
CPU = torch.device("cpu")
HALVED = ((1, 1, 1), *[(2, 2, 2)] * 3)
MIXED = ((1, 1, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2))

CUBE = (3, 3, 3)
ACROSS_X = {
    "strides": ((1, 1, 1), (1, 2, 2), (1, 2, 2), (2, 1, 1)),
    "kernels": ((1, 3, 3), (1, 3, 3), CUBE, CUBE),
}
"""Strides and kernels for thick slices across the axis that is divided."""
ACROSS_Z = {
    "strides": ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 2)),
    "kernels": ((3, 3, 1), (3, 3, 1), CUBE, CUBE),
}


TRAINED_ELSEWHERE = {
    "units": (1, 3, 2, 1),
    "decoder_units": (2, 1, 3),
    "upsampling_bias": True,
    "norm_eps": 0.02,
    "negative_slope": 0.1,
}


def topology_of(**options: object) -> Topology:
    given = {"in_channels": 2, "num_classes": 3, "channels": (4, 8, 12, 12), "strides": HALVED}
    return Topology(**given | options)


def network_of(topology: Topology) -> UNet3d:
    """Return a network whose normalisations are not the identity."""
    torch.manual_seed(1)
    network = UNet3d(topology).double()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return network


def batch_of(topology: Topology, size: Shape, num_samples: int) -> tuple[Tensor, Tensor]:
    """Return images whose mean is far from zero, and targets."""
    generator = torch.Generator().manual_seed(7)
    shape = (num_samples, topology.in_channels, *size)
    image = torch.randn(shape, generator=generator, dtype=torch.float64) + 3
    target = torch.randint(0, topology.num_classes, (num_samples, *size), generator=generator)
    return image, target.to(torch.uint8)


class Case:
    """One network, one volume, and the plain network's answers."""

    def __init__(
        self,
        topology: Topology,
        size: Shape,
        num_samples: int = 1,
        loss_fn: SegmentationLoss = dice_cross_entropy,
    ) -> None:
        self.topology, self.size, self.loss_fn = topology, size, loss_fn
        self.image, self.target = batch_of(topology, size, num_samples)
        self.plain = network_of(topology)
        self.loss = loss_fn(self.plain(self.image), self.target).total
        self.loss.backward()
        with torch.no_grad():
            self.logits = self.plain.eval()(self.image)

    def run(
        self, num_shards: int, **layout: Any
    ) -> list[tuple[SpatialExecutor, Tensor, Tensor, Any]]:
        """Return executor, loss, logits and messages of each shard."""
        # Threads share the random state, so all are made here.
        networks = [network_of(self.topology) for _ in range(num_shards)]

        def work(index: int, messages: ThreadMessages) -> Any:
            network = networks[index]
            own = Layout(devices=(CPU,), num_shards=num_shards, shard=index, **layout)
            executor = SpatialExecutor(network, own, messages=messages)
            slab = executor.rule.slab(index, self.size)
            planes = slice(slab.start, slab.stop)
            loss = executor.forward_backward(
                self.image[:, :, planes],
                self.target[:, planes],
                self.loss_fn,
                planes=self.size[0],
            )
            network.eval()
            return executor, loss.total, executor.predict(self.image), messages.log

        return run_shards(num_shards, work)

    def check(self, num_shards: int, **layout: Any) -> None:
        """See that the shards have the plain network's loss, gradients and logits."""
        shards = self.run(num_shards, **layout)
        for _, loss, logits, _ in shards:
            assert abs(loss - self.loss) <= TOLERANCE * abs(self.loss)
            torch.testing.assert_close(logits, self.logits, rtol=TOLERANCE, atol=TOLERANCE)
        networks = [dict(executor.module.named_parameters()) for executor, *_ in shards]
        for name, parameter in self.plain.named_parameters():
            assert parameter.grad is not None
            mean = torch.stack([own[name].grad for own in networks]).mean(0)  # type: ignore[misc]
            error = (mean - parameter.grad).norm() / parameter.grad.norm().clamp_min(1e-8)
            assert error <= TOLERANCE, f"{name}: relative difference {error:.1e}"
        kinds = [[(kind, size) for kind, size in log if kind != "swap"] for *_, log in shards]
        assert all(log == kinds[0] for log in kinds)
        assert len({len(log) for *_, log in shards}) == 1


@pytest.fixture(autouse=True)
def divides_small_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide levels however small they are, and recompute whatever can be."""
    monkeypatch.setattr(division, "MIN_DIVIDED_ELEMENTS", 0)
    monkeypatch.setattr(recompute, "MIN_ELEMENTS", 0)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 5, 7])
def test_slabs_are_transparent(num_shards: int) -> None:
    # 5 planes at the lowest level: it is whole for 7, and 3 slabs are uneven at every level.
    Case(topology_of(), (40, 16, 8)).check(num_shards)


@pytest.mark.parametrize("recompute_mode", ["off", "norm", "level"])
@pytest.mark.parametrize("num_shards", [2, 3])
@pytest.mark.parametrize("min_elements", [0, 12 * 10 * 4 * 2, 2**40])
def test_levels_may_be_whole(
    num_shards: int,
    recompute_mode: Recompute,
    min_elements: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # All levels divided; the last whole, with slabs that do not end with its planes; all but one.
    monkeypatch.setattr(division, "MIN_DIVIDED_ELEMENTS", min_elements)
    case = Case(topology_of(), (40, 16, 8), num_samples=2)
    case.check(num_shards, recompute=recompute_mode)


@pytest.mark.parametrize("recompute_mode", ["off", "norm", "level"])
@pytest.mark.parametrize(
    "kernels",
    [ACROSS_X, ACROSS_Z, ACROSS_X | {"upsampling_bias": True}, {"upsampling_bias": True}],
    ids=["across X", "across Z", "across X with a bias", "cubes with a bias"],
)
@pytest.mark.parametrize("num_divided", [1, 2, 3])
def test_flat_kernels_are_transparent_above_whole_levels(
    num_divided: int,
    kernels: dict[str, object],
    recompute_mode: Recompute,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topology = topology_of(**kernels)
    size = (24, 16, 8)
    steps = [math.prod(sizes) for sizes in itertools.accumulate(topology.strides, _product)]
    elements = [c * math.prod(size) // step for c, step in zip((4, 8, 12, 12), steps, strict=True)]
    monkeypatch.setattr(division, "MIN_DIVIDED_ELEMENTS", elements[num_divided])
    case = Case(topology, size, num_samples=2)
    assert division.SlabRule(topology=topology, num_shards=3).divide(size).num_divided == (
        num_divided
    )
    case.check(3, recompute=recompute_mode)


def _product(first: Shape, second: Shape) -> Shape:
    x, y, z = (a * b for a, b in zip(first, second, strict=True))
    return (x, y, z)


def test_batches_are_divided() -> None:
    Case(topology_of(), (24, 16, 8), num_samples=5).check(3, num_micro_batches=3)


@pytest.mark.parametrize("deep_supervision", [False, True])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3])
def test_batch_dice_is_that_of_whole_volumes(
    num_micro_batches: int, deep_supervision: bool
) -> None:
    topology = topology_of(deep_supervision=deep_supervision)
    case = Case(topology, (24, 16, 8), 5, SegmentationLoss(joins_samples=True))
    case.check(3, num_micro_batches=num_micro_batches)


@pytest.mark.parametrize("num_shards", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"strides": MIXED},
        {"encoder": "residual", "deep_supervision": True},
        {"encoder": "residual", "channels": (4, 8), "strides": HALVED[:2]},
        {"norm": "group", "deep_supervision": True},
        {"norm": "group", "encoder": "residual"},
        ACROSS_X,
        ACROSS_X | {"encoder": "residual", "deep_supervision": True},
        ACROSS_X | {"norm": "group"},
        ACROSS_Z,
        TRAINED_ELSEWHERE,
        TRAINED_ELSEWHERE | {"encoder": "residual", "deep_supervision": True},
        TRAINED_ELSEWHERE | ACROSS_X,
        TRAINED_ELSEWHERE | ACROSS_Z,
        TRAINED_ELSEWHERE | {"strides": ((1, 1, 1), (3, 2, 2), (1, 2, 2), (2, 2, 2))},
    ],
    ids=str,
)
def test_every_network_is_transparent(num_shards: int, options: dict[str, object]) -> None:
    Case(topology_of(**options), (24, 16, 8), num_samples=2).check(num_shards)


def test_the_head_follows_whole_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    # One unit a level: upsampling from whole maps, unit and head are one block.
    monkeypatch.setattr(division, "MIN_DIVIDED_ELEMENTS", 2**40)
    case = Case(topology_of(encoder="residual", channels=(4, 8), strides=HALVED[:2]), (14, 8, 8))
    case.check(3)


def test_thresholds_between_two_slabs_change_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs of 16, 12 and 12 planes at a time, with every threshold of the kernels between them."""
    case = Case(topology_of(), (40, 16, 8))
    for channels, voxels in ((4, 14 * 16 * 8), (8, 7 * 8 * 4), (12, 3 * 4 * 2 + 6)):
        monkeypatch.setattr(recompute, "MIN_ELEMENTS", channels * voxels)
        case.check(3, recompute="norm")
        case.check(3, recompute="level")


def test_all_slabs_choose_one_version_of_a_normalisation(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_messages_are_few() -> None:
    _, _, _, log = Case(topology_of(), (40, 16, 8)).run(2)[0]
    # Of each: 13 normalisations and the image forward, in training and in prediction.
    kinds = [kind for kind, _ in log]
    num_norms = 2 * 4 + 2 * 3
    in_training = kinds[: len(kinds) - (num_norms + num_norms - 1 + 1) - 1]
    assert in_training.count("gather") == 2 * num_norms  # of moments, of sums
    # The last one feeds the head, which needs no neighbours.
    assert in_training.count("swap") == 2 * (num_norms - 1) + 1
    assert in_training.count("sum") == 1  # of the loss


def test_gradients_add_up_over_batches() -> None:
    case = Case(topology_of(), (16, 16, 8))
    networks = [network_of(case.topology) for _ in range(2)]

    def work(index: int, messages: ThreadMessages) -> list[Tensor]:
        own = Layout(devices=(CPU,), num_shards=2, shard=index)
        executor = SpatialExecutor(networks[index], own, messages=messages)
        slab = executor.rule.slab(index, case.size)
        for _ in range(2):
            executor.forward_backward(
                case.image[:, :, slab.start : slab.stop],
                case.target[:, slab.start : slab.stop],
                dice_cross_entropy,
                planes=16,
            )
        return [p.grad for p in executor.module.parameters() if p.grad is not None]

    first, second = run_shards(2, work)
    for one, two, parameter in zip(first, second, case.plain.parameters(), strict=True):
        torch.testing.assert_close((one + two) / 2, 2 * parameter.grad, rtol=1e-8, atol=1e-10)


def test_what_shards_agree_on_is_watched_before_it_is_waited_for() -> None:
    log: list[str] = []

    @contextmanager
    def watching() -> Iterator[None]:
        log.append("begin")
        yield
        log.append("end")

    class OtherAgrees:
        def swap(self, neighbours: Mapping[int, Swap]) -> None:
            raise AssertionError

        def gather(self, received: Tensor, sent: Tensor) -> None:
            raise AssertionError

        def sum(self, values: Tensor) -> None:
            log.append("sum")
            values += 1

    assert executors._all_shards(OtherAgrees(), 2, CPU, watching, True)
    assert log == ["begin", "sum", "end"]
    assert not executors._all_shards(OtherAgrees(), 2, CPU, watching, False)


def test_batch_normalisation_is_refused() -> None:
    layout = Layout(devices=(CPU,), num_shards=2)
    with pytest.raises(ConfigError, match=r"batch normalisation.*model\.norm=instance"):
        parallelize(UNet3d(topology_of(norm="batch")), layout)


def test_too_thin_a_volume_is_refused() -> None:
    layout = Layout(devices=(CPU,), num_shards=9)
    executor = parallelize(UNet3d(topology_of()), layout)
    with pytest.raises(DeviceError, match="8 planes.*at most 8"):
        executor.predict(torch.zeros(1, 2, 8, 16, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_shard_gathers_the_numbers_of_all_in_their_order(dtype: torch.dtype) -> None:
    """Such as statistics of patches that are augmented in slabs."""

    def gathered(index: int, messages: ThreadMessages) -> Tensor:
        layout = Layout(devices=(CPU,), num_shards=3, shard=index)
        executor = SpatialExecutor(UNet3d(topology_of()), layout, messages=messages)
        own = torch.tensor([[index, 0.25], [-index, 7]], dtype=dtype)
        return executor.gather(own[:, 0])  # not contiguous

    expected = torch.tensor([[0, 0], [1, -1], [2, -2]], dtype=dtype)
    for found in run_shards(3, gathered):
        assert found.dtype == dtype and torch.equal(found, expected)


@pytest.mark.parametrize("wishes", [(True, True, True), (True, False, True), (False, False, False)])
def test_a_step_is_captured_by_all_shards_or_none(wishes: tuple[bool, ...]) -> None:
    networks = [network_of(topology_of()) for _ in wishes]

    def work(index: int, messages: ThreadMessages) -> list[bool]:
        own = Layout(devices=(CPU,), num_shards=len(wishes), shard=index)
        executor = SpatialExecutor(networks[index], own, messages=messages)
        return [executor._exchange.all_agree(wishes[index])]

    assert run_shards(len(wishes), work) == [[all(wishes)]] * len(wishes)


def test_uneven_slabs_ask_alike_whether_a_step_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a run resumes with the last, smaller batch of an epoch."""
    asked: list[int] = []

    def ask(*_: object) -> bool:
        asked[-1] += 1
        return False

    monkeypatch.setattr(executors, "_all_shards", ask)
    monkeypatch.setattr(step_capture, "POOLS", {"cpu": None})
    image, target = batch_of(topology_of(), (24, 16, 8), 2)
    # Slabs of 16 and 8 planes: of two samples the first exceeds it, of one sample neither does.
    monkeypatch.setattr(executors, "MAX_CAPTURED", image[:1].numel())
    for index, planes in enumerate((slice(0, 16), slice(16, 24))):
        asked.append(0)
        layout = Layout(devices=(CPU,), num_shards=2, shard=index)
        executor = SpatialExecutor(network_of(topology_of()), layout)
        for num_samples in (1, 2, 2, 2, 2, 2, 1, 1, 1, 1):
            batch = image[:num_samples, :, planes], target[:num_samples, planes]
            executor.forward_backward(*batch, dice_cross_entropy, planes=24)
    assert asked == [1, 1]


def test_a_rank_that_is_lost_while_they_agree_is_named() -> None:
    @contextmanager
    def translated() -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankError("rank 1 is gone") from error

    def fails(wish: bool) -> bool:
        raise RuntimeError("gloo")

    exchange = FlatExchange(UNet3d(topology_of()), None, None, fails, 1)
    exchange._errors = translated  # type: ignore[assignment]
    with pytest.raises(RankError, match="rank 1 is gone"):
        exchange.all_agree(True)
