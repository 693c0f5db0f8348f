"""What the ranks of ``test_ranks.py`` do: segment images of the first rank, and fail in some."""

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # building a network imports it, which the forks then need not do
import torch.distributed as dist

from tests.images.samples import noise
from tests.networks import place, random_checkpoint, set_to
from tests.ranks import ends_of, start_ranks
from unet3d.config import InferenceSettings, ParallelSettings
from unet3d.distributed import watch
from unet3d.distributed.ranks import PREDICTION, Ranks
from unet3d.distributed.rendezvous import joined
from unet3d.errors import Unet3dError
from unet3d.images.image import image_of
from unet3d.images.nifti import open_array
from unet3d.inference.networks import Networks
from unet3d.inference.predictor import Predictor
from unet3d.parallel.spatial.shard import GroupMessages

ON_GPUS = "gpus" in sys.argv[2:]

EXACT = {"dtype": torch.float64, "changes": ("training.precision=float64",)}

MEMBERS = (
    random_checkpoint(**EXACT),
    random_checkpoint(**EXACT, seed=8),
    random_checkpoint(**EXACT, channels=(6, 8), patch_size=(18, 16, 16)),
    random_checkpoint(patch_size=None),
)
"""Two that differ in weights only, one with another topology and windows, and one in float32."""


def image_from(array):
    return image_of([open_array(array, np.eye(4))])


IMAGES = (
    image_from(noise((40, 24, 20))),
    image_from(noise((40, 24, 20, 2))),  # one channel too many
    image_from(np.full((40, 24, 20), np.inf)),
    image_from(noise((17, 12, 30), seed=3)),
)


def predictor_of(group, *members, **settings):
    devices = tuple(map(str, range(group.size))) if ON_GPUS else ("cpu",) * group.size
    spread = ParallelSettings(mode="spatial", devices=devices)
    inference = InferenceSettings(**settings)
    networks = Networks.of(*(set_to(one, inference) for one in members))
    return Predictor(networks, spread, group)


def check_labels(group, members, **settings):
    """Compare labels of images with labels of one process; two images cannot be segmented."""
    predictor = predictor_of(group, *members, **settings)
    alone = place(Networks.of(*members), inference=InferenceSettings(**settings))
    for number, image in enumerate(IMAGES):
        try:
            labels = predictor.segment(image if group.is_first else None)
        except Unet3dError as error:
            assert number in (1, 2) and ("channel" in str(error) or "infinite" in str(error)), error
            continue
        assert number in (0, 3)
        assert (labels is None) == (not group.is_first)
        if labels is not None:
            share = (labels == alone.segment(image)).mean()
            least = 0.99 if ON_GPUS else 0.999  # GPUs compute the float32 network in bfloat16
            assert share == 1 or (share > least and MEMBERS[3] in members), share


def check_non_finite(group):
    """Continue in all ranks after an output with infinite values."""
    predictor = predictor_of(group, MEMBERS[0])
    predict, calls = predictor.executor.predict, []

    def overflow(image):
        calls.append(len(image))
        return predict(image) * (np.inf if len(calls) == 1 else 1)

    vars(predictor.executor)["predict"] = overflow
    for number in range(2):
        try:
            predictor.segment(IMAGES[0] if group.is_first else None)
        except Unet3dError as error:
            assert number == 0 and "NaN or infinite" in str(error)
        else:
            assert number == 1


def check_end(group, out, how):
    """In the middle of a window, the second rank runs out of memory or dies."""
    swap = GroupMessages.swap

    def failing(self, *arguments):
        if how == "killed":
            os._exit(0)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has none.")

    predictor = predictor_of(group, MEMBERS[0])
    if group.ranks.rank == 1:
        GroupMessages.swap = failing  # type: ignore[method-assign]
    try:
        predictor.segment(IMAGES[0] if group.is_first else None)
    except Unet3dError as error:
        path = out / f"{how}-{group.ranks.rank}.txt"
        path.write_text(f"{type(error).__name__}: {error}")
    finally:
        GroupMessages.swap = swap  # type: ignore[method-assign]
        os._exit(0)


def start(num_ranks, work, *arguments, **settings):
    """Start ranks that are connected and call ``work``; return their process ids."""

    def connected():
        with joined(Ranks.from_environment(), PREDICTION) as group:
            group.open(120)
            work(group, *arguments, **settings)

    return start_ranks(num_ranks, connected)


def main(out):
    """Run every check; on GPUs, leave out lost ranks, which need no GPU."""
    watch.GRACE_SECONDS = 0.1  # the wait before each error of two ranks, one of which is lost
    three = 2 if ON_GPUS else 3
    runs = [
        start(three, check_labels, MEMBERS[:1]),
        start(2, check_labels, MEMBERS[:3], batch_size=2),
        start(2, check_labels, MEMBERS[3:], window="whole"),
        start(2, check_non_finite),
    ]
    if not ON_GPUS:
        runs += [start(2, check_end, out, how) for how in ("memory", "killed")]
    assert dist.is_available()
    sys.exit(any(status for run in runs for status in ends_of(run)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
