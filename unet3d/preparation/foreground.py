"""Voxels on which patches are centred, from each connected component of each class.

A class is drawn first, then one of its components, then a voxel of the component. So a lesion of
ten voxels is drawn as often as one of ten thousand; uniformly drawn voxels would nearly always be
in the large one.
"""

from dataclasses import dataclass
from typing import Any

import cc3d
import numpy as np
import numpy.typing as npt

MAX_FOREGROUND_VOXELS = 10_000
"""Most voxels kept of each class: enough to sample from, and few even for a large class."""

Indices = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, kw_only=True)
class Foreground:
    """Some voxels of each connected component of each class of a label map."""

    voxels: Indices
    """Indices in the flattened label map, component after component, class after class."""
    ends: Indices
    """End of each component in ``voxels``."""
    num_components: tuple[int, ...]
    """Components of each class; 0 for the background."""

    def draw(self, rng: np.random.Generator) -> int | None:
        """Return a voxel of a random component of a random class; None if all is background.

        Present classes are equally likely, then the components of the class, then the voxels of the
        component.
        """
        present = np.flatnonzero(self.num_components)
        if not len(present):
            return None
        index = int(present[rng.integers(len(present))])
        number = sum(self.num_components[:index]) + int(rng.integers(self.num_components[index]))
        start = int(self.ends[number - 1]) if number else 0
        return int(self.voxels[start + int(rng.integers(int(self.ends[number]) - start))])


def foreground_voxels(label: npt.NDArray[np.unsignedinteger[Any]], num_classes: int) -> Foreground:
    """Return some voxels of each component of each class except background, in (X, Y, Z).

    At most ``MAX_FOREGROUND_VOXELS`` of a class are kept, an equal share of each component; if
    there are more components than that, a random choice of components is kept. The choice is
    reproducible for a label map. Indices beyond the classes are ignored.
    """
    dtype = np.min_scalar_type(label.size)
    inside = np.flatnonzero((label > 0) & (label < num_classes))
    kept: list[Indices] = []
    counts = [0] * num_classes
    if len(inside):
        # Numbered from 1. Voxels of one class that share a corner are connected.
        numbers = cc3d.connected_components(np.ascontiguousarray(label), connectivity=26)
        numbers = numbers.reshape(-1)[inside]
        if numbers.max() < 2**16:
            numbers = numbers.astype(np.uint16)  # NumPy sorts uint16 in linear time
        order = np.argsort(numbers, kind="stable")
        starts = np.flatnonzero(np.diff(numbers[order], prepend=0))
        components = np.split(inside[order], starts[1:])
        classes = label.reshape(-1)[[voxels[0] for voxels in components]]
        rng = np.random.default_rng(0)
        for index in range(1, num_classes):
            chosen = np.flatnonzero(classes == index)
            if len(chosen) > MAX_FOREGROUND_VOXELS:
                chosen = np.sort(rng.choice(chosen, MAX_FOREGROUND_VOXELS, replace=False))
            counts[index] = len(chosen)
            for number in chosen:
                voxels, share = components[number], MAX_FOREGROUND_VOXELS // len(chosen)
                if len(voxels) > share:
                    voxels = np.sort(rng.choice(voxels, share, replace=False))
                kept.append(voxels.astype(dtype))
    return Foreground(
        voxels=np.concatenate([np.empty(0, dtype), *kept]),
        ends=np.cumsum([len(voxels) for voxels in kept], dtype=np.uint32),
        num_components=tuple(counts),
    )
