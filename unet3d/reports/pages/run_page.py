"""The page of one training: what it came to, its curves, cases, memory and settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unet3d.config import load_config
from unet3d.errors import CheckpointError, Unet3dError, some
from unet3d.inputs.reading import read_bytes
from unet3d.reports.curves import progress_figure
from unet3d.reports.format import amount, unit_for
from unet3d.reports.pages.page import drawing_of, picture_of, render, score
from unet3d.reports.pages.run_files import (
    CaseEntry,
    Cases,
    Data,
    Memory,
    Slot,
    SlotBytes,
    Summary,
    content_of,
)
from unet3d.reports.progress import duration
from unet3d.reports.slots import PARTS, memory_notes
from unet3d.runs.run_folder import BEST, CASES, WORST, RunFolder

MAX_LABEL_COLUMNS = 8
"""Labels that have a column of their own in the table of cases; of more, the lowest is named."""

MAX_SETTINGS_BYTES = 2**20

Row = dict[str, Any]


def run_page(folder: Path) -> str:
    """Return the page of a training, of what its folder holds by now.

    Args:
        folder: That of the run.

    Raises:
        CheckpointError: It is no folder of a run.
    """
    run = RunFolder(folder)
    if not any(file.is_file() for file in (run.data, run.config, run.metrics, run.latest)):
        raise CheckpointError(
            f"{folder} is no folder of a run: it has neither {run.data.name} nor "
            f"{run.config.name}; name one, or a segmentation with --image"
        )
    data, *notes = content_of(run.data, Data)
    summary, note = content_of(run.summary, Summary)
    cases, cases_note = content_of(run.validation / CASES, Cases)
    memory, memory_note = content_of(run.memory, Memory)
    metrics = run.read_metrics()
    settings = _settings(run.config)
    found = _Found(run=run, data=data, summary=summary, cases=cases, memory=memory, metrics=metrics)
    return render(
        "run.html",
        styles=["templates/page.css"],
        scripts=["templates/table.js"],
        title=found.title,
        lead=found.lead,
        notes=[text for text in (*notes, note, cases_note, memory_note) if text],
        figures=found.figures,
        curves=drawing_of(progress_figure(metrics, "")) if metrics else None,
        curves_in_words=found.curves_in_words,
        labels=None if cases is None else _label_rows(cases),
        cases=None if cases is None else _case_rows(cases),
        names=_columns(cases),
        tolerance_mm=None if cases is None else cases.tolerance_mm,
        kept=[] if cases is None else _kept(cases),
        last=found.last_validation if cases is None else None,
        pictures=[
            (caption, picture)
            for name, caption in ((WORST, "the worst case"), (BEST, "the best case"))
            if (picture := picture_of(run.validation / name)) is not None
        ],
        memory=None if memory is None else _memory_table(memory),
        memory_picture=picture_of(run.memory_picture),
        facts=found.facts,
        settings=settings,
    )


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What there is of a run; None: there is no such file, or it is damaged."""

    run: RunFolder
    data: Data | None
    summary: Summary | None
    cases: Cases | None
    memory: Memory | None
    metrics: Sequence[Mapping[str, Any]]

    @property
    def title(self) -> str:
        """Which training it is."""
        path = self.run.path.absolute()
        if self.data is None:
            return path.name
        fold = "every case" if self.data.fold == "none" else f"fold {self.data.fold}"
        name = (
            f"{path.parent.name}/{path.name}" if path.name == f"fold{self.data.fold}" else path.name
        )
        return f"{name}: {fold} of {self._dataset}"

    @property
    def _dataset(self) -> str:
        if self.data is None or self.data.dataset is None:
            return "built-in phantoms"
        path = Path(self.data.dataset)
        return path.parent.name if path.suffix == ".json" else path.name

    @property
    def num_epochs(self) -> int:
        """Epochs that are done."""
        if self.summary is not None:
            return self.summary.epochs
        return int(self.metrics[-1]["epoch"]) if self.metrics else 0

    @property
    def lead(self) -> str:
        """How far it is, in a sentence."""
        if self.summary is not None:
            return f"Finished after {self.num_epochs} epochs, in {duration(self.summary.seconds)}."
        wanted = _epochs_of(self.run.config)
        of = "" if wanted is None else f" of {wanted}"
        return f"Not finished: {self.num_epochs}{of} epochs are done. It may still be running."

    @property
    def last_validation(self) -> Row | None:
        """Dice in the last epoch that ended with a validation."""
        for line in reversed(self.metrics):
            dice = line.get("dice")
            if isinstance(dice, dict):
                return {
                    "epoch": line["epoch"],
                    "dice": {str(name): _number(value) for name, value in dice.items()},
                    "mean": _number(line.get("mean_dice")),
                }
        return None

    @property
    def figures(self) -> list[tuple[str, str, str]]:
        """The numbers that are looked for first: what, how much, and what that is of."""
        figures = []
        if self.cases is not None:
            of = f"{len(self.cases.cases)} validation cases, final network"
            figures.append(("mean Dice", score(self.cases.mean_dice), of))
            for key, what, digits in (("hd95_mm", "mean HD95", 2), ("nsd", "mean NSD", 3)):
                known = [
                    value
                    for one in self.cases.mean.values()
                    if (value := getattr(one, key)) is not None
                ]
                if known:
                    unit = " mm" if key == "hd95_mm" else ""
                    mean = sum(known) / len(known)
                    figures.append((what, f"{mean:.{digits}f}{unit}", f"of {len(known)} labels"))
        elif (last := self.last_validation) is not None:
            figures.append(
                ("mean Dice", score(last["mean"]), f"validation in epoch {last['epoch']}")
            )
        if self.summary is not None:
            figures.append(("time", duration(self.summary.seconds), f"{self.num_epochs} epochs"))
        if self.memory is not None:
            largest = max(self.memory.slots, key=lambda slot: slot.measured.peak_bytes)
            unit, unit_bytes = unit_for(largest.measured.peak_bytes)
            peak = amount(largest.measured.peak_bytes, unit_bytes)
            figures.append(
                ("peak memory", f"{peak} {unit}", f"slot {largest.slot}, {largest.device}")
            )
        return figures

    @property
    def curves_in_words(self) -> str:
        """What the curves show, for who does not see them."""
        words = f"Loss, validation Dice and learning rate over {self.num_epochs} epochs"
        losses = [
            value for line in self.metrics if (value := _number(line.get("loss"))) is not None
        ]
        if losses:
            words += f"; the loss falls from {losses[0]:.3f} to {losses[-1]:.3f}"
            if losses[-1] >= losses[0]:
                words = words.replace("falls", "goes")
        return words

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What was trained where, and with what."""
        facts = []
        if (data := self.data) is not None:
            facts += [
                ("data set", data.dataset or "built-in phantoms"),
                ("fold, seed", f"{data.fold}, {data.seed}"),
                ("training cases", _counted(list(data.training))),
                ("validation cases", _counted(list(data.validation))),
            ]
            prepared = data.preprocessing
            if prepared.channel_names:
                facts.append(("channels", ", ".join(prepared.channel_names)))
            if prepared.label_names:
                facts.append(("labels", ", ".join(prepared.label_names)))
            if prepared.spacing_mm:
                facts.append(
                    ("spacing", " x ".join(f"{mm:g}" for mm in prepared.spacing_mm) + " mm")
                )
        if (summary := self.summary) is not None:
            facts += [
                ("devices", ", ".join(summary.devices)),
                ("parallel mode, precision", f"{summary.parallel}, {summary.precision}"),
            ]
            for what, seconds in (
                ("time of steps", summary.training_seconds),
                ("time of validations", summary.validation_seconds),
                ("time waited for data", summary.waited_seconds),
            ):
                if seconds is not None:
                    facts.append((what, duration(seconds)))
            if summary.best_epoch:
                facts.append(
                    (
                        "best validation",
                        f"Dice {score(summary.best_dice)} in epoch {summary.best_epoch}",
                    )
                )
            versions = [
                f"{name} {version}" for name, version in summary.versions.items() if version
            ]
            facts.append(("versions", ", ".join(versions)))
        elif self.data is not None:
            facts.append(("versions", f"unet3d {self.data.unet3d}"))
        return [(what, value) for what, value in facts if value]


def _settings(path: Path) -> list[str] | None:
    try:
        return read_bytes(path, MAX_SETTINGS_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return None


def _epochs_of(path: Path) -> int | None:
    try:
        return load_config(path, []).training.epochs
    except Unet3dError:
        return None


def _columns(cases: Cases | None) -> list[str]:
    """Return the names of the labels that have columns."""
    if cases is None or len(cases.mean) > MAX_LABEL_COLUMNS:
        return []
    return [cases.name_of(label) for label in cases.mean]


def _label_rows(cases: Cases) -> list[Row]:
    return [{"name": cases.name_of(label), "score": found} for label, found in cases.mean.items()]


def _case_rows(cases: Cases) -> list[Row]:
    """Return the cases, the worst first, those without any Dice last."""
    ordered = sorted(
        cases.cases, key=lambda case: 2.0 if case.mean_dice is None else case.mean_dice
    )
    return [
        {
            "name": case.case,
            "mean": case.mean_dice,
            "dice": [
                found.dice if (found := case.labels.get(label)) else None for label in cases.mean
            ]
            if _columns(cases)
            else [],
            "lowest": _lowest(cases, case),
        }
        for case in ordered
    ]


def _lowest(cases: Cases, case: CaseEntry) -> str:
    """Return the label with the lowest Dice of a case, and that."""
    known = [(found.dice, label) for label, found in case.labels.items() if found.dice is not None]
    if not known:
        return ""
    dice, label = min(known)
    return f"{cases.name_of(label)} {dice:.3f}"


def _kept(cases: Cases) -> list[str]:
    """Return of what only the largest component is kept."""
    kept = []
    for one in cases.postprocessing:
        names = [cases.name_of(str(value)) for value in one.largest_component_of]
        kept.append(
            " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else some(names)
        )
    return kept


def _memory_table(memory: Memory) -> Row:
    unit, unit_bytes = unit_for(max(slot.measured.peak_bytes for slot in memory.slots))

    def cells(found: SlotBytes) -> list[str]:
        return [
            *(amount(getattr(found, f"{part}_bytes"), unit_bytes) for part in PARTS),
            amount(found.peak_bytes, unit_bytes),
        ]

    return {
        "mode": memory.parallel,
        "unit": unit,
        "parts": PARTS,
        "notes": memory_notes([slot.model_dump() for slot in memory.slots]),
        "rows": [
            {
                "slot": slot,
                "blocks": slot.blocks[0]
                + (f" … {slot.blocks[-1]}" if len(slot.blocks) > 1 else ""),
                "measured": cells(slot.measured),
                "predicted": slot.predicted and cells(slot.predicted),
                "apart": _apart(slot),
                "total": amount(slot.device_bytes, unit_bytes),
            }
            for slot in memory.slots
        ],
    }


def _apart(slot: Slot) -> str:
    """Return how far the predicted peak lies from the measured one."""
    if slot.predicted is None or not slot.measured.peak_bytes:
        return ""
    return f"{slot.predicted.peak_bytes / slot.measured.peak_bytes - 1:+.1%}"


def _counted(names: list[str]) -> str:
    return f"{len(names)}: {some(sorted(names))}" if names else "none"


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e30 else None  # type: ignore[arg-type]
