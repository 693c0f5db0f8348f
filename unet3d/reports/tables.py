"""Numbers, the memory of slots, and tables, which a terminal and a page show alike.

A slot is a stage or a slab on its device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table as TerminalTable
from rich.text import Text

from unet3d.errors import counted, some
from unet3d.images.units import MILLIMETRES, Units

if TYPE_CHECKING:
    from unet3d.inference.evaluation import Evaluation  # which imports PyTorch

MIB = 1024**2
GIB = 1024**3
MIN_BYTES_IN_GIB = 8 * GIB
"""Peaks of at least this many bytes are shown in GiB; parts of a smaller peak would read 0.00."""
NOTHING = "–"
CPU_BOUND = "On a CPU the peak is the sum of the counted parts, so a lower bound."

PARTS = ("parameters", "gradients", "optimizer", "activations")
"""The counted parts of a slot's memory."""
REST = "rest of the peak"
PART_HEADS = ("para-\nmeters", "gradi-\nents", "opti-\nmizer", "acti-\nvations")
"""The parts as heads of columns, broken by hand so that tables fit 80 characters."""

Slots = Sequence[Mapping[str, Any]]
"""The slots of one record, as in ``memory.json`` and ``plan --json``."""
MAX_FOLDS = 6
"""With more folds only their mean and spread are shown, so that a line fits 80 columns."""

Cell = str | float | None
"""Text, or a Dice; None: no Dice."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows in groups, whose first columns hold names and the others numbers."""

    title: str
    heads: Sequence[str]
    """Heads of the columns; long ones contain line breaks, so that a table fits 80 characters."""
    groups: Sequence[Sequence[Sequence[Cell]]]
    num_names: int = 1
    """Number of columns that hold names."""
    notes: Sequence[str] = ()
    """Notes on the numbers."""

    @property
    def whole_heads(self) -> list[str]:
        """The heads, each in one line."""
        return [head.replace("-\n", "").replace("\n", " ") for head in self.heads]

    def for_terminal(self) -> Group:
        """Return the table for rich; nothing in it is markup."""
        # The column divider is a space already.
        table = TerminalTable(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
        for column, head in enumerate(self.heads):
            is_name = column < self.num_names
            table.add_column(head, justify="left" if is_name else "right", no_wrap=not is_name)
        for group in self.groups:
            for number, row in enumerate(group, start=1):
                cells = (cell if isinstance(cell, str) else score(cell) for cell in row)
                table.add_row(*map(Text, cells), end_section=number == len(group))
        return Group(Text(self.title), table, *map(Text, self.notes))


def unit_for(peak_bytes: int) -> tuple[str, int]:
    """Return the most readable unit for a report with this peak, and the bytes in it."""
    return ("GiB", GIB) if peak_bytes >= MIN_BYTES_IN_GIB else ("MiB", MIB)


def amount(num_bytes: int, unit_bytes: int) -> str:
    """Return a number of bytes in a unit, with the digits that matter."""
    amount = num_bytes / unit_bytes
    if amount >= 100:
        return f"{amount:,.0f}"
    if 0 < amount < 0.001:
        return "<0.001"
    return f"{amount:.2f}" if amount >= 0.1 or amount == 0 else f"{amount:.2g}"


def score(value: float | None, digits: int = 3) -> str:
    """Return a score, or a dash where there is none."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def duration(seconds: float) -> str:
    """Return a duration in words, such as ``2 h 05 min`` or ``41 s``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def measured_slots(record: Mapping[str, Any]) -> Slots:
    """Return the slots of a ``memory.json`` as reports show them.

    On one CPU, the peak is the peak of the whole process, which is not predicted.
    """
    slots: Slots = record["slots"]
    if not is_one_cpu(slots):
        return slots
    measured = slots[0]["measured"]
    peak = {"peak_bytes": max(measured["peak_bytes"], measured["reserved_bytes"])}
    return [{**slots[0], "predicted": None, "measured": {**measured, **peak}}]


def is_one_cpu(slots: Slots) -> bool:
    """Tell whether a training run is on one CPU, where there are no slots to compare."""
    return len(slots) == 1 and slots[0]["device"] == "cpu"


def bar_parts(slot: Mapping[str, Any], slots: Slots, kind: str = "measured") -> dict[str, int]:
    """Return the bytes of each part of a slot's peak, ``measured`` or ``predicted``, and the rest.

    The rest of a GPU's peak is work space, which the slots on the GPU share.
    """
    counted = sum(
        other[kind][f"{part}_bytes"]
        for other in slots
        if _place(other) == _place(slot)
        for part in PARTS
    )
    bar = {part: slot[kind][f"{part}_bytes"] for part in PARTS}
    bar[REST] = max(0, slot[kind]["peak_bytes"] - counted)
    return bar


def memory_notes(slots: Slots, kind: str = "measured") -> list[str]:
    """Return notes that explain the numbers of these slots."""
    notes = []
    if is_one_cpu(slots) and kind == "measured":
        notes.append("The peak is that of the whole process, with Python, PyTorch and the data.")
    elif any(slot["device"] == "cpu" for slot in slots):
        notes.append(CPU_BOUND)
    places = [_place(slot) for slot in slots if slot["device"] != "cpu"]
    if len(places) > len(set(places)):
        notes.append("Slots that share a GPU each show the peak of the whole GPU.")
    return notes


def unit_of(slots: Slots, kind: str = "measured") -> tuple[str, int]:
    """Return the unit for these slots by their largest peak, and the bytes in it."""
    return unit_for(max(slot[kind]["peak_bytes"] for slot in slots))


def device_text(slot: Mapping[str, Any]) -> str:
    """Return the device of a slot, with its rank where it is not the first one."""
    return f"{slot['device']}" + (f" of rank {slot['rank']}" if slot.get("rank") else "")


def blocks_text(blocks: Sequence[str]) -> str:
    """Return the first and the last of the blocks of a slot."""
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]} … {blocks[-1]}"


def _place(slot: Mapping[str, Any]) -> tuple[int, str]:
    """Return the place of a slot; ranks of two machines may each have a ``cuda:0``."""
    return slot.get("rank", 0), slot["device"]


def memory_table(record: Mapping[str, Any]) -> Table:
    """Return the memory of each slot in ``memory.json``; on one CPU, of the process."""
    slots = measured_slots(record)
    unit, unit_bytes = unit_of(slots)
    is_process = is_one_cpu(slots)
    rows, reserved = [], {}
    for slot in slots:
        measured, predicted = slot["measured"], slot.get("predicted")
        values = [measured[f"{name}_bytes"] for name in (*PARTS, "peak")]
        values += [predicted and predicted["peak_bytes"], slot["device_bytes"]]
        names = (str(slot["slot"]), device_text(slot), blocks_text(slot["blocks"]))
        numbers = [NOTHING if value is None else amount(value, unit_bytes) for value in values]
        rows.append(("the process", *numbers) if is_process else (*names, *numbers))
        if slot["device"] != "cpu":  # gaps and captured steps included
            size = amount(measured["reserved_bytes"], unit_bytes)
            reserved[names[1]] = f"PyTorch reserved {size} {unit} on {names[1]}."
    return Table(
        title=f"Memory in training ({unit}), parallel mode {record['parallel']}",
        heads=(
            *(("",) if is_process else ("slot", "device", "blocks")),
            *(*PART_HEADS, "peak", "pre-\ndicted", "device\ntotal"),
        ),
        groups=[rows],
        num_names=1 if is_process else 3,
        notes=[*memory_notes(slots), *reserved.values()],
    )


def evaluation_table(evaluation: "Evaluation") -> Table:
    """Return the scores of each case, and their means."""
    units = evaluation.units
    rows = [(case.name, case.scores) for case in evaluation.cases]
    if len(rows) > 1:
        means = {label: evaluation.mean(label) for label in evaluation.labels}
        rows.append((f"mean of {len(rows)} cases", means))
    return Table(
        title="Segmentations compared with labels",
        heads=("case", "label", "Dice", *score_heads(units, evaluation.tolerance_mm)),
        groups=[
            [
                (
                    "" if index else name,
                    evaluation.name_of(label),
                    score(one.dice, 4),
                    *score_cells(asdict(one), units),
                )
                for index, (label, one) in enumerate(scores.items())
            ]
            for name, scores in rows
        ],
        num_names=2,
        notes=[f"Mean Dice over the labels: {score(evaluation.mean_dice, 4)}"],
    )


def score_heads(units: Units, tolerance_mm: float) -> tuple[str, ...]:
    """Return the heads of the columns after Dice."""
    nsd = f"NSD\n({units.length_text(tolerance_mm)})"
    volumes = (f"{whose}\n({units.volume})" for whose in ("segmented", "labelled"))
    return (f"HD95\n({units.length})", nsd, *volumes)


def score_cells(scores: Mapping[str, Any], units: Units) -> tuple[str, ...]:
    """Return the cells after Dice, from a label's scores in ``scores.json`` or ``cases.json``."""
    hd95_mm = scores["hd95_mm"]
    return (
        score(None if hd95_mm is None else hd95_mm / units.mm, 2),
        score(scores["nsd"]),
        *(f"{scores[key] / units.ml:,.3f}" for key in ("prediction_ml", "label_ml")),
    )


def evaluation_lines(evaluation: "Evaluation", is_default_tolerance: bool) -> list[str]:
    """Return notes, a line each: the tolerance of the NSD, and files without a partner."""
    lines = []
    if is_default_tolerance and evaluation.units != MILLIMETRES:
        near = evaluation.units.length_text(evaluation.tolerance_mm)
        lines.append(
            f"NSD counts surfaces within {near}, twice the spacing; --tolerance-mm sets it"
        )
    num_pairs = len(evaluation.cases)
    for without, what, partner in (
        (evaluation.without_prediction, "label maps", "segmentation"),
        (evaluation.without_label, "segmentations", "label map"),
    ):
        if without:
            lines.append(
                f"{len(without)} of the {num_pairs + len(without)} {what} have no {partner} and do "
                f"not count: {some(without)}"
            )
    return lines


def dice_table(final: Mapping[str, Any]) -> Table:
    """Return the Dice of each label and their mean, from ``final`` in a run's ``summary.json``."""
    return Table(
        title=f"Dice of {counted(final['num_cases'], 'validation case')}, as from unet3d predict",
        heads=("label", "Dice"),
        groups=[list(final["dice"].items()), [("mean", final["mean_dice"])]],
    )


def folds_table(summary: Mapping[str, Any]) -> Table:
    """Return the Dice of each label in each fold, from the ``summary.json`` over all folds.

    The scores are of the validation cases, segmented by each fold's final network.
    """
    folds: Mapping[str, Mapping[str, Any]] = summary["folds"]
    shown = list(folds) if len(folds) <= MAX_FOLDS else []

    def row(name: str, dice: Sequence[float | None], spread: Mapping[str, Any]) -> tuple[Cell, ...]:
        return name, *dice, spread["mean"], score(spread["standard_deviation"])

    labels = [
        row(label, [(folds[fold]["final_dice"] or {}).get(label) for fold in shown], spread)
        for label, spread in summary["final_dice"].items()
    ]
    means = [folds[fold]["final_mean_dice"] for fold in shown]
    return Table(
        title=f"Validation Dice of {counted(len(folds), 'fold')}",
        heads=("label", *(f"fold {fold}" for fold in shown), "mean", "std. dev."),
        groups=[labels, [row("mean", means, summary["final_mean_dice"])]],
        notes=[
            "Mean of the best validation Dice during training: "
            f"{score(summary['best_dice']['mean'])}."
        ],
    )
