"""Names of the channels and labels of a data set, from its description or its volumes.

Names become keys of metrics and statistics, titles of curves and lines on a terminal. So they are
short text without control characters, and no two labels share a name.
"""

import logging
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from unet3d.datasets.folds import read_description
from unet3d.datasets.labels import MAX_CLASSES, MAX_LABEL_VALUE, Labels, Region, ScoredLabels
from unet3d.errors import ConfigError, DatasetError, counted, some
from unet3d.images.files import is_there
from unet3d.images.image import open_source
from unet3d.images.labels import read_label
from unet3d.inputs.plain_data import is_printable, printable, shown

if TYPE_CHECKING:
    from unet3d.datasets.dataset import Case

logger = logging.getLogger(__name__)

MAX_NAME_LETTERS = 200

IGNORE = "ignore"
"""Name of the label for unlabelled voxels, as in nnU-Net."""


def channel_names(path: Path, tree: Mapping[str, Any], cases: Sequence["Case"]) -> tuple[str, ...]:
    """Return the names of channels in a description, else in the first case; else number them."""
    given = tree.get("channel_names") or tree.get("modality")
    if not given:
        if not cases:
            raise DatasetError(f"{path}: channel_names is empty; name each channel")
        sources = [open_source(image, cases[0].reading) for image in cases[0].images]
        num_channels = sum(source.geometry.num_channels for source in sources)
        stated = [name for source in sources for name in source.channel_names]
        is_named = len(stated) == len({*stated}) == num_channels
        given = stated if is_named else [f"channel {channel}" for channel in range(num_channels)]
    names = given if isinstance(given, (list, dict)) else [given]
    if isinstance(names, dict):
        numbers = [str(number) for number in range(len(names))]
        if set(numbers) != names.keys():
            keys = some([printable(key) for key in names])
            raise DatasetError(f"{path}: the channels are numbered {keys}; use 0, 1, ...")
        names = [names[number] for number in numbers]
    return tuple(clean_name(path, f"channel {number}", name) for number, name in enumerate(names))


def read_labels(path: Path, tree: Mapping[str, Any], cases: Sequence["Case"]) -> Labels:
    """Return the labels of a description, or if it has none, the values in label maps."""
    given = tree.get("labels")
    if given is None:
        return _labels_found_in(cases, path)
    if not isinstance(given, dict):
        raise DatasetError(f"{path}: labels is {shown(given)}; it needs names and values")
    values_of = _values_of_labels(path, given)
    ignored = values_of.pop(IGNORE, None)
    names = {0: "background"}
    names |= {values[0]: name for name, values in values_of.items() if values == (0,)}
    scored = {name: values for name, values in values_of.items() if values != (0,)}
    if names[0] in scored:
        raise DatasetError(f"{path}: two labels are called {names[0]}, one by default; rename one")
    single = {values[0]: name for name, values in scored.items() if len(values) == 1}
    known = sorted({value for values in scored.values() for value in values})
    names |= {value: single.get(value, f"label {value}") for value in known}
    if not known:
        raise DatasetError(f"{path}: labels has only the background; name the other labels")
    if ignored is not None and (len(ignored) > 1 or ignored[0] <= known[-1]):
        raise DatasetError(
            f"{path}: the label {IGNORE} is {some(ignored)}, and the highest other value is "
            f"{known[-1]}; give {IGNORE} one value above it"
        )
    if len(names) > MAX_CLASSES:
        raise DatasetError(f"{path} names {len(names)} labels; use at most {MAX_CLASSES}")
    has_regions = len(single) < len(scored)  # a list of one value is that value, as in nnU-Net
    return Labels(
        label_names=tuple(names.values()),
        label_values=tuple(names),
        ignore_value=None if ignored is None else ignored[0],
        regions=_regions(path, scored, tree.get("regions_class_order")) if has_regions else (),
    )


def _values_of_labels(path: Path, given: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the values of each label or region by its name, ascending."""
    # The Decathlon writes {"1": "tumour"}, nnU-Net {"tumour": 1}, which may be {"1": 1}.
    has_values = any(type(value) in (int, list) for value in given.values())
    by_value = not has_values and all(key.isdecimal() for key in given)
    values_of: dict[str, tuple[int, ...]] = {}
    name_of: dict[tuple[int, ...], str] = {}
    for key, other in given.items():
        text, value = (other, key) if by_value else (key, other)
        name = clean_name(path, f"label {printable(key)}" if by_value else "a label", text)
        if name in values_of:
            raise DatasetError(f"{path}: two labels are both called {name}; give each a name")
        listed = value if isinstance(value, list) else [value]
        values = tuple(sorted({_label_value(path, name, one) for one in listed}))
        if not values or (0 in values and len(values) > 1):
            raise DatasetError(
                f"{path}: region {name} is {shown(value)}; a region is made of labels above 0"
            )
        values_of[name] = values
        if name_of.setdefault(values, name) != name:
            raise DatasetError(
                f"{path}: {name_of[values]} and {name} have the same values, {some(values)}; leave "
                "one out"
            )
    return values_of


def _regions(
    path: Path, values_of: Mapping[str, tuple[int, ...]], order: Any
) -> tuple[Region, ...]:
    """Return nnU-Net's regions, which may overlap; ``order`` has the value written for each."""
    written = order if isinstance(order, list) else []
    known = {value for values in values_of.values() for value in values}
    if len(written) != len(values_of) or not all(type(v) is int and v in known for v in written):
        raise DatasetError(
            f"{path}: regions_class_order is {shown(order)}; name the value that is written for "
            f"each of the {len(values_of)} regions ({some(list(values_of))}), in their order"
        )
    return tuple(
        Region(name=name, values=values, written=value)
        for (name, values), value in zip(values_of.items(), written, strict=True)
    )


def clean_name(path: Path, what: str, text: Any) -> str:
    """Return a name that can be shown, in Unicode's composed form."""
    name = unicodedata.normalize("NFC", text).strip() if isinstance(text, str) else ""
    if not name or len(name) > MAX_NAME_LETTERS or not is_printable(name):
        raise DatasetError(
            f"{path}: {what} is called {shown(text)}; a name is text of 1 to {MAX_NAME_LETTERS} "
            "characters, none of them a control character"
        )
    return name


def _label_value(path: Path, name: str, value: Any) -> int:
    digits = str(value) if type(value) in (int, str) else ""
    if not digits.isdecimal() or len(digits) > 10 or int(digits) > MAX_LABEL_VALUE:
        raise DatasetError(
            f"{path}: label {name} has the value {shown(value)}; use whole numbers from 0 to "
            f"{MAX_LABEL_VALUE}"
        )
    return int(digits)


def _labels_found_in(cases: Sequence["Case"], path: Path) -> Labels:
    logger.warning(
        "%s names no labels: reading all %d label maps to find them; add "
        '"labels": {"background": 0, ...} to save the time',
        path,
        len(cases),
    )
    found: set[int] = {0}
    for case in cases:
        if not is_there(case.label):  # is reported later
            continue
        found.update(np.unique(read_label(case.label, case.reading.near(None)).array).tolist())
        if len(found) > MAX_CLASSES:
            raise DatasetError(
                f"{case.label} holds {len(found)} values; is it an image? name the labels in {path}"
            )
    labels = sorted(found)
    if labels[0] < 0 or len(labels) < 2 or labels[-1] > MAX_LABEL_VALUE:
        raise DatasetError(
            f"{path}: the label maps hold {counted(len(labels), 'value')}, {some(labels)}; the "
            f"background is 0, and labels are above it, up to {MAX_LABEL_VALUE}"
        )
    names = ("background", *(f"label {value}" for value in labels[1:]))
    return Labels(label_names=names, label_values=tuple(labels))


LabelChoice = Mapping[str, Sequence[int | str]] | Sequence[int | str]
"""The labels to use, by name or value: a list, or new names, each with the labels to merge."""

Labelled = TypeVar("Labelled", bound=Labels)


def with_labels(labels: Labelled, choice: LabelChoice) -> Labelled:
    """Return only the labels that ``data.labels`` chooses; all others become background.

    A merged label has the lowest of its values, so values in segmentations occur in the data set.
    """
    name_of = dict(zip(labels.label_values, labels.label_names, strict=True))
    known: dict[str, tuple[int, ...]] = {name: (v,) for v, name in name_of.items() if v}
    known |= {region.name: region.values for region in labels.regions}

    def values_of(one: int | str) -> tuple[int, ...]:
        text = unicodedata.normalize("NFC", str(one)).strip()
        if isinstance(one, str) and text in known:
            return known[text]
        if text.isdecimal() and int(text) and int(text) in name_of:
            return (int(text),)
        have = some([f"{name} ({value})" for value, name in name_of.items() if value])
        raise ConfigError(
            f"data.labels names {printable(text)}, which is not a label of the data set; name "
            "some of "
            f"{have}"
        )

    wanted: list[tuple[str, Sequence[int | str]]]
    if isinstance(choice, Mapping):
        wanted = list(choice.items())
    else:  # a label keeps its name, also where it is chosen by its value
        found = [(one, values_of(one)) for one in choice]
        wanted = [(name_of[v[0]] if len(v) == 1 else str(one), [one]) for one, v in found]
    taken: dict[int, str] = {}
    merged: dict[int, tuple[str, tuple[int, ...]]] = {}
    for text, parts in wanted:
        name = unicodedata.normalize("NFC", text).strip()
        if name in ("", name_of[0], IGNORE):
            raise ConfigError(
                f"data.labels calls a label {printable(text)!r}; give it another name"
            )
        if name in taken.values():
            raise ConfigError(f"data.labels has two labels called {name}; give each a name")
        values = [value for part in parts for value in values_of(part)]
        for value in values:
            if value in taken:
                raise ConfigError(
                    f"data.labels lists {name_of[value]} ({value}) twice, in {taken[value]} and in "
                    f"{name}; list it once"
                )
            taken[value] = name
        merged[min(values)] = name, tuple(sorted(values))
    left_out = tuple(value for value in labels.label_values if value not in taken)
    order = sorted(merged)
    return replace(
        labels,
        label_names=(name_of[0], *(merged[value][0] for value in order)),
        label_values=(0, *order),
        raw_values=(left_out, *(merged[value][1] for value in order)),
        regions=(),
    )


def has_sides(names: Sequence[str]) -> bool:
    """Tell whether the name of a label, or of its partner, says left or right.

    Examples: ``left ventricle``, ``LungLeft``, and ``kidney_l`` beside ``kidney_r``.
    """
    words = (re.findall("[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", name) for name in names)
    known = {" ".join(parts).lower() for parts in words}
    if any(re.search(r"\b(left|right)", name) for name in known):
        return True
    # Short forms (l, lt, lh) and endings count only where the other side is labelled, too.
    partners = {name: re.sub(r"left\b|\bl(?=[th]?\b)", _other_side, name) for name in known}
    return any(other != name and other in known for name, other in partners.items())


def _other_side(left: re.Match[str]) -> str:
    return "right" if left[0] == "left" else "r"


def description_of(labels: Path) -> Path | None:
    """Return ``dataset.json`` beside a folder such as ``labelsTr``, or beside a file's folder."""
    folder = labels if labels.is_dir() else labels.parent
    path = folder.absolute().parent / "dataset.json"
    return path if folder.absolute().name.startswith("labels") and path.is_file() else None


def read_scored_labels(path: Path) -> ScoredLabels:
    """Return the labels of a data set; nothing else in its ``dataset.json`` is read."""
    description = path / "dataset.json" if path.is_dir() else path
    tree = read_description(description)
    if not isinstance(tree, dict) or not tree.get("labels"):
        raise DatasetError(f"{description} names no labels; name a data set that does")
    return ScoredLabels.of(read_labels(description, tree, ()))
