"""Which labels of a data set are trained, and which are merged: the setting ``data.labels``."""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace

from unet3d.datasets.dataset import Dataset
from unet3d.datasets.naming import IGNORE
from unet3d.errors import ConfigError
from unet3d.inputs.plain_data import printable

LabelChoice = Mapping[str, Sequence[int | str]] | Sequence[int | str]
"""New names and what each is made of, or the labels that keep their names; by name or by value."""


def with_labels(dataset: Dataset, choice: LabelChoice) -> Dataset:
    """Return a data set with the chosen labels alone; voxels of all others are background.

    A label that several are merged to has the lowest of their values, so that segmentations have
    values of the data set.
    """
    name_of = dict(zip(dataset.label_values, dataset.label_names, strict=True))
    if isinstance(choice, Mapping):
        wanted = list(choice.items())
    else:
        wanted = [(_name_of(one, dataset, name_of), [one]) for one in choice]
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
        values = [value for part in parts for value in _values_of(part, dataset, name_of)]
        for value in values:
            if value in taken:
                raise ConfigError(
                    f"data.labels lists {name_of[value]} ({value}) twice, in {taken[value]} and in "
                    f"{name}; list it once"
                )
            taken[value] = name
        merged[min(values)] = name, tuple(sorted(values))
    left_out = tuple(value for value in dataset.label_values if value not in taken)
    order = sorted(merged)
    return replace(
        dataset,
        label_names=(name_of[0], *(merged[value][0] for value in order)),
        label_values=(0, *order),
        raw_values=(left_out, *(merged[value][1] for value in order)),
        regions=(),
    )


def _name_of(one: int | str, dataset: Dataset, name_of: Mapping[int, str]) -> str:
    """Return the name that a label keeps."""
    values = _values_of(one, dataset, name_of)
    return name_of[values[0]] if len(values) == 1 else str(one)


def _values_of(one: int | str, dataset: Dataset, name_of: Mapping[int, str]) -> tuple[int, ...]:
    """Return the values of a label or region that is given by its name, or by its value."""
    text = unicodedata.normalize("NFC", str(one)).strip()
    named: dict[str, tuple[int, ...]] = {n: (value,) for value, n in name_of.items() if value}
    named |= {region.name: region.values for region in dataset.regions}
    if isinstance(one, str) and text in named:
        return named[text]
    if text.isdecimal() and int(text) in name_of and int(text):
        return (int(text),)
    known = ", ".join(f"{name} ({value})" for value, name in [*name_of.items()][1:9])
    raise ConfigError(
        f"data.labels names {printable(text)}, which is no label of {dataset.root}; name some of "
        f"{known}" + (f" and {len(name_of) - 9} more" if len(name_of) > 9 else "")
    )
