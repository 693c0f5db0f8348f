"""Normalisation of a map that is a whole volume or a slab, and the messages between its stages.

The operation that makes a map can pass its moments to :meth:`VolumeNorm.statistics`, and the reader
of the map can normalise while it loads. So the stages (:mod:`unet3d.kernels.norm.op`) need not be
separate operations.
"""

from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from unet3d.kernels.maps import (
    SUMS,
    Deferred,
    Halo,
    channels_last,
    empty_map,
    mark_deferred,
    take,
    with_padding,
)
from unet3d.kernels.norm import op, reference
from unet3d.kernels.recompute import offer, recomputing
from unet3d.kernels.sharding import (
    Shard,
    end_plane,
    gradient_of_own,
    inner,
    number_of_largest,
    planes_beside,
)
from unet3d.kernels.triton_support import FAST_TYPES, triton_available

MIN_ELEMENTS = 2**14
"""Smaller maps take the reference. The statistics of 320 channels at 8^3 take PyTorch 36 us on an
H200, and Triton's two kernels 8."""


def stages_for(x: Tensor, channels: int | None = None) -> ModuleType:
    """Return the version of the stages that suits a map, the same for all slabs of a volume.

    Triton's version requires channels-last maps. If only the number of channels differs from x,
    ``channels`` states it.
    """
    elements = x.numel() // x.shape[1] * (x.shape[1] if channels is None else channels)
    # Messages of the two versions differ in size, so all slabs must choose the same one.
    elements = number_of_largest(elements)
    if elements >= MIN_ELEMENTS and x.dtype in FAST_TYPES and triton_available(x):
        return op
    return reference


class VolumeNorm(NamedTuple):
    """How to normalise a map (N, C, X, Y, Z); :mod:`unet3d.kernels.norm.op` explains ``affine``."""

    stages: ModuleType
    eps: float
    slope: float
    """Negative slope of LeakyReLU; 1 leaves the activation out."""
    shard: Shard | None
    """The slab that the map is; None: the map is a whole volume."""
    halo_of: Shard | None = None
    """The slab whose halo the result includes; None: no halo."""
    pads: bool = False
    """Whether the result is stored with zeros around Z."""
    is_deferred: bool = False
    """Whether normalising is left to the only reader of the result, which gets x."""

    def statistics(
        self, x: Tensor, added: Tensor | None = None, moments: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the volume's mean (N, C, M) and 1 / deviation (N, C).

        They are computed from known moments, or from x, to which ``added`` is first added in place.
        """
        if added is not None:
            moments = self.stages.sum_moments(x, added)
        elif moments is None:
            moments = self.stages.moments(x)
        mean, rstd, own = self.stages.merge(moments, _num_voxels(x), self.eps)
        if self.shard is not None:
            of_all = self.shard.gather(own.squeeze(0))
            mean, rstd, _ = self.stages.merge(of_all, self.voxels(x), self.eps)
        return mean, rstd

    def normalized(
        self, x: Tensor, *affine: Tensor, halo: Halo | None = None
    ) -> tuple[Tensor, Halo]:
        """Return the normalised map, with its halo if it has one, and the planes beside x.

        If these planes are not given, slabs exchange them. If normalisation is deferred, the map is
        x, as a separate tensor.
        """
        if self.is_deferred:
            return x.detach(), (None, None)
        y = empty_map(x, self.pads, has_halo=self.halo_of is not None)
        options = {"slope": self.slope, "pads": self.pads}
        if self.halo_of is None:
            self.stages.normalize(y, x, *affine, **options)
            return y, (None, None)
        halo = halo or planes_beside(x, self.halo_of)
        self.stages.normalize(inner(y), x, *affine, **options)
        for end, plane in zip((0, -1), halo, strict=True):
            place = end_plane(y, end)
            if plane is not None:
                self.stages.normalize(place, plane, *affine, **options)
            else:
                (with_padding(place) if self.pads else place).zero_()
        return y, halo

    def again(self, x: Tensor, *affine: Tensor, halo: Halo) -> Tensor:
        """Recompute the result of :meth:`normalized` without zeros around Z or messages."""
        return self._replace(pads=False).normalized(x, *affine, halo=halo)[0]

    def passed_on(self, made: Tensor, x: Tensor, *affine: Tensor, halo: Halo) -> Tensor:
        """Mark the result for its reader if normalisation is deferred, else offer to recompute."""
        weight, bias, mean, rstd = affine
        deferred = Deferred((weight, bias, mean, rstd), self.slope, halo)
        if self.is_deferred:
            return mark_deferred(made, deferred)
        source = recomputing(x)
        offer(made, lambda: self.again(source(), *affine, halo=halo), x, deferred)
        return made

    def gradient_of_own(self, dy: Tensor) -> Tensor:
        """Return the gradient of a map's own planes, channels-last; dy includes any halo."""
        return channels_last(dy if self.halo_of is None else gradient_of_own(dy, self.halo_of))

    def own_sums(self, dy: Tensor, x: Tensor, *affine: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of a map's own planes, and the sums (2, N, C) over them.

        If normalisation is deferred, dy may be marked with the sums.
        """
        parts, dy = take(dy, SUMS), self.gradient_of_own(dy)
        if parts is None:
            parts = self.stages.sums(dy, x, *affine, slope=self.slope)
        return dy, self.stages.total(parts)

    def total(self, own: Tensor) -> Tensor:
        """Return the sums (2, N, C) over the volume, from the sums over a map's own planes."""
        total: Tensor = own if self.shard is None else self.stages.total(self.shard.gather(own))
        return total

    def voxels(self, x: Tensor) -> int:
        """Return the number of voxels of one sample of the volume."""
        voxels = _num_voxels(x)
        return voxels if self.shard is None else self.shard.of_volume(voxels)


def _num_voxels(x: Tensor) -> int:
    return x.shape[2] * x.shape[3] * x.shape[4]
