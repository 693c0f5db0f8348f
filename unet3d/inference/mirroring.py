"""Test-time mirroring: the mean of what a network says of a window and of its mirror images.

As in nnU-Net (arXiv 1904.08128) logits are averaged, over all combinations of the axes along which
patches were mirrored in training; a network that has never seen mirror images gets none.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unet3d.inference.placing import PlacedNetworks, TrainedNetwork
from unet3d.inference.sliding_window import Predicting
from unet3d.parallel import Slot


class MirroredNetwork:
    """Predicts as a network does, for a window and its mirror images."""

    def __init__(
        self,
        placed: PlacedNetworks | TrainedNetwork,
        axes: Sequence[int],
        replica: int = 0,
        index: int = 0,
    ) -> None:
        """Set it up.

        Args:
            placed: The network, or several of which one is placed at a time.
            axes: Those of the windows' X, Y, Z that are mirrored, counted from 0; none: the window
                alone.
            replica: Which of its replicas predicts.
            index: Which of several networks predicts; it is placed when it does.
        """
        self._placed = placed
        self._replica = replica
        self._index = index
        self._axes = tuple(axes)

    @property
    def _executor(self) -> Predicting:
        return self._placed.replicas[self._replica]  # another one for each kind of network

    @property
    def input_device(self) -> torch.device:
        """The device where images are expected."""
        return self._executor.input_device

    @property
    def output_device(self) -> torch.device:
        """The device where logits are returned."""
        return self._executor.output_device

    @property
    def slots(self) -> Sequence[Slot]:
        """The slots of this process."""
        return self._executor.slots

    def predict(self, image: Tensor) -> Tensor:
        """Return the mean of the logits (N, K, X, Y, Z), one forward pass after the other.

        Args:
            image: The windows (N, C, X, Y, Z), on the input device.
        """
        self._placed.use(self._index)
        return mirrored_mean(self._executor.predict, image, self._axes)


def mirrored_mean(
    predict: Callable[[Tensor], Tensor], image: Tensor, axes: Sequence[int]
) -> Tensor:
    """Return the mean of the logits of windows and of their mirror images.

    Args:
        predict: Returns logits (N, K, X, Y, Z) of windows (N, C, X, Y, Z).
        image: The windows.
        axes: Of X, Y, Z, counted from 0, those that are mirrored, in all combinations.

    Returns:
        Shape (N, K, X, Y, Z), at least in float32 where there are mirror images.
    """
    logits = predict(image)
    if not axes:
        return logits
    # Sums of eight in bfloat16 would lose digits; and what the network returns may be its own.
    total = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    del logits  # while others are computed
    for number in range(1, len(axes) + 1):
        for some in itertools.combinations(axes, number):
            flip = tuple(2 + axis for axis in some)
            total.add_(predict(image.flip(flip)).flip(flip))
    return total.div_(2 ** len(axes))
