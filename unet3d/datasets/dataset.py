"""A data set on disk: ``dataset.json`` in any of three layouts, read into cases.

==============  ==================================================================================
MSD             ``training: [{image, label}]``, ``modality``, ``labels: {"0": "background", ...}``
nnU-Net v2 raw  ``imagesTr/case_0000.nii.gz`` per channel, ``labelsTr/case.nii.gz``,
                ``channel_names``, ``labels: {"background": 0, ...}``, ``file_ending``
MONAI datalist  ``training: [{image (or a list of them), label, fold}]``, ``validation``
==============  ==================================================================================

A label called ``ignore``, which has the highest value, marks unlabelled voxels. Labels with lists
of values are regions, which may overlap; ``regions_class_order`` has the value that a segmentation
gets in each region.

Files may be links and lie anywhere. A case is named by the path of its label map in the data set's
folder (the full path if the label map lies elsewhere), without ``labelsTr`` and without the ending:
``liver_2``, ``patient_7/seg``. So its name does not depend on other cases. A data set in which two
cases get the same name is refused.

Volumes are opened only if the description does not name channels or labels. A missing file is not
an error yet: ``unet3d.preparation.check`` names all of them at once.
"""

import logging
import os
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from unet3d.config import Reading
from unet3d.datasets.folds import (
    Fold,
    drawn_folds,
    folds_from_numbers,
    read_description,
    read_folds,
)
from unet3d.datasets.labels import Labels
from unet3d.datasets.naming import channel_names, clean_name, read_labels
from unet3d.errors import DatasetError
from unet3d.images.files import SUFFIXES, file_of, store_around, url_of, volume_stem
from unet3d.images.source import AS_STATED
from unet3d.inputs.plain_data import is_printable, shown

logger = logging.getLogger(__name__)

NO_LABEL = "add it, or take the case out of the data set"

LAYOUTS = (
    "a dataset.json with a 'training' list of image and label (Medical Segmentation Decathlon, "
    "MONAI), or one with 'channel_names', 'labels' and 'file_ending' beside imagesTr and labelsTr "
    "(nnU-Net v2)"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """An image and its label map."""

    name: str
    images: tuple[Path, ...]
    """One file per channel, or one file with every channel."""
    label: Path
    reading: Reading = AS_STATED
    """What the user states about its files."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One error or warning about a data set."""

    case: str
    """Name of the case, or of the file or data set if the finding concerns no case."""
    severity: Literal["error", "warning"]
    """An error stops training; a warning does not."""
    message: str


@dataclass(frozen=True, kw_only=True)
class Dataset(Labels):
    """The labelled cases of a data set, and the names of its channels and labels."""

    root: Path
    """Its folder."""
    channel_names: tuple[str, ...]
    cases: tuple[Case, ...]
    validation: tuple[str, ...] = ()
    """Names of cases that the data set itself assigns to validation."""
    folds: tuple[Fold, ...] = ()
    """Folds that the data set itself defines."""
    faults: tuple[Finding, ...] = ()
    """Errors of the description, if its other parts are readable."""


def load_dataset(path: Path, reading: Reading = AS_STATED) -> Dataset:
    """Read the description of a data set: its folder, its ``dataset.json``, or a MONAI datalist."""
    if not path.exists():
        raise DatasetError(f"there is no data set at {path}; give its folder or its dataset.json")
    description = path / "dataset.json" if path.is_dir() else path
    if not description.is_file():
        raise DatasetError(f"{path} holds no dataset.json; a data set is {LAYOUTS}")
    tree = read_description(description)
    if not isinstance(tree, dict):
        raise DatasetError(f"{description} has no known layout; a data set is {LAYOUTS}")
    return _Description(description, tree, reading).dataset()


def folds_of(dataset: Dataset, num_folds: int, seed: int) -> tuple[Fold, ...]:
    """Return all folds of a data set, its own or drawn ones; see :func:`fold_cases`."""
    if dataset.faults:
        fault = dataset.faults[0]
        raise DatasetError(f"{fault.case}: {fault.message}")
    if dataset.folds:
        return dataset.folds
    if dataset.validation:
        return (Fold(validation=dataset.validation),)
    return drawn_folds(tuple(case.name for case in dataset.cases), num_folds, seed)


def fold_cases(
    dataset: Dataset, fold: int | Literal["none"], num_folds: int, seed: int
) -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    """Return the cases to train on and the cases to validate on.

    The folds are the data set's own (``splits_final.json``, else ``fold`` keys). Else, if the data
    set names validation cases, they make one fold; else folds are drawn with the seed, and every
    case is validated once. With fold ``none``, every case is for training.
    """
    if fold == "none":
        return dataset.cases, ()
    by_name = {case.name: case for case in dataset.cases}
    folds = folds_of(dataset, num_folds, seed)
    if fold >= len(folds):
        have = "only fold 0" if len(folds) == 1 else f"folds 0 to {len(folds) - 1}"
        raise DatasetError(f"{dataset.root} has {have}, not fold {fold}; set data.fold accordingly")
    chosen = folds[fold]
    set_aside = {*dataset.validation, *chosen.validation}
    train = chosen.train or tuple(name for name in by_name if name not in set_aside)
    if not train:
        raise DatasetError(f"{dataset.root}: all cases are for validation, and none for training")
    unused = len(by_name) - len(train) - len(chosen.validation)
    if unused:
        logger.warning(
            "%s: fold %d uses %d of %d cases neither for training nor for validation",
            dataset.root,
            fold,
            unused,
            len(by_name),
        )
    return (
        tuple(by_name[name] for name in train),
        tuple(by_name[name] for name in chosen.validation),
    )


class _Description:
    """A ``dataset.json`` and its cases."""

    def __init__(self, path: Path, tree: Mapping[str, Any], reading: Reading) -> None:
        self.path, self.tree, self.reading = path, tree, reading
        self.root = Path(os.path.realpath(path.parent))
        self.cases: dict[str, Case] = {}
        self.fold_of: dict[str, Any] = {}
        self.faults: list[Finding] = []

    def dataset(self) -> Dataset:
        """Read a description of any layout."""
        validation: tuple[str, ...] = ()
        if isinstance(self.tree.get("training"), list):
            self._add_listed("training")
            validation = self._add_listed("validation")
        elif {"channel_names", "labels", "file_ending"} <= self.tree.keys():
            self._add_those_of_nnunet()
        else:
            raise DatasetError(f"{self.path} has no known layout; a data set is {LAYOUTS}")
        if not self.cases:
            ending = self.tree.get("file_ending")
            if "training" not in self.tree and "dataset" not in self.tree:
                raise DatasetError(
                    f"{self.path}: {self.root / 'labelsTr'} holds no file that ends in {ending}; "
                    "correct file_ending, or add the label maps"
                )
            raise DatasetError(f"{self.path} has no labelled case; a data set is {LAYOUTS}")
        folds: tuple[Fold, ...] = ()
        try:
            folds = self._folds(validation)
        except DatasetError as error:
            fault = Finding(case=self.root.name, severity="error", message=str(error))
            self.faults.append(fault)
        cases = tuple(self.cases.values())
        return Dataset(
            root=self.root,
            channel_names=channel_names(self.path, self.tree, cases[:1]),
            **vars(read_labels(self.path, self.tree, cases)),
            cases=cases,
            validation=validation,
            folds=folds,
            faults=tuple(self.faults),
        )

    def _add_listed(self, key: str) -> tuple[str, ...]:
        """Add the cases of a list, as MSD and MONAI have it, and return their names."""
        entries = self.tree.get(key) or []
        if not isinstance(entries, list):
            raise DatasetError(f"{self.path}: {key} is {shown(entries)}; it needs a list")
        known = len(self.cases)
        for index, entry in enumerate(entries):
            self._add(f"{key}[{index}]", entry)
        return tuple(self.cases)[known:]

    def _add_those_of_nnunet(self) -> None:
        """Add the cases of an nnU-Net v2 raw folder, found by name or listed in ``dataset``.

        A name counts as a case if there is a label map or an image of a channel with that name.
        """
        ending = self.tree["file_ending"]
        if not isinstance(ending, str) or ending.lower() not in SUFFIXES:
            raise DatasetError(
                f"{self.path}: file_ending is {shown(ending)}; known: {', '.join(SUFFIXES)}"
            )
        explicit = self.tree.get("dataset")
        if isinstance(explicit, dict):
            for key, entry in explicit.items():
                name = clean_name(self.path, "a case", key)
                if Path(name).is_absolute() or ".." in Path(name).parts:
                    raise DatasetError(f"{self.path}: the case name {name} leads out of its folder")
                named = entry if isinstance(entry, dict) else {}
                renamed = {"image": named.get("images"), "label": named.get("label")}
                self._add(f"dataset.{name}", renamed, name)
            return
        images, labels = (self._volumes_in(name, ending) for name in ("imagesTr", "labelsTr"))
        num_channels = len(channel_names(self.path, self.tree, ()))
        channels = [f"_{channel:04d}" for channel in range(num_channels)]
        of_images = {stem[:-5] for stem in images if stem[-5:] in channels}
        for stem in sorted((of_images | labels.keys()) - {""}, key=lambda stem: stem + ending):
            files = [images.get(stem + number, stem + number + ending) for number in channels]
            label = labels.get(stem, stem + ending)
            paths = [f"imagesTr/{file}" for file in files]
            self._add(stem, {"image": paths, "label": f"labelsTr/{label}"})

    def _volumes_in(self, folder: str, ending: str) -> dict[str, str]:
        """Return the files of a folder by their names without the ending."""
        path = self.root / folder
        if not path.is_dir():
            raise DatasetError(f"{path} is missing; nnU-Net's layout keeps volumes there")
        names = sorted(file.name for file in path.iterdir() if not file.name.startswith("."))
        # Endings are compared without regard to upper and lower case.
        fitting = [name for name in names if name.lower().endswith(ending.lower())]
        return {name[: -len(ending)]: name for name in fitting}

    def _add(self, where: str, entry: Any, name: str | None = None) -> None:
        """Add a case, by default named after its label map; a missing label map is a fault."""
        if not isinstance(entry, dict) or not entry.get("image"):
            raise DatasetError(
                f"{self.path}: {where} needs an image and a label, but is {shown(entry)}"
            )
        named = entry["image"] if isinstance(entry["image"], list) else [entry["image"]]
        images = tuple(self._file(where, image) for image in named)
        if not entry.get("label"):
            missing = f"has no label map: {self.path} names none in {where}; {NO_LABEL}"
            called = name or volume_stem(images[0])
            self.faults.append(Finding(case=called, severity="error", message=missing))
            return
        label = self._file(where, entry["label"])
        called = name or self._name_of(label)
        case = Case(name=called, images=images, label=label, reading=self.reading)
        twin = self.cases.setdefault(case.name, case)
        if twin is not case:
            raise DatasetError(
                f"{self.path}: {twin.label} and {case.label} would both be the case {case.name}; "
                "rename one of them"
            )
        self.fold_of[case.name] = entry.get("fold")

    def _name_of(self, label: Path) -> str:
        """Return the name of a case, which also names its results in a run."""
        while os.path.isdir(label) and (store := store_around(label)):
            label = store  # labels in the store of their image have its name
        file = file_of(label)
        place = Path(os.path.normpath(file))
        if not place.is_relative_to(self.root):  # links may hide that it is inside
            place = Path(os.path.realpath(file.parent), file.name)
        above = self.root if place.is_relative_to(self.root) else Path(place.anchor)
        *folders, _ = place.relative_to(above).parts
        if folders[:1] == ["labelsTr"]:
            del folders[0]
        return unicodedata.normalize("NFC", "/".join([*folders, volume_stem(label)]))

    def _file(self, where: str, text: Any) -> Path:
        """Return the path of a file that is named relative to the data set's folder."""
        if not isinstance(text, str) or not is_printable(text) or Path(text).name in ("", ".."):
            raise DatasetError(
                f"{self.path}: {where} names {shown(text)}; it needs the name of a file, without "
                "control characters"
            )
        if url_of(Path(text)):
            raise DatasetError(
                f"{self.path}: {where} names {shown(text)} on a server; copy it to this machine, "
                "because training hashes and reads whole volumes"
            )
        return self.root / text

    def _folds(self, validation: tuple[str, ...]) -> tuple[Fold, ...]:
        fixed = self.root / "splits_final.json"
        if os.path.lexists(fixed):
            return read_folds(fixed, tuple(self.cases))
        trained = self.fold_of.keys() - {*validation}
        fold_of = {name: fold for name, fold in self.fold_of.items() if name in trained}
        return folds_from_numbers(fold_of, self.path)
