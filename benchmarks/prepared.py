"""What prepared volumes take of the disk, and how long a patch takes to cut out of them.

    python benchmarks/prepared.py --dataset ../shared/data/sarcoma_mr --phantom 256,256,256 \
        --json prepared.json

Each data set is prepared as a training prepares it. Beside the folder of its cases stand the one in
the plain form, float32 and uint8 arrays as they are, and nnU-Net's, where ``nnunetv2`` is
installed: ``nnUNetPlans_3d_fullres`` as its own commands make it. A cut opens the files of a case
and copies a random patch of image and label into arrays; where all cases are large enough for the
patch, the same patches are cut out of each form in turn, with all files in memory already.
"""

import argparse
import contextlib
import importlib.metadata
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from common import parse_shape, tuning_key

from unet3d.config import DataSettings, Shape
from unet3d.volumes.cache import CaseRecord, PreparedCase
from unet3d.volumes.dataset import Dataset, load_dataset
from unet3d.volumes.phantom import write_phantom_dataset
from unet3d.volumes.preprocess import plan_preprocessing, prepare_cases

Arrays = tuple[Any, Any]
"""An image and a label map of which slices are arrays, X, Y and Z last."""

Form = dict[str, Callable[[], Arrays]]
"""What opens each case, by name."""

DATASET_ID = 1
CONFIGURATION = "3d_fullres"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dataset", type=Path, action="append", default=[], help="a folder")
    parser.add_argument("--phantom", action="append", default=[], help="shape of phantoms")
    parser.add_argument("--num-cases", type=int, default=10, help="the first of each data set")
    parser.add_argument("--num-phantoms", type=int, default=2)
    parser.add_argument("--shape", default="128,128,128", help="of a patch")
    parser.add_argument("--cuts", type=int, default=100, help="that are timed of each form")
    parser.add_argument("--workers", type=int, default=0, help="processes that prepare")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not arguments.dataset and not arguments.phantom:
        arguments.phantom = ["256,256,256"]
    return arguments


def bytes_of(folder: Path, pattern: str = "*") -> int:
    """Return the bytes of the files of a folder and of the folders in it."""
    return sum(path.stat().st_size for path in folder.rglob(pattern) if path.is_file())


def ours(dataset: Dataset, folder: Path, num_workers: int) -> list[PreparedCase]:
    settings = DataSettings(cache=folder)
    plan, _ = plan_preprocessing(dataset, settings, num_workers)
    return prepare_cases(dataset.cases, plan, folder, num_workers)


def opener(case: PreparedCase) -> Callable[[], Arrays]:
    return lambda: (case.image(), case.label())


def plain(cases: Sequence[PreparedCase], folder: Path) -> Form:
    """Write image and label as float32 and unsigned integers, uncompressed."""
    form = {}
    for case in cases:
        paths = [folder / f"{case.name}-{what}.npy" for what in ("image", "label")]
        np.save(paths[0], np.asarray(case.image(), np.float32))
        np.save(paths[1], np.asarray(case.label()))
        form[case.name] = _opener_of_arrays(*paths)
    return form


def _opener_of_arrays(image: Path, label: Path) -> Callable[[], Arrays]:
    return lambda: (np.load(image, mmap_mode="r"), np.load(label, mmap_mode="r"))


def nnunet(dataset: Dataset, folder: Path) -> tuple[Path, Form]:
    """Prepare with nnU-Net, and return its folder and what opens each case.

    Raises:
        ImportError: It, or something that it needs, is not installed.
    """
    for name in ("raw", "preprocessed", "results"):
        (folder / name).mkdir(parents=True)
        os.environ[f"nnUNet_{name}"] = str(folder / name)
    from nnunetv2.experiment_planning import plan_and_preprocess_api as api
    from nnunetv2.training.dataloading.nnunet_dataset import nnUNetDatasetBlosc2

    name = f"Dataset{DATASET_ID:03d}_Benchmark"
    write_raw(dataset, folder / "raw" / name)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        api.extract_fingerprints([DATASET_ID], num_processes=1, check_dataset_integrity=False)
        api.plan_experiments([DATASET_ID])
        api.preprocess([DATASET_ID], configurations=(CONFIGURATION,), num_processes=(1,))
    prepared = folder / "preprocessed" / name / f"nnUNetPlans_{CONFIGURATION}"
    stored = nnUNetDatasetBlosc2(str(prepared))
    return prepared, {one: _opener_of_nnunet(stored, one) for one in stored.identifiers}


def _opener_of_nnunet(stored: Any, name: str) -> Callable[[], Arrays]:
    def open_case() -> Arrays:
        image, label, *_ = stored.load_case(name)
        return image, label

    return open_case


def write_raw(dataset: Dataset, folder: Path) -> None:
    """Lay a data set out as nnU-Net wants it, with links to the files."""
    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(parents=True)
    for case in dataset.cases:
        for channel, image in enumerate(case.images):
            os.symlink(image.resolve(), folder / f"imagesTr/{case.name}_{channel:04d}.nii.gz")
        os.symlink(case.label.resolve(), folder / f"labelsTr/{case.name}.nii.gz")
    tree = {
        "channel_names": {str(i): name for i, name in enumerate(dataset.channel_names)},
        "labels": dict(zip(dataset.label_names, dataset.label_values, strict=True)),
        "numTraining": len(dataset.cases),
        "file_ending": ".nii.gz",
        "overwrite_image_reader_writer": "NibabelIO",
    }
    (folder / "dataset.json").write_text(json.dumps(tree))


def cut_seconds(forms: dict[str, Form], size: Shape, num_cuts: int) -> dict[str, float] | None:
    """Return the median time of a cut of each form; None where a case is smaller than a patch."""
    shapes = {}
    for form, cases in forms.items():
        for name, open_case in cases.items():
            image, label = open_case()
            np.array(image[...]), np.array(label[...])  # from the disk into memory
            shapes[form, name] = image.shape[-3:]
    if any(
        have < want for shape in shapes.values() for have, want in zip(shape, size, strict=True)
    ):
        return None
    rng = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    names = sorted(set.intersection(*(set(cases) for cases in forms.values())))
    for number in range(num_cuts):
        name = names[number % len(names)]
        place = rng.random(3)
        for form in rng.permutation(list(forms)):  # each after each, as caches remember
            shape = shapes[form, name]
            starts = [int(p * (n - s + 1)) for p, n, s in zip(place, shape, size, strict=True)]
            box = tuple(slice(a, a + s) for a, s in zip(starts, size, strict=True))
            began = time.perf_counter()
            image, label = forms[form][name]()
            _copied(image, box), _copied(label, box)
            seconds[form].append(time.perf_counter() - began)
    return {form: statistics.median(times) for form, times in seconds.items()}


def _copied(array: Any, box: tuple[slice, ...]) -> npt.NDArray[Any]:
    lead = (slice(None),) * (len(array.shape) - 3)
    part: npt.NDArray[Any] = array[(*lead, *box)]
    return part if part.flags.writeable else part.copy()  # of a map


def measure(dataset: Dataset, arguments: argparse.Namespace) -> dict[str, Any]:
    """Prepare one data set in each form."""
    row: dict[str, Any] = {"num_cases": len(dataset.cases)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = ours(dataset, folder / "ours", arguments.workers)
        row["num_voxels"] = sum(int(np.prod(case.label().shape)) for case in cases)
        row["ours_bytes"] = bytes_of(folder / "ours" / "prepared")
        for what in CaseRecord.arrays:
            row[f"ours_{what}_bytes"] = bytes_of(folder / "ours" / "prepared", f"{what}.npy")
        forms = {"ours": {case.name: opener(case) for case in cases}}
        (folder / "plain").mkdir()
        forms["plain"] = plain(cases, folder / "plain")
        row["plain_bytes"] = bytes_of(folder / "plain")
        try:
            theirs, forms["nnunet"] = nnunet(dataset, folder / "nnunet")
            row["nnunet_bytes"] = bytes_of(theirs)
        except ImportError as error:
            row["nnunet_reason"] = f"{type(error).__name__}: {error}"
        row["cut_seconds"] = cut_seconds(forms, parse_shape(arguments.shape), arguments.cuts)
    return row


def datasets(arguments: argparse.Namespace, folder: Path) -> Iterator[Dataset]:
    """Yield the first cases of each data set that was asked for."""
    for path in arguments.dataset:
        dataset = load_dataset(path)
        yield replace(dataset, name=path.name, cases=dataset.cases[: arguments.num_cases])
    for text in arguments.phantom:
        root = folder / text
        write_phantom_dataset(root, arguments.num_phantoms, parse_shape(text), (1.0, 1.0, 1.0), 0)
        yield replace(load_dataset(root), name=f"phantom {text.replace(',', 'x')}")


def show(name: str, row: dict[str, Any]) -> str:
    theirs = row.get("nnunet_bytes")
    sizes = [row["plain_bytes"], row["ours_bytes"], theirs]
    cells = [f"{size / 1e6:9.2f}" if size else f"{'-':>9}" for size in sizes]
    cells.append(f"{row['ours_bytes'] / theirs:9.2f}" if theirs else f"{'-':>9}")
    times = row["cut_seconds"] or {}
    for form in ("plain", "ours", "nnunet"):
        cells.append(f"{times[form] * 1e3:9.2f}" if form in times else f"{'-':>9}")
    return f"{name:24}" + "".join(cells)


def main() -> None:
    """Prepare every data set, print the table, write the record."""
    arguments = parse_arguments()
    heads = ("plain MB", "ours MB", "nnU-Net", "ratio", "plain ms", "ours ms", "nnU-Net")
    print(f"{'':24}" + "".join(f"{head:>9}" for head in heads))
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for dataset in datasets(arguments, Path(folder)):
            rows[dataset.name] = measure(dataset, arguments)
            print(show(dataset.name, rows[dataset.name]), flush=True)
    versions = {}
    for package in ("lz4", "numpy", "nnunetv2", "blosc2"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    record = {
        **tuning_key([torch.device("cpu")], "float32"),
        "versions": versions,
        "size": parse_shape(arguments.shape),
        "rows": rows,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
