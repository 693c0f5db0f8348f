"""Removal of small components from a segmentation, as chosen by validation.

A rule is a group of label values. The voxels with any of these values are taken together: their
largest component stays, and the others become background. This is nnU-Net's post-processing (arXiv
1904.08128). Voxels are neighbours if they share a face, an edge or a corner (26-connectivity),
whatever the spacing; if several components are largest, all stay. Rules are applied one by one.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import cc3d
import numpy as np
import numpy.typing as npt

from unet3d.datasets.labels import BACKGROUND, Mask, mask_of
from unet3d.errors import some
from unet3d.images.files import times
from unet3d.images.memory_limits import refuse_beyond_memory
from unet3d.images.scratch import forget_pages, parts

Rule = tuple[int, ...]
"""Values of labels, ascending, whose voxels are taken together."""

CONNECTIVITY = 26

BYTES_PER_VOXEL = 6
"""Memory per voxel whose component is searched: mask, component numbers, removed voxels."""

MOST_VOXELS = 2**26
"""Most voxels to search at once, unless a plane has more. A larger volume is searched in parts of
whole planes, and components that touch across parts are joined."""

Part = tuple[slice, ...]


def keep_largest(labels: npt.NDArray[np.integer[Any]], rules: Sequence[Rule]) -> None:
    """Apply rules to a segmentation, in place."""
    for rule in rules:
        for part, mask in small_components(labels, rule):
            labels[part][mask] = BACKGROUND


def small_components(
    labels: npt.NDArray[np.integer[Any]], rule: Rule
) -> Iterator[tuple[Part, Mask]]:
    """Yield the voxels that a rule removes: boxes, and a mask within each."""
    box = _box_of(labels, rule)
    if box is None:
        return
    inner = labels[box]
    boxes = list(parts(inner, MOST_VOXELS * inner.itemsize))
    refuse_beyond_memory(
        BYTES_PER_VOXEL * inner[boxes[0]].size,
        f"the search for components in {times(inner[boxes[0]].shape)} voxels",
        "use a machine with more, or predict with --no-postprocessing",
    )
    axis = next((a for a in range(3) if boxes[0][a].stop < inner.shape[a]), 0)
    components = _components(inner[boxes[0]], rule)
    firsts, counts, touching = [0], [_counts(components)], []
    for part in boxes[1:]:
        last = components.take(-1, axis)
        components = _components(inner[part], rule)
        firsts.append(firsts[-1] + len(counts[-1]))
        counts.append(_counts(components))
        numbers = np.array([[firsts[-2]], [firsts[-1]]])
        touching.append(_touching(last, components.take(0, axis)) + numbers)
    is_small = _are_small(np.concatenate(counts), touching)
    for part, first in zip(boxes, firsts, strict=True) if is_small.any() else ():
        if len(boxes) > 1:  # numbered again, because all numbers would take too much memory
            components = _components(inner[part], rule)
        mask = np.append(False, is_small[first:])[components]
        if mask.any():
            placed = zip(box, part, strict=True)
            yield tuple(slice(a.start + b.start, a.start + b.stop) for a, b in placed), mask
        forget_pages(labels)


def _box_of(labels: npt.NDArray[np.integer[Any]], rule: Rule) -> Part | None:
    """Return the smallest box around the voxels of a rule; None without any."""
    lines = [np.zeros(size, bool) for size in labels.shape]
    for part in parts(labels):
        mask = mask_of(labels[part], rule)
        for axis, line in enumerate(lines):
            line[part[axis]] |= mask.any(axis=tuple(other for other in range(3) if other != axis))
    found = [np.flatnonzero(line) for line in lines]
    return tuple(slice(int(one[0]), int(one[-1]) + 1) for one in found) if len(found[0]) else None


def _components(labels: npt.NDArray[np.integer[Any]], rule: Rule) -> npt.NDArray[Any]:
    """Return the component of each voxel, counted from 1; 0 for a voxel that is of no component."""
    mask = np.ascontiguousarray(mask_of(labels, rule))
    # As uint8, because cc3d 4.1.1 fails on booleans that are a single line with gaps.
    found: npt.NDArray[Any] = cc3d.connected_components(
        mask.view(np.uint8), connectivity=CONNECTIVITY
    )
    return found


def _counts(components: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the number of voxels of each component."""
    counts: npt.NDArray[Any] = cc3d.statistics(components, no_slice_conversion=True)["voxel_counts"]
    return counts[1:]  # without the background


def _touching(last: npt.NDArray[Any], first: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return pairs of components that touch across two planes, counted from 0, (2, pairs)."""
    pairs = []
    steps = [(slice(1, None), slice(None, -1)), (slice(None), slice(None))]
    steps.append(steps[0][::-1])
    for rows, next_rows in steps:
        for columns, next_columns in steps:
            here, there = last[rows, columns], first[next_rows, next_columns]
            both = (here > 0) & (there > 0)
            pairs.append(np.unique(np.stack([here[both], there[both]]).astype(np.int64), axis=1))
    return np.concatenate(pairs, axis=1) - 1


def _are_small(
    counts: npt.NDArray[Any], touching: Sequence[npt.NDArray[np.int64]]
) -> npt.NDArray[np.bool_]:
    """Return which components have fewer voxels than the largest, after joining touching ones."""
    if touching:
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        pairs = np.concatenate(touching, axis=1)
        graph = coo_array((np.ones(pairs.shape[1], bool), tuple(pairs)), (len(counts), len(counts)))
        _, joined = connected_components(graph, directed=False)
        counts = np.bincount(joined, counts)[joined]
    return np.asarray(counts < counts.max())


def rules_in_words(rules: Sequence[Rule], name_of: Mapping[int, str]) -> str:
    """Describe rules in words."""
    phrases = []
    for rule in rules:
        if len(rule) > 1 and set(rule) == set(name_of):
            phrases.append("of all labels together")
        else:
            names = (name_of.get(value, str(value)) for value in rule)
            phrases.append(f"of {' and '.join(names)}")
    return f"only the largest component is kept {some(phrases)}"
