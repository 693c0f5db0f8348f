"""A prediction as a whole: networks, scans and devices, in this process or in one for each device.

All ranks run this program. With slabs of each window they segment every scan together; of a folder
with at least as many scans as devices, each of n ranks has every n-th scan and a device of its own.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from unet3d.config import ParallelSettings
from unet3d.distributed.launcher import launch, meeting_folder
from unet3d.distributed.ranks import PREDICTION, Ranks
from unet3d.distributed.rendezvous import joined
from unet3d.errors import RankError
from unet3d.inference.networks import Networks
from unet3d.inference.placing import choose_mode
from unet3d.inference.predictor import Predictor
from unet3d.inference.request import PredictionRequest
from unet3d.inference.scan_search import FoundScans, find_scans
from unet3d.inference.scans import Scan
from unet3d.inference.segmentation import DrawPreview, Progress, Segmentation, left_words
from unet3d.interruption import Interrupted
from unet3d.nnunet.model_files import known_as
from unet3d.parallel import ParallelDims

logger = logging.getLogger(__name__)

RANK_COMMAND = "predict-as-rank"
"""The command of a rank; its argument is a file with the request."""


def predict(
    request: PredictionRequest,
    ranks: Ranks,
    progress: Progress,
    draw_preview: DrawPreview,
    say: Callable[[str], None] | None = None,
) -> tuple[Path, ...]:
    """Segment scans, and return the segmentations, old and new; all ranks call it.

    Processes that are started write to the terminal, or what is worth a line goes to ``say``.

    Raises Unet3dError, also at the end where some scans could not be segmented.
    """
    parallel = request.placement
    with joined(ranks, PREDICTION) as group:
        group.open(parallel.timeout_seconds)
        paths = request.checkpoints
        # The first rank alone has the files.
        known = [Path(one) for one in group.from_first(lambda: [str(known_as(p)) for p in paths])]
        networks = Networks.read(paths if group.is_first else known, group, request.inference)
        parallel = choose_mode(parallel, networks, ranks)
        dims = ParallelDims.resolve(parallel, ranks=ranks)
        num_channels = len(networks.preprocessing.channels)
        scans = group.from_first(
            lambda: find_scans(request, num_channels),
            to_plain=lambda found: found.model_dump(mode="json"),
            from_plain=FoundScans.model_validate,
        )
        results = tuple(sorted(scan.output for scan in (*scans.kept, *scans.to_segment)))
        is_dealt = dims.mode == "data" and group.size > 1
        will_deal = group.size == 1 and 1 < dims.num_replicas <= len(scans.to_segment)
        if will_deal:
            logger.info("%d scans dealt to %d devices", len(scans.to_segment), dims.num_replicas)
            with _naming_left(scans.to_segment, request.overwrite, progress):
                _start_ranks(request, dims, say)
            return results
        if dims.num_shards > group.size and scans.to_segment:
            _start_ranks(request, dims, say)
            return results
        job = Segmentation(
            scans,
            request,
            known,
            group,
            is_dealt=is_dealt,
            progress=progress,
            draw_preview=draw_preview,
        )
        if is_dealt:  # no other rank says anything because of the scans of this one
            _log_in_all_ranks("unet3d.images", "unet3d.inference.scans")
        job.begin()
        if job.has_work:
            if is_dealt:
                devices = tuple(map(str, dims.devices))
                parallel = ParallelSettings(mode="none", devices=devices)
            predictor = Predictor(
                networks,
                parallel,
                None if is_dealt else group,
                skips_empty=request.skip_background,
            )
            if is_dealt:
                _log_in_all_ranks("unet3d")
            job.segment(predictor)
        job.gather()
    # Only now, because ranks that miss the first one would wait for it.
    if job.error is not None:
        raise job.error
    return results


def _start_ranks(
    request: PredictionRequest, dims: ParallelDims, say: Callable[[str], None] | None
) -> None:
    """Segment in a process for each device."""
    devices = list(map(str, dims.all_devices))
    placement = {"parallel.mode": dims.mode, "parallel.devices": devices}
    asked = request.model_copy(update={"settings": {**request.settings, **placement}})
    with meeting_folder() as folder:
        path = folder / "request.json"
        path.write_text(json.dumps(asked.model_dump(mode="json")))
        launch(
            [RANK_COMMAND, str(path)],
            folder,
            num_ranks=dims.num_processes,
            max_restarts=0,
            on_gpus=any(device.type == "cuda" for device in dims.all_devices),
            purpose=PREDICTION,
            say=say,
        )


def _log_in_all_ranks(*names: str) -> None:
    """Let this rank log there, too."""
    level = logging.getLogger("unet3d").level
    for name in names:
        logging.getLogger(name).setLevel(min(level, logging.INFO))


@contextmanager
def _naming_left(scans: Sequence[Scan], overwrite: bool, progress: Progress) -> Iterator[None]:
    """Return a context in which ranks segment scans, and which says what they leave."""
    began = time.time()
    try:
        yield
    except (Interrupted, RankError):
        left = [scan for scan in scans if not _is_written(scan.output, began)]
        if left:
            progress.left(left_words(left, overwrite))
        raise


def _is_written(path: Path, began: float) -> bool:
    try:
        return path.stat().st_mtime >= began - 0.1  # clocks of file systems tick more slowly
    except OSError:
        return False
