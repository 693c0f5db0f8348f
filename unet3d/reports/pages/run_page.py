"""The page of a training run (results, curves, cases, memory, settings), and of its folds.

It shows the current content of the run's folder. Each part comes from one file. If the file is
missing, the part is left out; if it is damaged, the page says so.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from markupsafe import Markup

from unet3d.errors import CheckpointError, counted, reason_of, some
from unet3d.images.units import Units
from unet3d.reports.curves import progress_figure
from unet3d.reports.pages.page import drawing_of, is_page, picture_of, render
from unet3d.reports.tables import (
    NOTHING,
    Cell,
    Table,
    amount,
    duration,
    folds_table,
    is_one_cpu,
    measured_slots,
    memory_table,
    score,
    score_cells,
    score_heads,
    unit_of,
)
from unet3d.runs.run_folder import BEST, CASES, WORST, RunFolder, folds_in

REPORT = "report.html"
"""Name of a run's page, unless another one is asked for."""
MAX_LABEL_COLUMNS = 8
"""Most labels with their own column in the table of cases. With more labels, the table names only
the lowest Dice of a case."""

Content = Mapping[str, Any]
Facts = list[tuple[str, str]]
Figure = tuple[str, str, str]
"""A headline number: name, value, and what it refers to."""
Part = TypeVar("Part")


def pages_of_run(folder: Path, output: Path) -> Iterator[tuple[Path, str, Path]]:
    """Yield the pages of a run, each with its folder and path; pages of folds come first.

    A fold gets no page if its page would replace another file.
    """
    folds = folds_in(folder)
    if not folds or has_page(RunFolder(folder), is_over_folds=True):
        yield folder, run_page(folder), output
        return
    pages = {}
    for fold, run in folds.items():
        place = run.path / REPORT
        if has_page(run) and (is_page(place) or not os.path.lexists(place)):
            yield run.path, run_page(run.path), place
            pages[fold] = place
    yield folder, folds_page(folder, folds, pages, output), output


def run_page(folder: Path) -> str:
    """Return the page of a training run; CheckpointError if it is not a run's folder."""
    run = RunFolder(folder)
    if not has_page(run):
        raise CheckpointError(
            f"{folder} is not the folder of a run: it has neither {run.data.name} nor "
            f"{run.config.name}; name a run, or a segmentation with --image"
        )
    notes: list[str] = []
    settings = part_of(run.config, lambda text: text.splitlines(), notes, Path.read_text)
    data = part_of(run.data, lambda content: _data(folder, content), notes) or {}
    units = data.get("units", Units())
    summary = part_of(run.summary, _summary, notes) or {}
    metrics = part_of(run.metrics, _metrics, notes, lambda _: run.read_metrics()) or {}
    cases = part_of(run.validation / CASES, lambda content: _cases(content, units), notes)
    validation = cases or metrics.get("last") or {}
    memory = part_of(run.memory, lambda content: (memory_table(content), _peak(content)), notes)
    return render(
        "run.html",
        styles=["templates/page.css"],
        scripts=["templates/table.js"],
        title=data.get("title", folder.absolute().name),
        lead=summary.get("lead") or _unfinished(metrics.get("num_epochs", 0), settings),
        notes=notes,
        figures=[
            *validation.get("figures", []),
            *summary.get("figures", []),
            *([memory[1]] if memory else []),
        ],
        curves=metrics.get("curves"),
        curves_in_words=metrics.get("words"),
        labels=validation.get("labels"),
        labels_are=validation.get("labels_are"),
        cases=validation.get("cases"),
        pictures=[
            (caption, picture)
            for name, caption in ((WORST, "the worst case"), (BEST, "the best case"))
            if (picture := picture_of(run.validation / name)) is not None
        ],
        memory=memory and memory[0],
        memory_picture=picture_of(run.memory_picture),
        facts=[
            (what, value)
            for what, value in [*data.get("facts", []), *summary.get("facts", [])]
            if value
        ],
        settings=settings,
    )


def has_page(run: RunFolder, is_over_folds: bool = False) -> bool:
    """Tell whether a folder holds a run, and not only the folders of a run's folds."""
    files = [run.data, run.metrics, run.latest]
    return any(file.is_file() for file in [*files, *[run.config] * (not is_over_folds)])


def part_of(
    path: Path,
    make: Callable[[Any], Part],
    notes: list[str],
    read: Callable[[Path], Any] = lambda path: json.loads(path.read_bytes()),
) -> Part | None:
    """Return a function's result for a file; None: it is missing or, with a note, damaged."""
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
    """Return a number from a file; None: the file has none."""
    return None if value is None else float(value)


def _data(folder: Path, content: Content) -> dict[str, Any]:
    """Return the title, the units, and facts about the data."""
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
    """Return the results of a finished run."""
    epochs, seconds = content["epochs"], duration(content["seconds"])
    facts: Facts = [
        ("devices", ", ".join(content.get("devices", ()))),
        ("parallel mode, precision", f"{content.get('parallel')}, {content.get('precision')}"),
    ]
    for what, key in (
        ("time of steps", "training_seconds"),
        ("time of validations", "validation_seconds"),
        ("time spent waiting for data", "waited_seconds"),
    ):
        if content.get(key) is not None:
            facts.append((what, duration(content[key])))
    if content.get("best_epoch"):
        best = f"Dice {score(content.get('best_dice'))} in epoch {content['best_epoch']}"
        facts.append(("best validation", best))
    versions = content.get("versions", {}).items()
    facts.append(("versions", ", ".join(f"{name} {one}" for name, one in versions if one)))
    return {
        "lead": f"Finished after {counted(epochs, 'epoch')}, in {seconds}.",
        "figures": [("time", seconds, counted(epochs, "epoch"))],
        "facts": facts,
    }


def _unfinished(num_epochs: int, settings: Sequence[str] | None) -> str:
    wanted = [line.split()[-1] for line in settings or () if line.startswith("  epochs: ")]
    done = f"{num_epochs} of {wanted[0]} epochs" if wanted else counted(num_epochs, "epoch")
    return f"Not finished: {done} done. The run may still be training."


def _metrics(lines: Sequence[Content]) -> dict[str, Any]:
    """Return the curves, in words as well, and the last validation."""
    if not lines:
        return {}
    num_epochs, losses = lines[-1]["epoch"], [line["loss"] for line in lines]
    verb = "falls" if losses[-1] < losses[0] else "goes"
    validated = [line for line in lines if line.get("dice")]
    return {
        "num_epochs": num_epochs,
        "curves": drawing_of(progress_figure(lines, "")),
        "words": "Loss, validation Dice and learning rate over "
        f"{counted(num_epochs, 'epoch')}; the loss {verb} from {losses[0]:.3f} to {losses[-1]:.3f}",
        "last": _validation(validated[-1]) if validated else None,
    }


def _validation(line: Content) -> dict[str, Any]:
    """Return the scores of a validation during training."""
    where = f"validation in epoch {line['epoch']}"
    rows = [(name, number(dice)) for name, dice in line["dice"].items()]
    return {
        "figures": [("mean Dice", score(line.get("mean_dice")), where)],
        "labels": Table(title="Dice of each label", heads=("label", "Dice"), groups=[rows]),
        "labels_are": "The final network has not segmented the validation cases. The Dice below is "
        f"from the {where}.",
    }


def _cases(content: Content, units: Units) -> dict[str, Any]:
    """Return the final network's scores on the validation cases, for each label and each case."""
    means, cases = content["mean"], content["cases"]
    tolerance_mm = content["tolerance_mm"]

    def name_of(label: str) -> str:
        """Return the name of a label, or of the only region that has it."""
        having = [key for key in means if label in key.split(",")]
        named = means.get(label if len(having) != 1 else having[0], {})
        return named.get("name") or f"label {label}"

    def dice_of(labels: Content) -> list[Cell]:
        """Return the Dice of each label of a case; of many labels, only the lowest, named."""
        if len(means) <= MAX_LABEL_COLUMNS:
            return [number(labels.get(label, {}).get("dice")) for label in means]
        known = [(one["dice"], label) for label, one in labels.items() if one["dice"] is not None]
        return [f"{name_of(min(known)[1])} {score(min(known)[0])}" if known else ""]

    figures = [
        ("mean Dice", score(content["mean_dice"]), f"{counted(len(cases), 'case')}, final network")
    ]
    for key, what, text in (
        ("hd95_mm", "mean HD95", units.length_text),
        ("nsd", "mean NSD", score),
    ):
        known = [one[key] for one in means.values() if one[key] is not None]
        if known:
            figures.append(
                (what, text(sum(known) / len(known)), f"of {counted(len(known), 'label')}")
            )
    rules = [one["largest_component_of"] for one in content["postprocessing"]]
    kept = [
        some([name_of(str(value)) for value in rule]) + (" together" if len(rule) > 1 else "")
        for rule in rules
    ]
    worst_first = sorted(
        cases, key=lambda case: 2.0 if case["mean_dice"] is None else case["mean_dice"]
    )
    names = [name_of(label) for label in means]
    return {
        "figures": figures,
        "labels": Table(
            title="Scores of each label",
            heads=("label", "Dice", *score_heads(units, tolerance_mm), "cases"),
            groups=[
                [
                    (
                        name_of(label),
                        number(one["dice"]),
                        *score_cells(one, units),
                        str(one["num_cases_dice"]),
                    )
                    for label, one in means.items()
                ]
            ],
        ),
        "labels_are": "Means over the validation cases, segmented with the final network as by "
        "unet3d predict."
        + (f" Only the largest component is kept of {'; of '.join(kept)}." if kept else ""),
        "cases": Table(
            title="Dice of each case",
            heads=("case", "mean", *(names if len(names) <= MAX_LABEL_COLUMNS else ("lowest",))),
            groups=[
                [
                    (case["case"], number(case["mean_dice"]), *dice_of(case["labels"]))
                    for case in worst_first
                ]
            ],
        ),
    }


def _peak(content: Content) -> Figure:
    """Return the highest peak of memory and its device."""
    slots = measured_slots(content)
    unit, unit_bytes = unit_of(slots)
    largest = max(slots, key=lambda slot: slot["measured"]["peak_bytes"])
    whose = f"slot {largest['slot']}, {largest['device']}"
    peak = f"{amount(largest['measured']['peak_bytes'], unit_bytes)} {unit}"
    return "peak memory", peak, "of the process" if is_one_cpu(slots) else whose


def _counted(names: Content) -> str:
    return f"{len(names)}: {some(sorted(names))}" if names else "none"


def folds_page(
    folder: Path, runs: Mapping[int, RunFolder], pages: Mapping[int, Path], output: Path
) -> str:
    """Return the page of a run over several folds, with links to pages of single folds.

    The links are relative to ``output``, the file of the page.
    """
    notes: list[str] = []
    summary = part_of(RunFolder(folder).summary, _of_folds, notes) or {}
    num_ended = sum(run.has_summary() for run in runs.values())
    rows = []
    for fold, run in runs.items():
        found = part_of(run.summary, _of_fold, notes) or (None, NOTHING, NOTHING)
        link = "not started"
        if fold in pages:
            address = os.path.relpath(pages[fold].absolute(), output.absolute().parent)
            link = Markup('<a href="{}">report of fold {}</a>').format(
                quote(os.fsencode(address)), fold
            )
        rows.append((f"fold {fold}", *found, link))
    heads = ("fold", "mean Dice", "epochs", "time", "page")
    return render(
        "folds.html",
        styles=["templates/page.css"],
        scripts=[],
        title=f"{folder.absolute().name}: {counted(len(runs), 'fold')}",
        lead=f"Finished: {num_ended} of {counted(len(runs), 'fold')}.",
        notes=notes,
        figures=summary.get("figures", ()),
        folds=Table(title="The folds", heads=heads, groups=[rows]),
        labels=summary.get("labels"),
    )


def _of_folds(content: Content) -> dict[str, Any]:
    """Return the mean Dice and the table of labels in ``summary.json`` over folds."""
    mean = content["final_mean_dice"]
    whose = f"final networks of {counted(mean['num_folds'], 'fold')}"
    return {"figures": [("mean Dice", score(mean["mean"]), whose)], "labels": folds_table(content)}


def _of_fold(content: Content) -> tuple[Cell, ...]:
    """Return the results of a fold: its mean Dice, epochs and time."""
    final = content.get("final") or {}
    return number(final.get("mean_dice")), str(content["epochs"]), duration(content["seconds"])
