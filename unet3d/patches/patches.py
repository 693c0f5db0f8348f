"""Cutting training patches out of prepared cases.

A patch is a pure function of (seed, epoch, index, batch size): its case, its position, every random
change. So it depends neither on the process that cuts it nor on resuming a run. Cases are drawn
with replacement, and the last patches of each batch are centred on foreground, as in nnU-Net
(Isensee et al., Nature Methods 2021).

The position of a patch along one axis::

    case      |------------------------|          patch     |--------|
    |--------|       the first and the       |--------|     case   |-----|
                     last that can be drawn                 centred, zeros around it
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unet3d.config import PatchSettings, Shape
from unet3d.errors import CacheError, ConfigError, DatasetError
from unet3d.images.files import times
from unet3d.patches.augment.cut import Cut, Extent, Placement, Slab, shape_of, start_of
from unet3d.patches.augment.draw import AugmentationDraw, DrawnChannel
from unet3d.patches.augment.filters import with_margin
from unet3d.patches.augment.intensity import Gather
from unet3d.patches.augment.recipe import augment, together
from unet3d.patches.packing import Packed, Packer
from unet3d.preparation.cache import PreparedCase
from unet3d.preparation.prepared_image import whole_box


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Patches of one shape, or a slab of each."""

    image: Tensor
    """float32 (N, C, X, Y, Z)."""
    target: Tensor
    """Class indices (N, X, Y, Z): uint8, or int64 where there are more than 256 classes."""
    names: tuple[str, ...]
    """The case of each patch."""
    weight: float = 1.0
    """Factor of this replica's mean loss, so that the mean over replicas is the mean over the whole
    batch; 0 for a replica without a share, which repeats another replica's patch."""
    planes: int | None = None
    """Planes along X of the whole batch, if image and target are a slab of it; None: they are
    whole."""

    @property
    def num_samples(self) -> int:
        """Number of patches that count."""
        return len(self.image) if self.weight else 0

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory, from which copies to a GPU are asynchronous."""
        return replace(self, image=self.image.pin_memory(), target=self.target.pin_memory())


@dataclass(frozen=True, kw_only=True)
class CutBatch:
    """The cuts that a batch, or a slab of it, is made from; other processes receive it packed."""

    cuts: tuple[Cut, ...]
    """One for each patch."""
    shape: Shape
    """Voxels of the whole batch along X, Y, Z; a smaller patch is centred, with zeros around."""
    slab: Slab | None = None
    """The slab that will be made; None: the whole batch."""
    weight: float = 1.0
    """As in :class:`Batch`."""

    def augmented(self) -> Batch:
        """Return the batch, made on the CPU."""
        made = self._outline(torch.device("cpu"))
        augment(together(self.cuts, stacks=False), made.image, made.target, self.slab)
        return made

    def pin_memory(self) -> "PackedBatch":
        """Return the data packed into page-locked memory, so that copies to a GPU do not block."""
        return self._packed(lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle the packed data, in shared memory."""
        return replace, (self._packed(_shared),)

    def _packed(self, empty: Callable[[int], Tensor]) -> "PackedBatch":
        packer = Packer()
        given = together(self.cuts, stacks=self.slab is None)
        parts = tuple((packer.packed(boxes), packer.packed(recipe)) for boxes, recipe in given)
        return PackedBatch(
            memory=packer.fill(empty(packer.num_bytes)),
            parts=parts,
            slab=self.slab,
            outline=self._outline(torch.device("meta")),
        )

    def _outline(self, device: torch.device) -> Batch:
        """Return the batch with uninitialised values."""
        first, (x, y, z) = self.cuts[0], self.shape
        shape = (x if self.slab is None else len(self.slab.planes), y, z)
        number, channels = len(self.cuts), len(first.image)
        return Batch(
            image=torch.empty(number, channels, *shape, device=device),
            target=torch.empty(number, *shape, dtype=first.label.dtype, device=device),
            names=tuple(cut.name for cut in self.cuts),
            weight=self.weight,
            planes=None if self.slab is None else self.slab.num_planes,
        )


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """The data that a GPU makes a batch from, in one piece of memory."""

    memory: Tensor
    parts: tuple[tuple[Packed, Packed], ...]
    """Boxes and recipe of each group of patches that are made together, in order."""
    slab: Slab | None
    outline: Batch
    """The batch on the meta device."""

    def pin_memory(self) -> "PackedBatch":
        """Return the data in page-locked memory, so that copies to a GPU do not block."""
        return replace(self, memory=self.memory.pin_memory())

    def made(self, image: Tensor, target: Tensor, gather: Gather | None = None) -> Batch:
        """Return the batch in memory of the outline's shapes; see :func:`augment`.

        The data are copied to the device part by part.
        """
        device = image.device
        given = (tuple(one.on(self.memory, device) for one in part) for part in self.parts)
        augment(given, image, target, self.slab, gather)
        return replace(self.outline, image=image, target=target)


def _shared(num_bytes: int) -> Tensor:
    storage = torch.UntypedStorage._new_shared(num_bytes)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class PatchSampler:
    """Cuts any patch of any epoch."""

    def __init__(
        self,
        *,
        cases: Sequence[PreparedCase],
        settings: PatchSettings,
        size: Shape | None,
        stride: Shape,
        batch_size: int,
        seed: int,
    ) -> None:
        """Set up the sampler; ConfigError if ``size`` is not a multiple of ``stride``.

        A size of None means whole volumes, padded to a multiple of the stride. Patches of an epoch
        are numbered batch after batch.
        """
        if not cases:
            raise DatasetError("there are no training cases; check data.fold and the data set")
        if size is not None and size != padded_shape(size, stride):
            raise ConfigError(
                f"patches.size is {times(size)}; this network needs multiples of "
                f"{times(stride)}, such as {times(padded_shape(size, stride))}"
            )
        self.cases = tuple(cases)
        self.size = size
        self.stride = stride
        self.batch_size = batch_size
        self.seed = seed
        share, augmentation = settings.foreground_fraction, settings.random_changes
        self._num_foreground = max(1, round(share * batch_size)) if share else 0
        self.augmentation = AugmentationDraw(augmentation) if augmentation.enabled else None

    def patch_shape(self, epoch: int, index: int) -> Shape:
        """Return the voxels of a patch along X, Y, Z, without cutting it."""
        if self.size is not None:
            return self.size
        case = self._drawn_case(self._generator(epoch, index))
        return padded_shape(case.shape, self.stride)

    def _generator(self, epoch: int, index: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(epoch, index)))

    def _drawn_case(self, rng: np.random.Generator) -> PreparedCase:
        """Return the case of a patch; it is the first draw of the patch's new generator."""
        return self.cases[int(rng.integers(len(self.cases)))]

    def cut(
        self, epoch: int, index: int, slab: Slab | None = None, *, gathers: bool = False
    ) -> Cut:
        """Draw one patch, and cut out the box from which it, or its part in a slab, is made.

        Without ``gathers``, a patch that needs statistics of all its voxels is made whole.
        """
        rng = self._generator(epoch, index)
        case = self._drawn_case(rng)
        image, label, shape = case.image(), case.label(), case.shape
        size = self.size or padded_shape(shape, self.stride)
        is_on_foreground = index % self.batch_size >= self.batch_size - self._num_foreground
        start = _start(shape, size, self._centre(rng, case, shape, size, is_on_foreground))
        matrix, channels = None, tuple[DrawnChannel, ...]()
        if self.augmentation is not None:
            matrix = self.augmentation.matrix(rng, size, case.spacing_mm)
            channels = self.augmentation.channels(rng, len(image), case.spacing_mm)
        placement = Placement.centred(matrix, start, size)
        part = whole_box(size) if slab is None else slab.part(size)
        made = with_margin(part, channels, size)
        if not gathers and any(channel.is_measured for channel in channels):
            made = whole_box(size)
        if min(shape_of(part)) == 0:
            made = part
        box = placement.box(made, shape)
        classes = label[box]
        return Cut(
            image=torch.from_numpy(image[:, *box].copy()),
            label=torch.from_numpy(classes.astype(np.uint8 if label.itemsize == 1 else np.int64)),
            placement=placement.moved(start_of(box)),
            channels=channels,
            extent=Extent(size, part, made),
            name=case.name,
        )

    def _centre(
        self,
        rng: np.random.Generator,
        case: PreparedCase,
        shape: Shape,
        size: Shape,
        is_on_foreground: bool,
    ) -> list[int]:
        """Draw the voxel that the patch would be centred on in a volume without borders."""
        if self.size is not None and is_on_foreground:
            try:
                voxel = case.foreground().draw(rng)
                if voxel is not None:
                    return [int(index) for index in np.unravel_index(voxel, shape)]
            except (IndexError, ValueError) as error:  # the files have no checksum
                raise CacheError(f"{case.folder} is damaged; delete it and run again") from error
        # Uniform over positions, because uniform over voxels would put most patches at a border.
        return [
            int(rng.integers(max(0, available - voxels) + 1)) + voxels // 2
            for available, voxels in zip(shape, size, strict=True)
        ]


def padded_shape(shape: Shape, stride: Shape) -> Shape:
    """Return the smallest multiples of ``stride`` that hold ``shape``."""
    x, y, z = (-(-size // step) * step for size, step in zip(shape, stride, strict=True))
    return (x, y, z)


def _start(shape: Shape, size: Shape, centre: Sequence[int]) -> list[int]:
    """Return the first voxel of a patch that is inside the volume, or has the volume inside it."""
    return [
        min(max(middle - voxels // 2, 0), available - voxels)
        if voxels < available
        else -((voxels - available) // 2)
        for available, voxels, middle in zip(shape, size, centre, strict=True)
    ]
