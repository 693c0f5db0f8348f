"""Voxels that patches are centred on: of each class, of each of its connected components.

A class is drawn first, then one of its components, then a voxel of that. So a lesion of ten voxels
is seen as often as one of ten thousand, where voxels drawn evenly would show the large one alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cc3d
import numpy as np
import numpy.typing as npt

MAX_FOREGROUND_VOXELS = 10_000
"""Voxels kept of each class: enough to sample from, few where it fills half a volume."""

CONNECTIVITY = 26
"""Voxels that share a corner are connected."""

Indices = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, kw_only=True)
class Foreground:
    """Some voxels of each connected component of each class of a label map."""

    voxels: Indices
    """Indices in the flattened label map, component after component, class after class."""
    ends: Indices
    """Where each component ends in them."""
    num_components: tuple[int, ...]
    """Components of each class; 0 for the background."""

    def components(self, index: int) -> list[Indices]:
        """Return the voxels of each component of a class.

        Args:
            index: The class.
        """
        first = sum(self.num_components[:index])
        return [self._component(first + number) for number in range(self.num_components[index])]

    def draw(self, rng: np.random.Generator) -> int | None:
        """Return a voxel of a random component of a random class; None where all is background.

        Args:
            rng: Draws evenly from the classes that are there, then from the components of the
                class, then from the voxels of the component.
        """
        present = np.flatnonzero(self.num_components)
        if not len(present):
            return None
        index = int(present[rng.integers(len(present))])
        first = sum(self.num_components[:index])
        voxels = self._component(first + int(rng.integers(self.num_components[index])))
        return int(voxels[rng.integers(len(voxels))])

    def _component(self, number: int) -> Indices:
        start = int(self.ends[number - 1]) if number else 0
        return self.voxels[start : int(self.ends[number])]


def foreground_voxels(label: npt.NDArray[np.unsignedinteger[Any]], num_classes: int) -> Foreground:
    """Return some voxels of each component of each class; none of the background.

    Of a class at most ``MAX_FOREGROUND_VOXELS`` are kept, as many of each component as it has or as
    are its share; where there are more components than that, a random choice of them. The choice is
    random but the same for the same label map.

    Args:
        label: Class indices, shape (X, Y, Z); others than those of the classes count nowhere.
        num_classes: Number of classes, the background included.
    """
    dtype = np.min_scalar_type(label.size)
    inside = np.flatnonzero((label > 0) & (label < num_classes))
    voxels: list[Indices] = []
    counts = [0] * num_classes
    if len(inside):
        components = _components(label).reshape(-1)[inside]
        if components.max() < 2**16:
            components = components.astype(np.uint16)  # which NumPy sorts in linear time
        order = np.argsort(components, kind="stable")
        starts = np.flatnonzero(np.diff(components[order], prepend=0))
        groups = np.split(inside[order], starts[1:])
        classes = label.reshape(-1)[[group[0] for group in groups]]
        rng = np.random.default_rng(0)
        for index in range(1, num_classes):
            of_class = [groups[number] for number in np.flatnonzero(classes == index)]
            chosen = _chosen(of_class, rng)
            counts[index] = len(chosen)
            voxels += [group.astype(dtype) for group in chosen]
    return Foreground(
        voxels=np.concatenate([np.empty(0, dtype), *voxels]),
        ends=np.cumsum([len(group) for group in voxels], dtype=np.uint32),
        num_components=tuple(counts),
    )


def _components(
    label: npt.NDArray[np.unsignedinteger[Any]],
) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Return the number of each voxel's component, from 1; neighbours of two classes are two."""
    components: npt.NDArray[np.unsignedinteger[Any]] = cc3d.connected_components(
        np.ascontiguousarray(label), connectivity=CONNECTIVITY
    )
    return components


def _chosen(
    components: Sequence[npt.NDArray[np.intp]], rng: np.random.Generator
) -> list[npt.NDArray[np.intp]]:
    """Return the voxels that are kept of each component of a class, ascending."""
    if len(components) > MAX_FOREGROUND_VOXELS:
        numbers = rng.choice(len(components), MAX_FOREGROUND_VOXELS, replace=False)
        components = [components[number] for number in np.sort(numbers)]
    share = MAX_FOREGROUND_VOXELS // max(1, len(components))
    return [
        np.sort(rng.choice(voxels, share, replace=False)) if len(voxels) > share else voxels
        for voxels in components
    ]
