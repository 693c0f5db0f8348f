"""Models of nnU-Net that are recorded with what it makes of scans, and what it is to agree."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt

FOLDER = Path(__file__).resolve().parent.parent / "recorded" / "nnunet"

KINDS = ("isotropic", "thick_slices", "regions")

SUFFIX = ".nii.gz"

MAX_SHARE = 1e-4
"""Of the voxels of a scan that may differ."""

MIN_DICE = 0.9995
"""Of each label, over all scans together."""

MAX_VOXELS = 2
"""That may differ in any case: nnU-Net adds up logits in float16, and a small scan has voxels that
hang on its last digit."""

Segmentations = Mapping[str, nib.Nifti1Image]
"""By the names of the scans."""


def model_of(kind: str) -> Path:
    """Return the folder of a model as nnU-Net lays it out."""
    (plans,) = (FOLDER / kind).glob("*/plans.json")
    return plans.parent


def plans_of(model: Path) -> dict[str, Any]:
    """Return the plans of a model."""
    plans: dict[str, Any] = json.loads((model / "plans.json").read_text())
    return plans


def scans_of(kind: str) -> list[str]:
    """Return the names of the scans of a kind."""
    return sorted(
        path.name.removesuffix(f"_0000{SUFFIX}")
        for path in (FOLDER / kind / "scans").glob(f"*_0000{SUFFIX}")
    )


def files_of(kind: str, scan: str) -> list[Path]:
    """Return the files of the channels of a scan."""
    return sorted((FOLDER / kind / "scans").glob(f"{scan}_????{SUFFIX}"))


def recorded(kind: str, scan: str, how: str) -> nib.Nifti1Image:
    """Return what nnU-Net has made of a scan.

    Args:
        kind: A kind.
        scan: The name of a scan.
        how: ``plain``, ``mirrored``, or a fold alone.
    """
    return nib.load(FOLDER / kind / "segmentations" / how / f"{scan}{SUFFIX}")


def all_recorded(kind: str, how: str) -> dict[str, nib.Nifti1Image]:
    """Return what nnU-Net has made of every scan of a kind."""
    return {scan: recorded(kind, scan, how) for scan in scans_of(kind)}


def labels_of(image: nib.Nifti1Image) -> npt.NDArray[np.generic]:
    """Return the voxels of a label map."""
    return np.asarray(image.dataobj)


def assert_agree(found: Segmentations, expected: Segmentations) -> None:
    """See that segmentations are the same but for rounding, and in the same place."""
    assert found and found.keys() == expected.keys()
    sizes, different = Counter[int](), Counter[int]()
    for name, image in found.items():
        ours, theirs = labels_of(image), labels_of(expected[name])
        assert ours.shape == theirs.shape, name
        np.testing.assert_allclose(image.affine, expected[name].affine, atol=1e-4, err_msg=name)
        num_different = np.count_nonzero(ours != theirs)
        assert num_different <= max(MAX_VOXELS, MAX_SHARE * ours.size), (name, num_different)
        for value in np.union1d(ours, theirs).tolist():
            ours_is, theirs_is = ours == value, theirs == value
            sizes[value] += np.count_nonzero(ours_is) + np.count_nonzero(theirs_is)
            different[value] += np.count_nonzero(ours_is != theirs_is)
    for value, size in sizes.items():
        dice = 1 - different[value] / size
        assert dice >= MIN_DICE or different[value] <= MAX_VOXELS, (value, dice)
