"""Removal of small components from a segmentation, as chosen by validation.

A rule is a group of label values. The voxels with any of these values are taken together: their
largest component stays, and the others become background. This is nnU-Net's post-processing (arXiv
1904.08128). Voxels are neighbours if they share a face, an edge or a corner (26-connectivity),
whatever the spacing; if several components are largest, all stay. Rules are applied one by one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import cc3d
import numpy as np
import numpy.typing as npt

from unet3d.datasets.labels import BACKGROUND, Mask, box_of, mask_of
from unet3d.errors import some
from unet3d.images.files import times
from unet3d.images.memory_limits import refuse_beyond_memory

Rule = tuple[int, ...]
"""Values of labels, ascending, whose voxels are taken together."""

CONNECTIVITY = 26

BYTES_PER_VOXEL = 6
"""Memory per voxel of the box around a rule's voxels: mask, component numbers, removed voxels."""


def keep_largest(labels: npt.NDArray[np.integer[Any]], rules: Sequence[Rule]) -> None:
    """Apply rules to a segmentation, in place."""
    for rule in rules:
        removed = small_components(labels, rule)
        if removed is not None:
            box, mask = removed
            labels[box][mask] = BACKGROUND


def small_components(
    labels: npt.NDArray[np.integer[Any]], rule: Rule
) -> tuple[tuple[slice, ...], Mask] | None:
    """Return the voxels that a rule removes: a box, and a mask within the box; None: no voxels."""
    mask = mask_of(labels, rule)
    if not mask.any():
        return None
    box = box_of(mask)
    mask = np.ascontiguousarray(mask[box])
    refuse_beyond_memory(
        BYTES_PER_VOXEL * mask.size,
        f"the search for components in {times(mask.shape)} voxels",
        "use a machine with more, or predict with --no-postprocessing",
    )
    # As uint8, because cc3d 4.1.1 fails on booleans that are a single line with gaps.
    components = cc3d.connected_components(mask.view(np.uint8), connectivity=CONNECTIVITY)
    counts = cc3d.statistics(components, no_slice_conversion=True)["voxel_counts"]
    counts[0] = 0  # the background of the mask
    is_small = counts < counts.max()
    is_small[0] = False
    if not is_small.any():
        return None
    return box, is_small[components]


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
