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
from unet3d.errors import DatasetError, reason_of
from unet3d.images.files import write_nifti
from unet3d.inputs.reading import read_json
from unet3d.terminal import counting

logger = logging.getLogger(__name__)

GENERATOR = 1
"""Raised whenever the same seed gives another head, so that old data sets are not taken for new."""


def write_phantom_dataset(
    folder: Path, num_cases: int, shape: Shape, spacing_mm: Spacing, seed: int
) -> Path:
    """Write a data set of heads in the layout of the Medical Segmentation Decathlon.

    Nothing is written if the folder already holds exactly this data set. The folder appears whole
    or not at all, and several processes may write it at the same time.
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
                    image, labels = head_phantom(case_seed, shape, spacing_mm)
                    for kind, array in (("images", image[0].astype(np.int16)), ("labels", labels)):
                        _write(unfinished / f"{kind}Tr" / name, array, spacing_mm)
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
    """Write a volume whose centre is the origin."""
    affine = np.diag([*spacing_mm, 1.0])
    affine[:3, 3] = -affine.diagonal()[:3] * (np.array(array.shape) - 1) / 2
    image = nib.Nifti1Image(array, affine)
    image.set_qform(affine, code="scanner")
    image.set_sform(affine, code="scanner")
    image.header.set_xyzt_units("mm")
    write_nifti(path, image)
