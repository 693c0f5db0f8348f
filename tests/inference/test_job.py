"""Which rank segments which scan."""

import threading
from unittest.mock import Mock

from tests.rank_threads import in_threads
from unet3d.config import ParallelSettings
from unet3d.inference import job as job_module
from unet3d.inference.job import Job, Progress
from unet3d.inference.request import PredictionRequest
from unet3d.inference.scan_search import FoundScans
from unet3d.inference.scans import Scan

NUM_BYTES = {"a": 10, "b": 70, "c": 30, "d": 50, "e": 20, "f": 60, "g": 40}


def test_ranks_claim_large_scans_first_and_leave_none_to_a_busy_rank(tmp_path, monkeypatch):
    scans = []
    for name, num_bytes in NUM_BYTES.items():
        (tmp_path / name).write_bytes(bytes(num_bytes))
        scans.append(Scan(images=(tmp_path / name,), output=tmp_path / f"{name}.nii.gz"))
    found = FoundScans(to_segment=tuple(scans), kept=(), faults=())
    segmented, others_are_done, both_began = [], threading.Event(), threading.Barrier(2)

    def segment(job, scan, *_):
        rank = job._group.ranks.rank
        if rank not in [of for of, _ in segmented]:
            both_began.wait(20)
            assert rank == 0 or others_are_done.wait(20)
        segmented.append((rank, scan.images[0].name))
        if len(segmented) == len(scans) - 2:  # the busy rank has claimed two
            others_are_done.set()

    monkeypatch.setattr(Job, "_segment", segment)
    for name in ("Predictor", "ScansAhead", "_log_in_all_ranks"):
        monkeypatch.setattr(job_module, name, Mock())

    def run(group):
        job = Job(found, PredictionRequest(), group, True, Progress(), Mock())
        job.run(Mock(), ParallelSettings())
        assert job.end() is None

    in_threads(2, run)
    by_size = sorted(NUM_BYTES, key=NUM_BYTES.__getitem__, reverse=True)
    assert sorted(name for _, name in segmented) == sorted(NUM_BYTES)
    for rank, number in ((0, 5), (1, 2)):
        own = [name for of, name in segmented if of == rank]
        assert own == [name for name in by_size if name in own] and len(own) == number
