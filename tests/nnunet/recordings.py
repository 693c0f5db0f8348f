"""Recorded models of nnU-Net with nnU-Net's segmentations, and how closely ours must agree."""

import json
from collections import Counter
from pathlib import Path

import nibabel as nib
import numpy as np

FOLDER = Path(__file__).resolve().parent.parent / "recorded" / "nnunet"

KINDS = ("isotropic", "thick_slices", "regions")

SUFFIX = ".nii.gz"

MAX_SHARE = 1e-4
"""Largest share of a scan's voxels that may differ."""

MIN_DICE = 0.9995
"""Least Dice of each label, over all scans together."""

MAX_VOXELS = 2
"""Voxels of a scan that may differ in any case.

nnU-Net adds up logits in float16, and their last digit decides some voxels of a small scan.
"""


def model_of(kind):
    (plans,) = (FOLDER / kind).glob("*/plans.json")
    return plans.parent


def plans_of(model):
    return json.loads((model / "plans.json").read_text())


def scans_of(kind):
    return sorted(
        path.name.removesuffix(f"_0000{SUFFIX}")
        for path in (FOLDER / kind / "scans").glob(f"*_0000{SUFFIX}")
    )


def files_of(kind, scan):
    return sorted((FOLDER / kind / "scans").glob(f"{scan}_????{SUFFIX}"))


def recorded(kind, scan, how):
    """Return nnU-Net's segmentation of a scan: ``plain``, ``mirrored``, or with a single fold."""
    return nib.load(FOLDER / kind / "segmentations" / how / f"{scan}{SUFFIX}")


def all_recorded(kind, how):
    return {scan: recorded(kind, scan, how) for scan in scans_of(kind)}


def labels_of(image):
    return np.asarray(image.dataobj)


def assert_agree(found, expected):
    """Check that segmentations have the same place, and agree but for rounding."""
    assert found and found.keys() == expected.keys()
    sizes, different = Counter(), Counter()
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
