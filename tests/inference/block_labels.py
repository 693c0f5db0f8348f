"""Labels of a volume that tell every voxel from its neighbours, block by block."""

import numpy as np

SHAPE = (260, 130, 258)


def labels_of(box):
    """Return the labels (X, Y, Z) of a box."""
    x, y, z = (np.arange(part.start, part.stop) for part in box)
    return (x[:, None, None] * 7 + y[:, None] * 13 + z * 29).astype(np.uint8)


def ahead(compute):
    """Return how the blocks of a store begin, each while the one before it is computed."""

    def begin(box, soon):
        def labels():
            soon()
            return compute(box)

        return labels

    return begin
