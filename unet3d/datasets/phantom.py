"""The built-in data set: synthetic heads, which need no download."""

import json
import logging
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt

from unet3d.atomic import new_folder
from unet3d.config import Shape, Spacing
from unet3d.datasets.phantom_anatomy import LABEL_NAMES, head_phantom
from unet3d.distributed.workers import counting
from unet3d.errors import DatasetError, reason_of
from unet3d.images.files import write_nifti
from unet3d.inputs.reading import read_json

logger = logging.getLogger(__name__)

GENERATOR = 1
"""Raised whenever the same seed gives another head, so that old data sets are not taken for new."""


def write_phantom_case(
    image_path: Path, label_path: Path, seed: int, shape: Shape, spacing_mm: Spacing
) -> None:
    """Write one head and its label map as NIfTI files whose origin is the centre of the volume.

    Args:
        image_path: A name that ends in .nii or .nii.gz; its folder exists.
        label_path: Likewise.
        seed: Determines the head.
        shape: Voxels along X, Y, Z.
        spacing_mm: Distance of neighbouring voxels along X, Y, Z.

    Raises:
        ConfigError: The shape is too small for a head, or no scan has such a spacing.
        VolumeError: The head does not fit in memory.
        OSError: A file cannot be written.
    """
    image, labels = head_phantom(seed, shape, spacing_mm)
    _write(image_path, image[0].astype(np.int16), spacing_mm)
    _write(label_path, labels, spacing_mm)


def write_phantom_dataset(
    folder: Path, num_cases: int, shape: Shape, spacing_mm: Spacing, seed: int
) -> Path:
    """Write a data set of heads in the layout of the Medical Segmentation Decathlon.

    Nothing is written if the folder already holds exactly this data set. The folder appears whole
    or not at all, and several processes may write it at the same time.

    Args:
        folder: The data set's own folder, with dataset.json, imagesTr and labelsTr.
        num_cases: Cases phantom_000, phantom_001, ...
        shape: Voxels along X, Y, Z of each case.
        spacing_mm: Distance of neighbouring voxels along X, Y, Z.
        seed: Determines every case.

    Returns:
        The folder.

    Raises:
        ConfigError: The shape is too small for a head, or no scan has such a spacing.
        VolumeError: A head does not fit in memory.
        DatasetError: The folder holds something else, or cannot be written.
    """
    names = [f"phantom_{index:03d}.nii.gz" for index in range(num_cases)]
    description = {
        "name": "phantom",
        "description": "Synthetic heads made by unet3d",
        "tensorImageSize": "3D",
        "modality": {"0": "MRI"},
        "labels": {str(value): name for value, name in enumerate(LABEL_NAMES)},
        "numTraining": num_cases,
        "training": [
            {"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"} for name in names
        ],
        "phantom": {
            "generator": GENERATOR,
            "seed": seed,
            "shape": list(shape),
            "spacing_mm": list(map(float, spacing_mm)),
        },
    }
    if _holds(folder, description):
        return folder
    try:
        with new_folder(folder) as unfinished:
            for name in ("imagesTr", "labelsTr"):
                (unfinished / name).mkdir()
            logger.info("making %d phantom cases of shape %s in %s", num_cases, shape, folder)
            with counting("making", num_cases) as watch:
                for index, name in enumerate(names):
                    case_seed = int(np.random.SeedSequence([seed, index]).generate_state(1)[0])
                    write_phantom_case(
                        unfinished / "imagesTr" / name,
                        unfinished / "labelsTr" / name,
                        case_seed,
                        shape,
                        spacing_mm,
                    )
                    watch(index + 1)
            (unfinished / "dataset.json").write_text(json.dumps(description, indent=1))
    except OSError as error:
        if _holds(folder, description):  # another process was faster
            return folder
        raise DatasetError(
            f"cannot write phantom data to {folder}: {reason_of(error)}; set data.cache to a "
            "folder with space that you can write to"
        ) from error
    return folder


def _holds(folder: Path, description: dict[str, Any]) -> bool:
    if not folder.is_dir() or not any(folder.iterdir()):
        return False
    try:
        found = read_json(folder / "dataset.json")
    except (OSError, ValueError):
        found = None
    files = [folder / name for case in description["training"] for name in case.values()]
    if found == description and all(file.is_file() for file in files):
        return True
    raise DatasetError(
        f"{folder} exists and does not hold this phantom data set; delete it or use another folder"
    )


def _write(path: Path, array: npt.NDArray[Any], spacing_mm: Spacing) -> None:
    affine = np.diag([*spacing_mm, 1.0])
    affine[:3, 3] = -affine.diagonal()[:3] * (np.array(array.shape) - 1) / 2
    image = nib.Nifti1Image(array, affine)
    image.set_qform(affine, code="scanner")
    image.set_sform(affine, code="scanner")
    image.header.set_xyzt_units("mm")
    write_nifti(path, image)
