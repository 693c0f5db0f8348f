"""Cutting training patches out of prepared cases.

A patch is a pure function of (seed, epoch, index, batch size): its case, its place, every random
change. So it does not matter which process cuts it, or at which step a run was resumed. Cases are
drawn with replacement, and the last patches of each batch are centred on foreground, as in nnU-Net
(Isensee et al., Nature Methods 2021).

The position of a patch along one axis::

    case      |------------------------|          patch     |--------|
    |--------|       the first and the       |--------|     case   |-----|
                     last that can be drawn                 centred, zeros around it
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unet3d.config import PatchSettings, Shape
from unet3d.errors import CacheError, ConfigError, DatasetError
from unet3d.images.files import times
from unet3d.patches.augment.apply import augment
from unet3d.patches.augment.cut import Cut, Placement, Slab, shape_of, start_of, with_margin
from unet3d.patches.augment.draw import AugmentationDraw, DrawnChannel
from unet3d.patches.augment.filters import ChannelFilters
from unet3d.patches.augment.intensity import Gather
from unet3d.preparation.cache import PreparedCase
from unet3d.preparation.prepared_image import whole_box

ALIGNMENT = 16
"""Bytes; that of the largest type."""


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
    """Factor of the mean loss of this replica's share that makes the mean over all replicas the
    mean over the whole batch; 0 for a replica that has no share and repeats another's patch."""
    planes: int | None = None
    """Planes along X of the whole batch, where image and target are a slab of it; None: they are
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
    """What a batch, or a slab of it, will be made from."""

    cuts: tuple[Cut, ...]
    """One for each patch."""
    shape: Shape
    """Voxels of the whole batch along X, Y, Z; a smaller patch lies in the middle, with zeros
    around."""
    slab: Slab | None = None
    """What will be made of it; None: all."""
    weight: float = 1.0
    """As that of a :class:`Batch`."""

    @property
    def names(self) -> tuple[str, ...]:
        """The case of each patch."""
        return tuple(cut.name for cut in self.cuts)

    def pin_memory(self) -> "CutBatch":
        """Return the cuts in page-locked memory, from which copies to a GPU are asynchronous."""
        return self._laid(torch.empty(self._num_bytes(), dtype=torch.uint8, pin_memory=True))

    def __getstate__(self) -> dict[str, Any]:
        """Hand all tensors over in one piece of memory, which is one open file.

        Each tensor costs the receiver several messages, about 0.5 ms: with one for each of a batch
        of small patches, receiving takes longer than the training step.
        """
        storage = torch.UntypedStorage._new_shared(self._num_bytes())  # type: ignore[no-untyped-call]
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._laid(memory)
        return {**vars(self._each(lambda tensor: tensor.to("meta"))), "memory": memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what :meth:`__getstate__` has handed over."""
        memory = state.pop("memory")
        vars(self).update(state)
        vars(self).update(vars(self._laid(memory, copies=False)))

    def _laid(self, memory: Tensor, *, copies: bool = True) -> "CutBatch":
        """Return the batch with its tensors one after another in memory, which gets their values.

        Without copies it has them already.
        """
        end = 0

        def laid(tensor: Tensor) -> Tensor:
            nonlocal end
            begin, end = end, end + _aligned(tensor.nbytes)
            own = memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            return own.copy_(tensor) if copies else own

        return self._each(laid)

    def _num_bytes(self) -> int:
        sizes: list[int] = []

        def counted(tensor: Tensor) -> Tensor:
            sizes.append(_aligned(tensor.nbytes))
            return tensor

        self._each(counted)
        return sum(sizes)

    def _each(self, move: Callable[[Tensor], Tensor]) -> "CutBatch":
        return replace(self, cuts=tuple(cut.each(move) for cut in self.cuts))

    @property
    def image_shape(self) -> tuple[int, ...]:
        """(N, C, X, Y, Z) of what will be made."""
        first, (x, y, z) = self.cuts[0], self.shape
        planes = x if self.slab is None else len(self.slab.planes)
        return (len(self.cuts), len(first.image), planes, y, z)

    @property
    def target_shape(self) -> tuple[int, ...]:
        """(N, X, Y, Z) of what will be made."""
        number, _, *voxels = self.image_shape
        return (number, *voxels)

    def augmented(self) -> Batch:
        """Return the batch, made where the cuts are."""
        first = self.cuts[0]
        image = first.image.new_empty(self.image_shape, dtype=torch.float32)
        target = first.label.new_empty(self.target_shape)
        return self.made(self.cuts, image, target)

    def made(
        self, cuts: Iterable[Cut], image: Tensor, target: Tensor, gather: Gather | None = None
    ) -> Batch:
        """Return the batch, made of its cuts in memory of its shapes; see :func:`augment`."""
        augment(cuts, image, target, self.slab, gather)
        return Batch(
            image=image,
            target=target,
            names=self.names,
            weight=self.weight,
            planes=None if self.slab is None else self.slab.num_planes,
        )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


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
        """Set up the sampler; ConfigError where ``size`` is not a multiple of ``stride``.

        A size of None means whole volumes, padded to a multiple of the stride. The first patches of
        an epoch are its first batch.
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
        share, augmentation = settings.foreground_fraction, settings.augmentation
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
        """Return the case of a patch, which its new generator draws first."""
        return self.cases[int(rng.integers(len(self.cases)))]

    def cut(
        self, epoch: int, index: int, slab: Slab | None = None, *, gathers: bool = False
    ) -> Cut:
        """Draw one patch, and cut out what it, or a slab of its batch, is made from.

        Where the slabs do not gather statistics of a patch, it is made whole if it needs them.
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
        filters = tuple(ChannelFilters.of(channel, size) for channel in channels)
        part = whole_box(size) if slab is None else slab.part(size)
        made = with_margin(part, filters, size)
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
            filters=filters,
            size=size,
            part=part,
            made=made,
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
            except (IndexError, ValueError) as error:  # no checksum has told before
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
