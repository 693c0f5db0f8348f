"""Small data sets, written with nibabel alone, and the message for a volume that is refused."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
import pytest

from unet3d.config import Shape, Spacing
from unet3d.errors import VolumeError
from unet3d.images.geometry import geometry_of_affine, same_grid
from unet3d.images.image import Image, image_of, open_image
from unet3d.images.labels import read_label, write_label
from unet3d.images.source import Source


def write_volume(path: Path, array: npt.NDArray[Any], spacing_mm: Spacing = (1, 1, 1)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(array, np.diag([*spacing_mm, 1.0])), path)
    return path


def held_image(
    array: npt.NDArray[Any],
    slope: float = 1.0,
    inter: float = 0.0,
    spacing_mm: Spacing = (1, 1, 1),
) -> Image:
    """Return an image of an array (C, X, Y, Z) in memory, without a copy."""
    voxels = np.moveaxis(array, 0, 3)
    geometry = geometry_of_affine(Path("held"), voxels.shape, np.diag([*spacing_mm, 1.0]))
    source = Source(geometry, array.dtype, lambda scratch: voxels, slope=slope, inter=inter)
    return image_of([source])


def read_image(path: Path) -> npt.NDArray[np.float32]:
    """Return all voxels (C, X, Y, Z) of an image."""
    return open_image(path).whole()


def loaded(path: Path) -> Any:
    """Return what nibabel loads, even if an uncompressed file's name ends in .gz."""
    if path.name == "notgz_image.nii.gz":
        return nib.Nifti1Image.from_bytes(path.read_bytes())
    return nib.load(path)


def refusal(path: Path, read: Callable[[Path], Any] = read_image) -> str:
    """Return the message of a refusal, after checking that it is one line with the path."""
    with pytest.raises(VolumeError) as caught:
        read(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


def write_json(path: Path, tree: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree))
    return path


def blob_label(shape: Shape, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Return two touching boxes, of the values 1 and 2, at a place that the seed determines."""
    label = np.zeros(shape, np.uint8)
    rng = np.random.default_rng(seed)
    x, y, z = (int(rng.integers(0, size // 2)) for size in shape)
    dx, dy, dz = (max(1, size // 3) for size in shape)
    label[x : x + dx, y : y + dy, z : z + dz] = 1
    label[x + dx : x + 2 * dx, y : y + dy, z : z + dz] = 2
    return label


def msd_entry(number: int, **changes: Any) -> dict[str, Any]:
    """Return the entry of dataset.json for a case of :func:`write_msd`."""
    files = {name: f"./{name}sTr/case_{number}.nii.gz" for name in ("image", "label")}
    return {**files, **changes}


def write_msd(
    root: Path,
    num_cases: int = 3,
    shape: Shape = (12, 14, 10),
    spacing_mm: Spacing = (1, 1, 1),
    modality: str | None = "MRI",
    **changes: Any,
) -> Path:
    """Write a data set in the layout of the Decathlon; ``changes`` go into dataset.json."""
    for number in range(num_cases):
        rng = np.random.default_rng(number)
        label = blob_label(shape, number)
        image = (rng.normal(100, 10, shape) + 50 * label).astype(np.float32)
        write_volume(root / f"imagesTr/case_{number}.nii.gz", image, spacing_mm)
        write_volume(root / f"labelsTr/case_{number}.nii.gz", label, spacing_mm)
    tree = {
        "name": "Sample",
        "modality": modality and {"0": modality},
        "labels": {"0": "background", "1": "left", "2": "right"},
        "training": [msd_entry(number) for number in range(num_cases)],
        "test": [],
    }
    write_json(root / "dataset.json", {**tree, **changes})
    return root


def write_nnunet(
    root: Path, names: Sequence[str] = ("a", "b", "c"), shape: Shape = (4, 4, 4), **changes: Any
) -> Path:
    """Write a raw data set of nnU-Net with two channels; ``changes`` go into dataset.json."""
    for name in names:
        for channel in ("0000", "0001"):
            write_volume(root / f"imagesTr/{name}_{channel}.nii.gz", np.ones(shape, np.float32))
        write_volume(root / f"labelsTr/{name}.nii.gz", blob_label(shape))
    tree = {
        "channel_names": {"0": "CT", "1": "PET"},
        "labels": {"background": 0, "tumour": 2, "liver": 1},
        "file_ending": ".nii.gz",
        "numTraining": len(names),
    }
    write_json(root / "dataset.json", {**tree, **changes})
    return root


SPACING_MM = (0.9765625, 0.8, 3.3)


def noise(shape: tuple[int, ...] = (20, 17, 13), seed: int = 0) -> np.ndarray:
    """Blurred noise around 100, so that no two voxels, and no two corners, are alike."""
    rng = np.random.default_rng(seed)
    waves = sum(
        np.sin(np.indices(shape)[axis] / (2.0 + axis) + seed) * 20 for axis in range(len(shape))
    )
    return (100 + waves + rng.normal(0, 15, shape)).astype(np.float32)


READERS: tuple[Callable[[Path], Any], ...] = (open_image, read_image, read_label)
MAX_BYTES = 2**22
"""Most bytes that reading a small file may allocate for an array, whatever its header claims."""


def read_or_refuse(path: Path) -> None:
    """Read a volume in every way: it is read, with plausible numbers, or refused in one line."""
    for read in READERS:
        try:
            found = read(path)
        except VolumeError as error:
            assert "\n" not in str(error) and str(path.parent) in str(error)
            continue
        geometry = open_image(path).geometry
        assert np.isfinite(geometry.affine).all() and min(geometry.spacing_mm) > 0
        assert same_grid(geometry, geometry) is None
        if read is not open_image:
            array = found if read is read_image else found.array
            assert array.shape[-3:] == geometry.shape
            assert array.nbytes <= MAX_BYTES
        if read is not read_image and np.prod(geometry.shape) < 1000:
            labels = np.zeros(geometry.shape, np.uint8)
            labels[-1, 0, 0] = 1
            written = path.with_name("seg.nii")
            write_label(written, labels, geometry)
            label = read_label(written)
            assert same_grid(label.geometry, geometry) is None
            assert np.array_equal(label.array, labels)
