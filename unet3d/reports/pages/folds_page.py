"""The page of a training over several folds: each fold, their mean and spread, and their pages."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from unet3d.reports.pages.page import render
from unet3d.reports.pages.run_files import FoldEntry, FoldsSummary, Summary, content_of
from unet3d.reports.progress import duration
from unet3d.runs.finding import folds_in
from unet3d.runs.run_folder import RunFolder

REPORT = "report.html"
"""Name of a run's page, unless another one is asked for."""


def folds_page(folder: Path, output: Path) -> str:
    """Return the page of a training over several folds.

    Args:
        folder: That of all folds.
        output: Where the page will be; links to the folds' own pages are relative to it.
    """
    runs = folds_in(folder)
    summary, note = content_of(RunFolder(folder).summary, FoldsSummary)
    kind = "final" if summary is not None and summary.final_mean_dice.num_folds else "last"
    folds = {} if summary is None else summary.folds
    num_ended = sum(run.has_summary() for run in runs.values())
    return render(
        "folds.html",
        styles=["templates/page.css"],
        scripts=[],
        title=f"{folder.absolute().name}: {len(runs)} folds",
        lead=f"{num_ended} of {len(runs)} folds have ended.",
        notes=[note] if note else [],
        kind=kind,
        mean=None if summary is None else getattr(summary, f"{kind}_mean_dice"),
        labels=_labels(summary, kind, list(runs)),
        folds=[
            _row(number, run, folds.get(str(number)), kind, output) for number, run in runs.items()
        ],
    )


def _labels(
    summary: FoldsSummary | None, kind: str, numbers: Sequence[int]
) -> list[dict[str, Any]]:
    if summary is None:
        return []
    spreads: Mapping[str, Any] = getattr(summary, f"{kind}_dice")
    folds = [summary.folds.get(str(number)) for number in numbers]
    return [
        {
            "name": name,
            "spread": spread,
            "dice": [fold and (getattr(fold, f"{kind}_dice") or {}).get(name) for fold in folds],
        }
        for name, spread in spreads.items()
    ]


def _row(
    number: int, run: RunFolder, entry: FoldEntry | None, kind: str, output: Path
) -> dict[str, Any]:
    if entry is None:  # the others have not ended
        own, _ = content_of(run.summary, Summary)
        mean = own and (own.final.mean_dice if own.final else own.last_mean_dice)
        epochs, seconds = (own.epochs, own.seconds) if own else (None, None)
    else:
        mean = getattr(entry, f"{kind}_mean_dice")
        epochs, seconds = entry.epochs, entry.seconds
    report = run.path / REPORT
    return {
        "number": number,
        "path": str(run.path),
        "link": _link(report, output) if report.is_file() else None,
        "mean": mean,
        "epochs": epochs,
        "time": None if seconds is None else duration(seconds),
    }


def _link(report: Path, output: Path) -> str:
    """Return the address of a page, as one that is beside it or above it names it."""
    way = os.path.relpath(report.absolute(), output.absolute().parent)
    return quote(os.fsencode(way))
