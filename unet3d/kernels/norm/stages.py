"""The stages that an instance normalisation is made of.

Forward they are moments, merge and normalize; backward sums, total and gradient. What passes
between them is small, so the parts of a volume (the slabs that several devices hold, say) can do
the first stage alone, exchange the results, and do the last one as if each held the whole volume.
"""

from typing import Protocol

from torch import Tensor


class Stages(Protocol):
    """One version of the stages: Triton's or the reference.

    P counts parts of a volume: one or more of each device's, which differ in size as they like.
    M is how many numbers the mean of a channel is kept in: their sum is the mean.
    """

    def moments(self, x: Tensor, /) -> Tensor:
        """Return the moments of the parts of a map.

        Args:
            x: (N, C, X, Y, Z).

        Returns:
            (P, 2 + M, N, C) in float32 at least, one above the other: the number of voxels, the
            variance (biased), and the numbers of the mean. Those of other slabs of the volume are
            joined to them along P.
        """
        ...

    def sum_moments(self, x: Tensor, added: Tensor, /) -> Tensor:
        """Add a map to x, in its memory, and return the moments of the sum.

        Args:
            x: (N, C, X, Y, Z); it becomes the sum.
            added: Of the same shape and type.

        Returns:
            What :meth:`moments` returns.
        """
        ...

    def merge(self, moments: Tensor, voxels: int, eps: float, /) -> tuple[Tensor, Tensor, Tensor]:
        """Merge the moments of all parts of a volume.

        Args:
            moments: (P, 2 + M, N, C).
            voxels: Number of voxels of all parts together.
            eps: Added to the variance.

        Returns:
            The mean (N, C, M), 1 / deviation (N, C), and the moments (1, 2 + M, N, C) of all parts
            as one, which are what devices exchange.
        """
        ...

    def normalize(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        rstd: Tensor,
        /,
        *,
        slope: float,
        pads: bool,
    ) -> Tensor:
        """Normalise a map, or a part of one, and apply LeakyReLU.

        Args:
            x: (N, C, X, Y, Z).
            weight: (C,).
            bias: (C,).
            mean: (N, C, M), of the volume.
            rstd: (N, C), 1 / deviation, of the volume.
            slope: Negative slope of LeakyReLU; 1 leaves the activation out.
            pads: Whether the result is stored with zeros around Z (:mod:`unet3d.kernels.padding`).

        Returns:
            (N, C, X, Y, Z), of x's type.
        """
        ...

    def normalize_into(
        self,
        y: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        rstd: Tensor,
        /,
        *,
        slope: float,
        pads: bool,
    ) -> None:
        """Normalise a map into memory that is there.

        Args:
            y: (N, C, X, Y, Z), written; planes of a larger map whose memory is channels-last. With
                ``pads`` there is room around Z, which becomes zeros.
            x: As in :meth:`normalize`, as are the others.
            weight: (C,).
            bias: (C,).
            mean: (N, C, M).
            rstd: (N, C).
            slope: Negative slope of LeakyReLU.
            pads: Whether y is stored with room around Z.
        """
        ...

    def sums(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        rstd: Tensor,
        /,
        *,
        slope: float,
    ) -> Tensor:
        """Return the sums over voxels that the gradients need.

        Args:
            dy: Gradient of the result, (N, C, X, Y, Z).
            x: As in :meth:`normalize`, as are the others.
            weight: (C,).
            bias: (C,).
            mean: (N, C, M).
            rstd: (N, C).
            slope: Negative slope of LeakyReLU.

        Returns:
            (P, 2, N, C) in float32 at least: of g, the gradient before LeakyReLU, and of g times
            the normalised value. Those of other slabs of the volume are joined to them along P.
        """
        ...

    def total(self, sums: Tensor, /) -> Tensor:
        """Add up the sums of all parts.

        Args:
            sums: (P, R, N, C), R rows of them; 2 of :meth:`sums`.

        Returns:
            (R, N, C); summed over N, the first two are the gradients of bias and weight.
        """
        ...

    def gradient(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        rstd: Tensor,
        /,
        *,
        total: Tensor,
        voxels: int,
        slope: float,
        pads: bool,
    ) -> Tensor:
        """Return the gradient of a map, or of a part of one.

        Args:
            dy: Gradient of the result, (N, C, X, Y, Z).
            x: As in :meth:`normalize`, as are the others.
            weight: (C,).
            bias: (C,).
            mean: (N, C, M).
            rstd: (N, C).
            total: (2, N, C), sums over all parts of the volume.
            voxels: Number of voxels of all parts together.
            slope: Negative slope of LeakyReLU.
            pads: Whether the gradient is stored with zeros around Z.

        Returns:
            (N, C, X, Y, Z), of x's type.
        """
        ...
