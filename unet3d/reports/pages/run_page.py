"""The page of one training: what it came to, its curves, cases, memory and settings.

It shows what the folder of the run holds by now. Each part is made of one file; a file that is
missing has no part, and one that is damaged is named.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from unet3d.errors import CheckpointError, reason_of, some
from unet3d.images.units import Units
from unet3d.reports.curves import progress_figure
from unet3d.reports.format import (
    PARTS,
    amount,
    blocks_text,
    duration,
    is_one_cpu,
    measured_slots,
    memory_notes,
    score,
    unit_of,
)
from unet3d.reports.pages.page import drawing_of, picture_of, render
from unet3d.runs.run_folder import BEST, CASES, WORST, RunFolder

MAX_LABEL_COLUMNS = 8
"""Labels that have a column of their own in the table of cases; of more, the lowest is named."""

Content = Mapping[str, Any]
Facts = list[tuple[str, str]]
Figure = tuple[str, str, str]
"""A number that is looked for first: what, how much, and what that is of."""
Part = TypeVar("Part")


def run_page(folder: Path) -> str:
    """Return the page of a training; CheckpointError: the folder is no run's."""
    run = RunFolder(folder)
    if not has_page(run):
        raise CheckpointError(
            f"{folder} is no folder of a run: it has neither {run.data.name} nor "
            f"{run.config.name}; name one, or a segmentation with --image"
        )
    notes: list[str] = []
    settings = part_of(run.config, lambda text: text.splitlines(), notes, Path.read_text)
    data = part_of(run.data, lambda content: _data(folder, content), notes) or {}
    units = data.get("units", Units())
    summary = part_of(run.summary, _summary, notes) or {}
    cases = part_of(run.validation / CASES, lambda content: _cases(content, units), notes)
    memory = part_of(run.memory, _memory, notes)
    metrics = part_of(run.metrics, _metrics, notes, lambda _: run.read_metrics()) or {}
    last = None if cases else metrics.get("last")
    figures = [
        *(cases or {"figures": []})["figures"],
        *([("mean Dice", last["mean"], f"validation in epoch {last['epoch']}")] if last else []),
        *summary.get("figures", []),
        *(memory or {"figures": []})["figures"],
    ]
    return render(
        "run.html",
        styles=["templates/page.css"],
        scripts=["templates/table.js"],
        title=data.get("title", folder.absolute().name),
        lead=summary.get("lead") or _unfinished(metrics.get("num_epochs", 0), settings),
        notes=notes,
        figures=figures,
        curves=metrics.get("curves"),
        curves_in_words=metrics.get("words"),
        cases=cases,
        last=last,
        units=units,
        pictures=[
            (caption, picture)
            for name, caption in ((WORST, "the worst case"), (BEST, "the best case"))
            if (picture := picture_of(run.validation / name)) is not None
        ],
        memory=memory,
        memory_picture=picture_of(run.memory_picture),
        facts=[
            (what, value)
            for what, value in [*data.get("facts", []), *summary.get("facts", [])]
            if value
        ],
        settings=settings,
    )


def has_page(run: RunFolder, is_over_folds: bool = False) -> bool:
    """Tell whether a folder is a run's; where it has folds, whether it is one itself, too."""
    files = [run.data, run.metrics, run.latest]
    return any(file.is_file() for file in [*files, *[run.config] * (not is_over_folds)])


def part_of(
    path: Path,
    make: Callable[[Any], Part],
    notes: list[str],
    read: Callable[[Path], Any] = lambda path: json.loads(path.read_bytes()),
) -> Part | None:
    """Return what a function makes of a file; None, and a note, where that is damaged."""
    if not path.is_file():
        return None
    try:
        return make(read(path))
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {reason_of(error)}")
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
        notes.append(f"{path.name} is damaged, and is left out.")
    return None


def number(value: Any) -> float | None:
    """Return a number of a file's, or None where it has none."""
    return None if value is None else float(value)


def _data(folder: Path, content: Content) -> dict[str, Any]:
    """Return the title, and what was trained on."""
    path, prepared = folder.absolute(), content.get("preprocessing", {})
    dataset, fold = content.get("dataset") or "built-in phantoms", content.get("fold", 0)
    name = f"{path.parent.name}/{path.name}" if path.name == f"fold{fold}" else path.name
    of = Path(dataset).parent.name if dataset.endswith(".json") else Path(dataset).name
    spacing_mm = prepared.get("spacing_mm") or ()
    units = Units.of(spacing_mm)
    return {
        "title": f"{name}: {'every case' if fold == 'none' else f'fold {fold}'} of {of}",
        "units": units,
        "facts": [
            ("data set", dataset),
            ("fold, seed", f"{fold}, {content.get('seed', 0)}"),
            ("training cases", _counted(content.get("training", {}))),
            ("validation cases", _counted(content.get("validation", {}))),
            ("channels", ", ".join(prepared.get("channel_names", ()))),
            ("labels", ", ".join(prepared.get("label_names", ()))),
            ("spacing", units.spacing_text(spacing_mm) if spacing_mm else ""),
            ("made by", f"unet3d {content['unet3d']}"),
        ],
    }


def _summary(content: Content) -> dict[str, Any]:
    """Return what a finished training came to."""
    epochs, seconds = content["epochs"], duration(content["seconds"])
    facts: Facts = [
        ("devices", ", ".join(content.get("devices", ()))),
        ("parallel mode, precision", f"{content.get('parallel')}, {content.get('precision')}"),
    ]
    for what, key in (
        ("time of steps", "training_seconds"),
        ("time of validations", "validation_seconds"),
        ("time waited for data", "waited_seconds"),
    ):
        if content.get(key) is not None:
            facts.append((what, duration(content[key])))
    if content.get("best_epoch"):
        best = f"Dice {score(content.get('best_dice'))} in epoch {content['best_epoch']}"
        facts.append(("best validation", best))
    versions = content.get("versions", {}).items()
    facts.append(("versions", ", ".join(f"{name} {one}" for name, one in versions if one)))
    return {
        "lead": f"Finished after {epochs} epochs, in {seconds}.",
        "figures": [("time", seconds, f"{epochs} epochs")],
        "facts": facts,
    }


def _unfinished(num_epochs: int, settings: Sequence[str] | None) -> str:
    try:
        of = f" of {yaml.safe_load(chr(10).join(settings or ()))['training']['epochs']}"
    except (yaml.YAMLError, TypeError, LookupError):
        of = ""
    return f"Not finished: {num_epochs}{of} epochs are done. It may still be running."


def _metrics(lines: Sequence[Content]) -> dict[str, Any]:
    """Return the curves, in words as well, and the last validation."""
    if not lines:
        return {}
    num_epochs, losses = lines[-1]["epoch"], [line["loss"] for line in lines]
    verb = "falls" if losses[-1] < losses[0] else "goes"
    validated = [line for line in lines if line.get("dice")][-1:]
    last = [
        {
            "epoch": line["epoch"],
            "dice": {name: number(dice) for name, dice in line["dice"].items()},
            "mean": score(line.get("mean_dice")),
        }
        for line in validated
    ]
    return {
        "num_epochs": num_epochs,
        "curves": drawing_of(progress_figure(lines, "")),
        "words": f"Loss, validation Dice and learning rate over {num_epochs} epochs; the loss "
        f"{verb} from {losses[0]:.3f} to {losses[-1]:.3f}",
        "last": last[0] if last else None,
    }


def _cases(content: Content, units: Units) -> dict[str, Any]:
    """Return the scores of the final network on the validation cases: of labels, and of cases."""
    means, cases = content["mean"], content["cases"]
    figures: list[Figure] = [
        (
            "mean Dice",
            score(content.get("mean_dice")),
            f"{len(cases)} validation case{'s' if len(cases) != 1 else ''}, final network",
        )
    ]
    for key, what, digits, unit in (
        ("hd95_mm", "mean HD95", 2, units),
        ("nsd", "mean NSD", 3, None),
    ):
        known = [one[key] for one in means.values() if one.get(key) is not None]
        if known:
            mean = sum(known) / len(known) / (unit.mm if unit else 1)
            text = f"{mean:.{digits}f}{f' {unit.length}' if unit else ''}"
            figures.append((what, text, f"of {len(known)} labels"))

    def name_of(label: str) -> str:
        """Return the name of a label, or of the only region that has it."""
        having = [key for key in means if label in key.split(",")]
        named = means.get(label if len(having) != 1 else having[0], {})
        return named.get("name") or f"label {label}"

    def lowest(labels: Content) -> str:
        known = [
            (one["dice"], label) for label, one in labels.items() if one.get("dice") is not None
        ]
        dice, label = min(known, default=(None, ""))
        return f"{name_of(label)} {score(dice)}" if known else ""

    shown = list(means) if len(means) <= MAX_LABEL_COLUMNS else []
    worst_first = sorted(
        cases, key=lambda case: 2.0 if case.get("mean_dice") is None else case["mean_dice"]
    )
    return {
        "figures": figures,
        "nsd": f"NSD ({units.length_text(content.get('tolerance_mm', 1.0))})",
        "labels": [
            {
                "name": name_of(label),
                "dice": number(one.get("dice")),
                "numbers": [
                    score(None if one.get("hd95_mm") is None else one["hd95_mm"] / units.mm, 2),
                    score(one.get("nsd")),
                    score(one.get("prediction_ml", 0) / units.ml, 2),
                    score(one.get("label_ml", 0) / units.ml, 2),
                    one.get("num_cases_dice", "–"),
                ],
            }
            for label, one in means.items()
        ],
        "names": [name_of(label) for label in shown],
        "cases": [
            {
                "name": case["case"],
                "mean": number(case.get("mean_dice")),
                "dice": [number(case["labels"].get(label, {}).get("dice")) for label in shown],
                "lowest": lowest(case["labels"]),
            }
            for case in worst_first
        ],
        "kept": [
            some([name_of(str(value)) for value in one["largest_component_of"]])
            for one in content.get("postprocessing", ())
        ],
    }


def _memory(content: Content) -> dict[str, Any]:
    """Return the memory of each slot; on one CPU, of the process."""
    slots = measured_slots(content)
    unit, unit_bytes = unit_of(slots)
    largest = max(slots, key=lambda slot: slot["measured"]["peak_bytes"])
    whose = f"slot {largest['slot']}, {largest['device']}"
    peak = f"{amount(largest['measured']['peak_bytes'], unit_bytes)} {unit}"

    def cells(found: Content) -> list[str]:
        return [amount(found[f"{part}_bytes"], unit_bytes) for part in (*PARTS, "peak")]

    return {
        "figures": [("peak memory", peak, "of the process" if is_one_cpu(slots) else whose)],
        "mode": content["parallel"],
        "unit": unit,
        "parts": PARTS,
        "has_slots": not is_one_cpu(slots),
        "notes": memory_notes(slots),
        "rows": [
            {
                "slot": slot["slot"],
                "device": slot["device"] + (f" of rank {slot['rank']}" if slot.get("rank") else ""),
                "blocks": blocks_text(slot["blocks"]),
                "measured": cells(slot["measured"]),
                "predicted": slot.get("predicted") and cells(slot["predicted"]),
                "apart": _apart(slot),
                "total": amount(slot["device_bytes"], unit_bytes),
            }
            for slot in slots
        ],
    }


def _apart(slot: Content) -> str:
    """Return how far the predicted peak lies from the measured one."""
    if not slot.get("predicted") or not slot["measured"]["peak_bytes"]:
        return ""
    return f"{slot['predicted']['peak_bytes'] / slot['measured']['peak_bytes'] - 1:+.1%}"


def _counted(names: Content) -> str:
    return f"{len(names)}: {some(sorted(names))}" if names else "none"
