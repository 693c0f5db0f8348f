"""What the loop itself decides; what it leads to is in ``test_job``."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from tests.trainings import run, settings
from unet3d.model import LossTerms
from unet3d.reports.progress import ProgressLine
from unet3d.training.loop import TrainingLoop


@pytest.mark.parametrize("save_every_seconds", [0, 1000])
def test_the_live_line_shows_the_loss_of_the_step_before_which_the_gpu_has_left_behind(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_every_seconds: int
) -> None:
    step, taken, shown = TrainingLoop._step, [], []

    def kept(self: TrainingLoop, batch: Any) -> LossTerms:
        terms = step(self, batch)
        taken.append(terms.total.item())
        return terms

    monkeypatch.setattr(TrainingLoop, "_step", kept)
    monkeypatch.setattr(ProgressLine, "wants_loss", lambda self: True)
    monkeypatch.setattr(ProgressLine, "step_done", lambda self, *values: shown.append(values))
    saving = f"training.save_every_seconds={save_every_seconds}"
    run(settings(cache, "training.epochs=2", saving), tmp_path / "run")
    assert [values[:2] for values in shown] == [(0, n) for n in (1, 2, 3, 4)] + [
        (1, n) for n in (1, 2, 3, 4)
    ]
    # An epoch's first step, and the first after a checkpoint, have none before them to wait for.
    alone = range(8) if save_every_seconds == 0 else (0, 4)
    expected = [taken[n] if n in alone else taken[n - 1] for n in range(8)]
    assert [loss for _, _, loss in shown] == expected
    assert len(set(taken)) == 8


def test_an_unexpected_error_leaves_no_loading_process(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They ignore the signal by which Python ends them, so it would never end itself."""
    before = set(multiprocessing.active_children())

    def broken(self: TrainingLoop, batch: Any) -> LossTerms:
        assert set(multiprocessing.active_children()) > before
        raise RuntimeError("out of the blue")

    monkeypatch.setattr(TrainingLoop, "_step", broken)
    with pytest.raises(RuntimeError, match="out of the blue") as kept:
        run(settings(cache, "data.num_workers=1"), tmp_path / "run")
    assert kept.tb is not None, "what an error refers to is kept, as at the end of a program"
    assert set(multiprocessing.active_children()) == before
