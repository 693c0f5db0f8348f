"""Decisions of the loop itself; their results are tested in ``test_job``."""

import multiprocessing

import pytest

from tests.trainings import before_steps, losses, run, settings
from unet3d.reports.progress import ProgressLine


def shown_losses(cache, folder, monkeypatch, save_every_seconds):
    """Return the losses on the live line, after checking that each step shows one."""
    shown = []
    monkeypatch.setattr(ProgressLine, "wants_loss", lambda self: True)
    monkeypatch.setattr(ProgressLine, "step_done", lambda self, *values: shown.append(values))
    saving = f"training.save_every_seconds={save_every_seconds}"
    run(settings(cache, "training.epochs=2", saving), folder)
    assert [values[:2] for values in shown] == [(e, n) for e in (0, 1) for n in (1, 2, 3, 4)]
    return [loss for _, _, loss in shown]


@pytest.mark.nightly
def test_the_live_line_shows_the_loss_of_the_step_before_which_the_gpu_has_left_behind(
    cache, tmp_path, monkeypatch
):
    """An epoch's first step, and the first after a checkpoint, have no earlier loss to show."""
    taken = shown_losses(cache, tmp_path / "saving", monkeypatch, 0)
    assert len(set(taken)) == 8
    means = [sum(taken[:4]) / 4, sum(taken[4:]) / 4]
    assert [loss for _, loss in losses(tmp_path / "saving")] == pytest.approx(means)
    shown = shown_losses(cache, tmp_path / "run", monkeypatch, 1000)
    assert shown == [taken[n] for n in (0, 0, 1, 2, 4, 4, 5, 6)]


def test_an_unexpected_error_leaves_no_loading_process(cache, tmp_path):
    """Loading processes ignore the signal by which Python ends its children, so they would stay."""
    before = set(multiprocessing.active_children())

    def fail(number):
        assert set(multiprocessing.active_children()) > before
        raise RuntimeError("out of the blue")

    with before_steps(fail), pytest.raises(RuntimeError, match="out of the blue") as kept:
        run(settings(cache, "data.num_workers=1"), tmp_path / "run")
    assert kept.tb is not None, "what an error refers to is kept, as at the end of a program"
    assert set(multiprocessing.active_children()) == before
