"""The memory of each device in a training run, predicted before it starts.

The step that is counted is the real one: the real network, executor and optimizer, on fake tensors
(see :mod:`unet3d.memory.allocations`). So there is no table of constants to maintain.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unet3d.config import Shape, TrainingSettings
from unet3d.memory.allocations import (
    UNCOUNTED_BYTES,
    WORKSPACE_BYTES,
    AllocationRecorder,
    counted_allocations,
    make_parameters_fake,
)
from unet3d.memory.fake_devices import fake_device, is_fake_device
from unet3d.memory.meter import MemoryMeter, SlotMemory
from unet3d.model import Regions, SegmentationLoss, Topology, UNet3d
from unet3d.model.optimizer import Optimization
from unet3d.parallel import Executor, Layout, Slot, parallelize
from unet3d.parallel.partition import default_cuts
from unet3d.parallel.precision import image_dtype, to_parameter_dtype
from unet3d.parallel.spatial.division import SlabRule
from unet3d.patches.augment.device import DeviceAugmentation

GIB = 1024**3

MESSAGE_BYTES = 512 * 1024**2
"""Memory that NCCL may take on a GPU for messages between shards, in addition to tensors. An upper
bound, not measured: buffers of 4 MiB for each of up to 32 channels and few peers of one host."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A training step: everything that its memory depends on.

    If a patch has too few planes for the slabs, methods that need its slabs raise DeviceError.
    """

    topology: Topology
    layout: Layout
    """Devices (which need not exist), cuts, micro-batches and autocast."""
    size: Shape
    """Voxels of a whole patch along X, Y, Z, also with shards; multiples of the total stride."""
    batch_size: int
    settings: TrainingSettings
    """The optimizer and the loss."""
    precision: str
    """A resolved precision, such as ``bfloat16``; never ``auto``."""
    augmentation: DeviceAugmentation | None = None
    """Makes the batches on the first GPU; None: the host makes them."""
    regions: Regions = ()
    """Regions segmented instead of classes, as :attr:`SegmentationLoss.regions`."""

    @property
    def loss(self) -> SegmentationLoss:
        """Return the loss."""
        return SegmentationLoss.of(self.settings, self.regions)

    @property
    def own_size(self) -> Shape:
        """Voxels along X, Y, Z on the device: of a shard's slab, or of the whole patch."""
        slab = self._slab()
        return self.size if slab is None else (len(slab), *self.size[1:])

    def shards(self) -> tuple["Step", ...]:
        """Return the step of each shard of a replica; all have one kind of device."""
        self._slabs().divide(self.size)
        return tuple(
            replace(self, layout=replace(self.layout, shard=shard))
            for shard in range(self.layout.num_shards)
        )

    def fullest(self) -> "Step":
        """Return the step of the shard that needs the most memory, or nearly the most.

        It has one of the largest slabs and, if possible, neighbours on both sides. A shard at an
        end of the volume needs at most 0.5 % more memory, and with thin slabs 5 % less.
        """
        return max(self.shards(), key=lambda shard: shard.kind)

    @property
    def kind(self) -> tuple[int, int]:
        """The planes and the number of neighbours of a shard, which determine its memory."""
        layout = self.layout
        return self.own_size[0], (layout.shard > 0) + (layout.shard < layout.num_shards - 1)

    def most_shards(self) -> int:
        """Return how many shards the patch has planes for."""
        return self._slabs().most_shards(self.size)

    def _slabs(self) -> SlabRule:
        return SlabRule(topology=self.topology, num_shards=self.layout.num_shards)

    def _slab(self) -> range | None:
        """Return the planes of this step's shard; None: the volume is not divided."""
        layout = self.layout
        return self._slabs().slab(layout.shard, self.size) if layout.num_shards > 1 else None

    def staging_bytes(self) -> int:
        """Return the bytes that a GPU needs to make patches during the step."""
        if self.augmentation is None:
            return 0
        return self.augmentation.staging_bytes(self.size, self.batch_size, self._slab())


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """The memory that a training step takes."""

    step: Step
    slots: tuple[Slot, ...]
    """The slots, with the device and the blocks of each."""
    memory: dict[int, SlotMemory]
    """Memory by slot index. The peak of a slot on a GPU is the peak of the whole GPU, as its
    allocator would measure it."""

    def needed_bytes(self) -> dict[torch.device, int]:
        """Return the bytes that each device needs, in the order of the slots."""
        needed: dict[torch.device, int] = {}
        messages = MESSAGE_BYTES if self.step.layout.num_shards > 1 else 0
        for slot in self.slots:
            peak = self.memory[slot.index].peak_bytes
            if slot.device.type == "cpu":  # its slots share the host's memory
                needed[slot.device] = needed.get(slot.device, 0) + peak
            else:  # every slot has its GPU's peak; gaps are freed before memory runs out
                needed[slot.device] = peak + UNCOUNTED_BYTES + messages
        first = self.slots[0].device
        if first.type != "cpu":
            needed[first] += self.step.staging_bytes()
        return needed

    def load(self, device_bytes: Mapping[torch.device, int]) -> float:
        """Return the share of its memory that the fullest device needs; up to 1 the step fits."""
        needed = self.needed_bytes()
        return max(need / device_bytes[device] for device, need in needed.items())


def predict_memory(step: Step) -> MemoryEstimate:
    """Predict the bytes that each slot holds in a training step."""
    topology, layout, settings = step.topology, step.layout, step.settings
    with torch.device("meta"):
        model = UNet3d(topology)
    # Real, because a fake parameter cannot change its device; its memory is never touched.
    model.to_empty(device="cpu")
    to_parameter_dtype(model, step.precision)
    if layout.cuts is None:
        layout = replace(layout, cuts=default_cuts(model, layout))
    num_samples, num_micro_batches = _sample(layout, step.batch_size)
    with counted_allocations(layout.autocast is not None) as recorder:
        placed = replace(
            layout,
            devices=tuple(fake_device(device) for device in layout.devices),
            num_micro_batches=num_micro_batches,
        )
        executor = parallelize(model, placed)
        make_parameters_fake(model)
        # A scaler reads values, which fake tensors lack; it holds only a few numbers itself.
        optimization = Optimization(model, settings, "float32")
        image, target, *kept = empty_batch(step, executor)
        image, target = image[:num_samples], target[:num_samples]
        planes = step.size[0] if layout.num_shards > 1 else None
        # The first step creates the optimizer's state, which later steps use.
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimization.step(settings.learning_rate)
        meter = _Meter(executor.slots, model, recorder)
        executor.observer = meter
        executor.forward_backward(image, target, step.loss, planes=planes)
        meter.note_gradients()
        optimization.step(settings.learning_rate)
        memory = meter.read(optimization.optimizer)
        augments = step.augmentation is not None and step.augmentation.settings.enabled
        for slot in executor.slots:
            if is_fake_device(slot.device):
                peak_bytes = recorder.peak[slot.device] + recorder.workspace_bytes[slot.device]
                if slot.device == executor.input_device and augments:
                    peak_bytes += WORKSPACE_BYTES  # cuBLAS's, for the augmentation stream
                memory[slot.index] = replace(memory[slot.index], peak_bytes=peak_bytes)
        del kept
    slots = tuple(
        replace(slot, device=device)
        for slot, device in zip(executor.slots, layout.devices, strict=True)
    )
    return MemoryEstimate(step=step, slots=slots, memory=memory)


def predict_shards(step: Step) -> tuple[MemoryEstimate, ...]:
    """Predict the bytes of each slab of a replica; one slab of each kind is run.

    ``step`` is the step of any slab, or of an undivided network.
    """
    of_kinds = {shard.kind: shard for shard in step.shards()}
    known = {kind: predict_memory(shard) for kind, shard in of_kinds.items()}
    return tuple(replace(known[shard.kind], step=shard) for shard in step.shards())


def empty_batch(step: Step, executor: Executor) -> list[Tensor]:
    """Return image and target of a step, and all buffers of batches.

    A GPU that makes batches has two buffers for them, used alternately.
    """
    size = step.own_size
    shape = (step.batch_size, step.topology.in_channels, *size)
    classes = torch.uint8 if step.topology.num_classes <= 256 else torch.int64
    dtype = image_dtype(executor.module)
    device = executor.input_device
    if step.augmentation is None:
        image = torch.empty(shape, dtype=dtype, device=device)
        target = torch.empty((shape[0], *size), dtype=classes, device=executor.output_device)
        return [image, target]
    images = [torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2)]
    targets = [torch.empty((shape[0], *size), dtype=classes, device=device) for _ in range(2)]
    used = [images[0].to(dtype), targets[0].to(executor.output_device)]
    return [*used, *images, *targets]


class _Meter(MemoryMeter):
    """Also tells the recorder about resized tensors, which it cannot see."""

    def __init__(self, slots: Sequence[Slot], module: UNet3d, recorder: AllocationRecorder) -> None:
        super().__init__(slots, module)
        self._recorder = recorder

    def resized(self, tensor: Tensor) -> None:
        super().resized(tensor)
        self._recorder.resized(tensor)


def _sample(layout: Layout, batch_size: int) -> tuple[int, int]:
    """Return how many samples and micro-batches suffice to predict a batch.

    The prediction runs as many micro-batches as the first stage keeps alive at a time, and two
    more, so that one adds its gradients to existing gradients.
    """
    num_portions = min(layout.num_micro_batches, batch_size)
    num_run = min(num_portions, 2 * len(layout.devices) + 1)
    smaller, num_larger = divmod(batch_size, num_portions)  # the larger portions come first
    return smaller * num_run + min(num_larger, num_run), num_run
