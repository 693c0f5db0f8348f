"""Skips in host memory: bit-identical gradients, with less memory on the device.

On a CPU the real code also moves skips to "host" memory, if a test allows it: the original memory
is freed, so a read at the wrong time finds nothing.
"""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from tests.kernels.comparison import padded
from tests.plain_network import gradients_of, make_batch, make_network, make_topology
from tests.products import each_value
from tests.steps import WIDE, make_step, measure
from unet3d.kernels import recompute as remake
from unet3d.kernels.maps import with_padding
from unet3d.memory.meter import MemoryMeter
from unet3d.model import UNet3d, dice_cross_entropy
from unet3d.parallel import Layout, offload, parallelize
from unet3d.parallel.executor import NetworkExecutor
from unet3d.parallel.offload import SkipOffload, skip_names
from unet3d.parallel.partition import make_stages
from unet3d.planning.memory_estimate import predict_memory

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture
def parking_cpu(monkeypatch):
    monkeypatch.setattr(offload, "is_gpu", lambda device: True)


def step(executor, num_samples=2):
    """Take a step, and return the loss and the gradients."""
    image, target = make_batch(num_samples, torch.float32)
    terms = executor.forward_backward(image, target, dice_cross_entropy)
    return terms.total, gradients_of(executor.module)


@pytest.mark.parametrize("encoder", ["plain", "residual"])
def test_skips_are_what_the_encoder_hands_to_the_decoder(encoder):
    model = UNet3d(make_topology(encoder=encoder, deep_supervision=True))
    # The decoder reads the lowest features at once, so they stay.
    assert skip_names(model.blocks()) == set(model.encoder.outputs()[:-1])


@pytest.mark.usefixtures("parking_cpu")
@each_value(
    options=[
        {},
        {"encoder": "residual", "deep_supervision": True},
        {"norm": "group", "num_levels": 2},
    ],
    stages=[
        (1, None, 1),
        (1, None, 2),
        (2, (2,), 3),
        (2, (6,), 2),
        (3, (1, 5), 3),
    ],
    remade_from=[0, 2**21],
)
def test_gradients_are_the_same_to_the_bit(options, stages, remade_from, monkeypatch):
    monkeypatch.setattr(remake, "MIN_ELEMENTS", remade_from)
    topology = make_topology(**options)
    num_devices, cuts, num_micro_batches = stages
    layout = Layout(
        devices=(CPU,) * num_devices,
        cuts=cuts,
        num_micro_batches=num_micro_batches,
    )
    (loss, gradients), (expected_loss, expected) = (
        step(parallelize(make_network(topology).float(), one), num_samples=3)
        for one in (replace(layout, offload="skips"), layout)
    )
    assert torch.equal(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    assert [name for name in gradients if not torch.equal(gradients[name], expected[name])] == []


class Sizes(MemoryMeter):
    """Records sizes of memory that is freed and allocated again."""

    def __init__(self, executor):
        super().__init__(executor.slots, executor.module)
        self.seen: dict[int, list[int]] = {}
        executor.observer = self
        self.start()

    def resized(self, tensor):
        super().resized(tensor)
        sizes = self.seen.setdefault(tensor.numel(), [])
        sizes.append(tensor.untyped_storage().nbytes())


@pytest.mark.usefixtures("parking_cpu")
def test_a_skip_is_parked_with_the_zeros_around_it():
    model = UNet3d(make_topology(num_levels=2))
    (stage,) = make_stages(model.blocks(), (CPU,), (), model.outputs())
    blocks = {block.name: block for block in stage.blocks}
    parking = SkipOffload(stage, skip_names(stage.blocks), lambda tensor: None)
    skip = padded(torch.randn(1, 4, 6, 6, 6))
    expected = with_padding(skip).clone()
    read = torch.ones(1, requires_grad=True) * 2
    parking.after(blocks["encoder.0.1"], skip)
    parking.after(blocks["decoder.0.skip"], read)
    parking.after(blocks["encoder.1.0"], read)
    assert skip.untyped_storage().nbytes() == 0
    read.backward()
    assert torch.equal(with_padding(skip), expected)


@pytest.mark.usefixtures("parking_cpu")
@pytest.mark.parametrize("remade_from", [0, 2**21], ids=["remade", "kept"])
def test_a_skip_goes_and_comes_back_once(remade_from, monkeypatch):
    """Or, if it is recomputed in backward, its source does."""
    monkeypatch.setattr(remake, "MIN_ELEMENTS", remade_from)
    executor = parallelize(UNet3d(make_topology()), Layout(devices=(CPU,), offload="skips"))
    sizes = Sizes(executor)
    step(executor, num_samples=1)
    assert sizes.seen == {size: [0, 4 * size] for size in (4 * 16 * 16 * 8, 8 * 8 * 8 * 8)}


@pytest.mark.parametrize("recompute", ["norm", "level"])
def test_a_cpu_parks_nothing_nor_does_what_runs_again(recompute, monkeypatch):
    if recompute == "level":
        monkeypatch.setattr(offload, "is_gpu", lambda device: True)
    layout = Layout(devices=(CPU,), offload="skips", recompute=recompute)
    executor = parallelize(UNet3d(make_topology()), layout)
    sizes = Sizes(executor)
    step(executor)
    assert sizes.seen == {}


@pytest.mark.usefixtures("parking_cpu")
def test_nor_is_what_a_skip_is_made_from_if_that_is_made_again():
    """Such as the first convolution's result on a GPU: no backward function would read it."""
    planned = make_step((GPU,), (128, 128, 128), precision="bfloat16", model=WIDE, offload="skips")
    planned = replace(planned, topology=replace(planned.topology, units=(1, 2, 2)))
    there = replace(planned, layout=replace(planned.layout, offload="none"))
    (own,), (all_there,) = (predict_memory(one).memory.values() for one in (planned, there))
    assert own.peak_bytes < all_there.peak_bytes


@pytest.mark.usefixtures("parking_cpu")
def test_skips_are_away_while_the_decoder_works_at_full_resolution():
    executor = parallelize(UNet3d(make_topology()), Layout(devices=(CPU,), offload="skips"))
    assert isinstance(executor, NetworkExecutor)
    order: list[str] = []

    class Noted(Sizes):
        def resized(self, tensor):
            super().resized(tensor)
            is_here = tensor.untyped_storage().nbytes() > 0
            order.append(f"{'in' if is_here else 'out'} {tensor.numel()}")

    Noted(executor)
    blocks = {block.name: block.module for block in executor.stages[0].blocks}
    for name in ("decoder.1.1", "decoder.0.0", "decoder.0.skip", "encoder.0.1"):
        blocks[name].register_forward_hook(lambda *_, name=name: order.append(name))
        weight = next(iter(blocks[name].parameters()))
        weight.register_post_accumulate_grad_hook(lambda _, name=name: order.append(f"back {name}"))
    step(executor, num_samples=1)
    forward = ["encoder.0.1", "decoder.0.skip", "out 8192", "out 4096"]
    top = ["decoder.1.1", "decoder.0.0", "back decoder.0.0", "back decoder.1.1"]
    # The skip that backward needs first comes first.
    backward = ["in 4096", "in 8192", "back decoder.0.skip", "back encoder.0.1"]
    assert order == forward + top + backward


@pytest.mark.usefixtures("parking_cpu")
def test_nothing_of_a_parked_skip_is_left_behind(monkeypatch):
    monkeypatch.setattr(remake, "MIN_ELEMENTS", 0)
    layout = Layout(devices=(CPU, CPU), cuts=None, num_micro_batches=2, offload="skips")
    executor = parallelize(UNet3d(make_topology()), layout)
    made: list[str] = []
    deleted: list[str] = []

    class Counted(offload.HostCopy):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append("one")

        def __del__(self):
            deleted.append("one")

    monkeypatch.setattr(offload, "HostCopy", Counted)
    step(executor)
    assert len(made) == 2 * 2  # two skips of two micro-batches
    assert deleted == made


@pytest.mark.usefixtures("parking_cpu")
@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.nightly
def test_the_prediction_counts_it_to_the_byte(num_devices, monkeypatch):
    monkeypatch.setattr(remake, "MIN_ELEMENTS", 0)
    predicted = []
    for choice in ("none", "skips"):
        layout = {"cuts": None, "num_micro_batches": num_devices, "offload": choice}
        planned = make_step((CPU,) * num_devices, **layout)
        predicted.append(predict_memory(planned).memory)
        assert predicted[-1] == measure(planned)
    assert predicted[1][0].activations_bytes < predicted[0][0].activations_bytes


class Poison(MemoryMeter):
    """Fills memory with NaN when it is freed, and when it was just allocated again."""

    def __init__(self, executor, cycles):
        super().__init__(executor.slots, executor.module)
        self.cycles = cycles
        self.num_poisoned = 0
        executor.observer = self

    def during(self, slot, kind, micro_batch):
        torch.cuda._sleep(self.cycles)
        return super().during(slot, kind, micro_batch)

    def resized(self, tensor):
        super().resized(tensor)
        torch.cuda._sleep(self.cycles)
        if tensor.untyped_storage().nbytes() > 0:
            tensor.fill_(torch.nan)
        else:  # the allocator returns the memory that was freed last
            for _ in range(2):
                torch.full(tensor.shape, torch.nan, dtype=tensor.dtype, device=tensor.device)
            self.num_poisoned += 1


@pytest.mark.gpu
@pytest.mark.parametrize(("num_slots", "num_micro_batches"), [(1, 1), (1, 2), (2, 3)])
def test_no_memory_is_reused_or_read_too_early(num_slots, num_micro_batches, monkeypatch):
    monkeypatch.setattr(remake, "MIN_ELEMENTS", 0)
    found = []
    for parks in ("none", "skips"):
        torch.manual_seed(0)
        model = UNet3d(make_topology()).double()
        more = {"num_micro_batches": num_micro_batches, "offload": parks}
        layout = Layout(devices=(GPU,) * num_slots, cuts=None, **more)
        executor = parallelize(model, layout)
        poison = Poison(executor, 20_000_000)
        for _ in range(2):  # the second time reuses pinned memory
            model.zero_grad()
            image, target = make_batch(3)
            terms = executor.forward_backward(
                image.double().to(GPU), target.to(GPU), dice_cross_entropy
            )
        gradients = gradients_of(model).values()
        found.append(torch.cat([terms.total.view(1), *(g.flatten() for g in gradients)]))
    assert poison.num_poisoned >= 2 * num_micro_batches
    assert torch.isfinite(found[1]).all()
    difference = (found[1] - found[0]).norm() / found[0].norm()
    assert difference < 1e-10


def test_an_executor_is_gone_when_nobody_has_it():
    """Its process groups go with it, which must be closed before the garbage collector runs."""
    executor = parallelize(make_network(make_topology()), Layout(devices=(CPU,), offload="skips"))
    gone = weakref.ref(executor)
    gc.disable()
    try:
        del executor
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("parking_cpu")
def test_a_pass_that_fails_keeps_no_skip(monkeypatch):
    held = []

    class Watched(offload.HostCopy):
        def __init__(self, *given):
            super().__init__(*given)
            held.append(weakref.ref(self))

    monkeypatch.setattr(offload, "HostCopy", Watched)
    executor = parallelize(make_network(make_topology()), Layout(devices=(CPU,), offload="skips"))
    (lowest, *_) = [one for one in executor.module.blocks() if one.path == "decoder"]

    def fails(*_):
        raise KeyboardInterrupt

    lowest.module.register_forward_pre_hook(fails)
    with pytest.raises(KeyboardInterrupt):
        executor.forward_backward(*make_batch(1), dice_cross_entropy)
    assert held and all(one() is None for one in held)
