"""A complete prediction: scan by scan, from file to file, in this process or in several ranks.

All ranks run this program. In mode spatial, they segment every scan together, with a slab of each
window. In mode data, for folders with at least as many scans as devices, each rank has a device,
and claims one scan after another.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from unet3d.config import ParallelSettings
from unet3d.distributed import is_launched
from unet3d.distributed.commands import end_waiting
from unet3d.distributed.ranks import PREDICTION, Ranks
from unet3d.distributed.rendezvous import joined
from unet3d.errors import (
    CheckpointError,
    ConfigError,
    RankError,
    counted,
    some,
)
from unet3d.inference.job import DrawPreview, Job, Progress
from unet3d.inference.networks import Networks
from unet3d.inference.placing import choose_mode
from unet3d.inference.request import PredictionRequest
from unet3d.inference.scan_search import FoundScans, find_scans
from unet3d.interruption import Interrupted
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

    Started processes write to the terminal; if ``say`` is given, they also log their results, and
    ``say`` gets the lines of their logs.

    Raises Unet3dError, also at the end if some scans could not be segmented.
    """
    parallel = request.placement
    with joined(ranks, PREDICTION) as group:
        group.open(parallel.timeout_seconds)
        networks = Networks.read(request.checkpoints, group, request.inference)
        parallel = choose_mode(parallel, networks, ranks)
        dims = ParallelDims.resolve(parallel, ranks=ranks)
        preparation = networks.preprocessing
        scans = group.from_first(
            lambda: find_scans(request, len(preparation.channels), preparation.spacing_mm),
            to_plain=lambda found: found.model_dump(mode="json"),
            from_plain=FoundScans.model_validate,
        )
        results = tuple(sorted(scan.output for scan in (*scans.kept, *scans.to_segment)))
        num_left = len(scans.to_segment)
        # If a command has started the ranks, it reports unfinished scans itself.
        says = group.is_first and not is_launched()
        with _naming_left(scans, request.overwrite, progress if says else None):
            in_blocks = any(scan.in_blocks for scan in scans.to_segment)
            if in_blocks and dims.num_shards > 1:
                raise ConfigError(
                    "a result in blocks is computed by devices that each have whole windows; take "
                    "smaller windows (--window), --parallel data, or --parallel model"
                )
            # Each device has blocks of its own.
            will_deal = group.size == 1 and 1 < dims.num_replicas <= (
                dims.num_replicas if in_blocks else num_left
            )
            if will_deal:
                what = "blocks" if in_blocks else counted(num_left, "scan")
                logger.info("distributing %s over %d devices", what, dims.num_replicas)
            if will_deal or (dims.num_shards > group.size and num_left):
                _start_ranks(request, dims, say)
                return results
            end_waiting()
            is_dealt = dims.mode == "data" and group.size > 1
            on_cpu = all(device.type == "cpu" for device in dims.all_devices)
            if in_blocks and on_cpu and "inference.precision" not in request.inference:
                # By default the faster type is measured, which may differ between processes.
                networks = networks.with_settings({"inference.precision": "float32"})
            job = Job(scans, request, group, is_dealt, progress, draw_preview)
            if is_dealt:
                devices = tuple(map(str, dims.devices))
                parallel = ParallelSettings(mode="none", devices=devices)
            job.run(networks, parallel)
            error = job.end()
    # Not earlier, because other ranks would wait for the first one.
    if error is not None:
        raise error
    return results


def _start_ranks(
    request: PredictionRequest, dims: ParallelDims, say: Callable[[str], None] | None
) -> None:
    """Segment the scans in processes that are started, one for each device."""
    from unet3d.distributed.launcher import launch, meeting_folder  # few predictions have ranks

    devices = list(map(str, dims.all_devices))
    placement = {"parallel.mode": dims.mode, "parallel.devices": devices}
    asked = request.model_copy(update={"settings": {**request.settings, **placement}})
    with meeting_folder() as folder:
        path = folder / "request.json"
        path.write_text(json.dumps(asked.model_dump(mode="json")))
        launch(
            [RANK_COMMAND, str(path), *["--log"] * (say is not None)],
            folder,
            num_ranks=dims.num_processes,
            max_restarts=0,
            on_gpus=any(device.type == "cuda" for device in dims.all_devices),
            purpose=PREDICTION,
            say=say,
        )


@contextmanager
def _naming_left(scans: FoundScans, overwrite: bool, progress: Progress | None) -> Iterator[None]:
    """Return a context for segmenting scans, which reports unfinished scans on an interruption."""
    began = time.time()
    try:
        yield
    except (Interrupted, KeyboardInterrupt, RankError, CheckpointError):
        left = [one.images[0] for one in scans.to_segment if not _is_written(one.output, began)]
        if progress is not None and left and scans.number > 1:
            # With --overwrite, the same command would segment the finished scans again.
            advice = "name these" if overwrite else "give the same command again"
            progress.warned("Not segmented", f"{some(left)}; to go on, {advice}")
        raise


def _is_written(path: Path, began: float) -> bool:
    try:
        return path.stat().st_mtime >= began - 0.1  # times of files are coarser than the clock
    except OSError:
        return False
