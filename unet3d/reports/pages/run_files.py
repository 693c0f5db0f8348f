"""What the files of a run hold, as far as a page shows it; from anyone, so all of it is checked.

What a file lacks that an earlier version did not write has a default. A file that is missing or
damaged is a note in words.
"""

from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from unet3d.errors import reason_of
from unet3d.inputs.plain_data import Name, at_most, printable, validated
from unet3d.inputs.reading import read_json

MAX_ENTRIES = 2**16
"""Labels, cases, slots: more than any run has."""

Dice = Annotated[float, Field(ge=0, le=1)]
Millimetres = Annotated[float, Field(ge=0, le=1e12)]
Millilitres = Annotated[float, Field(ge=0, le=1e15)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Bytes = Annotated[int, Field(ge=0, le=2**63)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]
Few = at_most(MAX_ENTRIES)
ByName = dict[Name, Dice | None]


class _Content(BaseModel):
    """Of a file; what a page does not show is left alone."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, frozen=True)


class Final(_Content):
    """The final network on the validation cases, in ``summary.json``."""

    mean_dice: Dice | None = None
    num_cases: Count = 0


class Summary(_Content):
    """``summary.json`` of a run."""

    epochs: Count
    seconds: Seconds
    training_seconds: Seconds | None = None
    validation_seconds: Seconds | None = None
    waited_seconds: Seconds | None = None
    best_dice: float | None = None
    best_epoch: Count | None = None
    last_mean_dice: Dice | None = None
    final: Final | None = None
    parallel: Name = ""
    devices: Annotated[tuple[Name, ...], Few] = ()
    precision: Name = ""
    versions: Annotated[dict[Name, Name | None], Few] = {}


class Preparation(_Content):
    """How cases are prepared, in ``data.json``."""

    spacing_mm: Annotated[tuple[float, ...], Few] = ()
    channel_names: Annotated[tuple[Name, ...], Few] = ()
    label_names: Annotated[tuple[Name, ...], Few] = ()


class Data(_Content):
    """``data.json``."""

    unet3d: Name
    dataset: str | None = None
    fold: Count | Literal["none"] = 0
    seed: int = 0
    preprocessing: Preparation = Preparation()
    training: Annotated[dict[str, str], Few] = {}
    validation: Annotated[dict[str, str], Few] = {}


class Score(_Content):
    """One label of one case, or its means, in ``cases.json``."""

    name: Name | None = None
    dice: Dice | None = None
    hd95_mm: Millimetres | None = None
    nsd: Dice | None = None
    prediction_ml: Millilitres = 0.0
    label_ml: Millilitres = 0.0
    num_cases_dice: Count | None = None


class CaseEntry(_Content):
    """One case in ``cases.json``."""

    case: str
    mean_dice: Dice | None = None
    labels: Annotated[dict[str, Score], Few] = {}


class Kept(_Content):
    """Labels of which only the largest component is kept, in ``cases.json``."""

    largest_component_of: Annotated[tuple[int, ...], Few]


class Cases(_Content):
    """``validation/cases.json``: the scores of each case, the worst first."""

    cases: Annotated[tuple[CaseEntry, ...], Few]
    mean: Annotated[dict[str, Score], Few] = {}
    mean_dice: Dice | None = None
    tolerance_mm: Millimetres = 1.0
    postprocessing: Annotated[tuple[Kept, ...], Few] = ()

    def name_of(self, label: str) -> str:
        """Return what the label of a key or of a value is called: by its name, else by that."""
        having = [key for key in self.mean if label in key.split(",")]
        named = self.mean.get(label if len(having) != 1 else having[0])
        return f"label {label}" if named is None or named.name is None else named.name


class SlotBytes(_Content):
    """Bytes of a slot, measured or predicted, in ``memory.json``."""

    parameters_bytes: Bytes
    gradients_bytes: Bytes
    optimizer_bytes: Bytes
    activations_bytes: Bytes
    peak_bytes: Bytes


class Slot(_Content):
    """A stage's or a slab's place in ``memory.json``."""

    slot: Count
    device: Name
    rank: Count = 0
    device_bytes: Bytes
    blocks: Annotated[tuple[Name, ...], Field(min_length=1), Few]
    predicted: SlotBytes | None = None
    measured: SlotBytes


class Memory(_Content):
    """``memory.json``."""

    parallel: Name
    slots: Annotated[tuple[Slot, ...], Field(min_length=1), Few]


class Spread(_Content):
    """A number over folds in their ``summary.json``."""

    mean: Dice | None = None
    standard_deviation: Dice | None = None
    num_folds: Count = 0


class FoldEntry(_Content):
    """One fold in the ``summary.json`` over folds."""

    final_mean_dice: Dice | None = None
    final_dice: Annotated[ByName, Few] | None = None
    last_mean_dice: Dice | None = None
    last_dice: Annotated[ByName, Few] | None = None
    epochs: Count | None = None
    seconds: Seconds | None = None


class FoldsSummary(_Content):
    """``summary.json`` over folds."""

    folds: Annotated[dict[str, FoldEntry], Few]
    final_mean_dice: Spread = Spread()
    last_mean_dice: Spread = Spread()
    final_dice: Annotated[dict[Name, Spread], Few] = {}
    last_dice: Annotated[dict[Name, Spread], Few] = {}


Content = TypeVar("Content", bound=BaseModel)


def content_of(path: Path, model: type[Content]) -> tuple[Content | None, str | None]:
    """Return what a JSON file holds.

    Args:
        path: The file.
        model: What it should hold.

    Returns:
        The content, or None and why there is none, in words; no words where there is no file.
    """
    try:
        return validated(model, read_json(path)), None
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"{path.name} cannot be read: {reason_of(error)}"
    except ValueError as error:
        return None, f"{path.name} is damaged: {printable(error.args[0], 300)}"
