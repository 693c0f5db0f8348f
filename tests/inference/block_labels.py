"""Labels of a volume that tell every voxel from its neighbours, block by block."""

import random
import time

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


def with_kills(begin, seed, most_seconds):
    """Kill ten of four processes, each begun again, and return how all end."""
    rng = random.Random(seed)
    workers = [begin() for _ in range(4)]
    for _ in range(10):
        time.sleep(rng.uniform(0.1, most_seconds))
        index = rng.randrange(len(workers))
        workers[index].kill()
        workers[index].wait()
        workers[index] = begin()
    return {worker.wait(300) for worker in workers}
