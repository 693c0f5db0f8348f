"""The page of a training over several folds: each fold, their mean and spread, and their pages."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from unet3d.reports.format import duration, score
from unet3d.reports.pages.page import render
from unet3d.reports.pages.run_page import number, part_of
from unet3d.runs.run_folder import RunFolder


def folds_page(
    folder: Path, runs: Mapping[int, RunFolder], pages: Mapping[int, Path], output: Path
) -> str:
    """Return the page of a training over several folds, with links to pages of single folds.

    The links are relative to the file that the page will be.
    """
    notes: list[str] = []
    summary = part_of(RunFolder(folder).summary, _summary, notes) or {}
    rows = [
        summary.get("folds", {}).get(str(fold)) or part_of(run.summary, _fold, notes)
        for fold, run in runs.items()
    ]
    num_ended = sum(run.has_summary() for run in runs.values())
    return render(
        "folds.html",
        styles=["templates/page.css"],
        scripts=[],
        title=f"{folder.absolute().name}: {len(runs)} folds",
        lead=f"{num_ended} of {len(runs)} folds have ended.",
        notes=notes,
        figures=summary.get("figures", []),
        labels=[
            {**label, "dice": [label["dice"].get(str(fold)) for fold in runs]}
            for label in summary.get("labels", [])
        ],
        folds=[
            {
                "number": fold,
                "link": _link(pages[fold], output) if fold in pages else None,
                **(row or {"mean": None, "epochs": "–", "time": "–"}),
            }
            for fold, row in zip(runs, rows, strict=True)
        ],
    )


def _summary(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``summary.json`` over folds tells of the folds and of the labels."""
    is_final = bool(content["final_mean_dice"]["num_folds"])
    kind = "final" if is_final else "last"
    mean, whose = content[f"{kind}_mean_dice"], "final networks" if is_final else "last validation"
    figures = []
    if mean["mean"] is not None:
        figures.append(("mean Dice", score(mean["mean"]), f"{whose} of {mean['num_folds']} folds"))
    if mean["standard_deviation"] is not None:
        spread = score(mean["standard_deviation"])
        figures.append(("spread", spread, "standard deviation over folds"))
    folds = content["folds"]
    return {
        "figures": figures,
        "folds": {
            index: _row(fold[f"{kind}_mean_dice"], fold["epochs"], fold["seconds"])
            for index, fold in folds.items()
        },
        "labels": [
            {
                "name": name,
                "mean": number(spread["mean"]),
                "spread": score(spread["standard_deviation"]),
                "dice": {
                    index: number((fold[f"{kind}_dice"] or {}).get(name))
                    for index, fold in folds.items()
                },
            }
            for name, spread in content[f"{kind}_dice"].items()
        ],
    }


def _fold(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a fold has come to, of its own ``summary.json``, before the others have ended."""
    final = content.get("final") or {}
    mean = final.get("mean_dice", content.get("last_mean_dice"))
    return _row(mean, content["epochs"], content["seconds"])


def _row(mean: float | None, epochs: int, seconds: float) -> dict[str, Any]:
    return {"mean": number(mean), "epochs": epochs, "time": duration(seconds)}


def _link(page: Path, output: Path) -> str:
    """Return the address of a page, as one that is beside it or above it names it."""
    way = os.path.relpath(page.absolute(), output.absolute().parent)
    return quote(os.fsencode(way))
