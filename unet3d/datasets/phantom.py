"""The built-in data set: synthetic heads with labels, which need no download.

A seed determines the geometry of a head, in millimetres and scaled to the field of view; shape and
spacing only determine how it is sampled. Every surface is the zero level of a function of position.
In a voxel that a surface crosses, the intensities of both sides are mixed by their shares of the
voxel.
"""

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
from scipy.interpolate import BSpline
from scipy.spatial.transform import Rotation

from unet3d.atomic import new_folder
from unet3d.config import Shape, Spacing
from unet3d.errors import ConfigError, DatasetError, reason_of
from unet3d.images.nifti import write_nifti
from unet3d.inputs.reading import read_json
from unet3d.terminal import counting

logger = logging.getLogger(__name__)

GENERATOR = 1
"""Version of the generator: raised when a seed gives another head, to recognise old data sets."""

Array = npt.NDArray[np.float32]

LABEL_NAMES = ("background", "brain", "ventricles", "lesion")
"""Names of the labels; the value of a label is its index here."""

NUM_CASES = 20
SPACING_MM: Spacing = (1.0, 1.0, 1.0)
"""Spacing of the built-in data set."""

MIN_VOXELS = 16
"""Fewest voxels along each axis for a head."""

SLAB_VOXELS = 1 << 21
"""Voxels computed at once, at 120 bytes each, which limits the temporary memory."""

# A FLAIR-like contrast. Fat is so bright that its blurred and shaded parts look like lesions.
AIR, SKIN, FAT, MUSCLE, SKULL = 0.02, 0.45, 0.95, 0.42, 0.08
FLUID, GREY, WHITE, LESION = 0.16, 0.58, 0.44, 0.86
NOISE = 0.045
"""Standard deviation of the noise in each of the two channels of the receiver."""

BRAIN_CENTRE, BRAIN_SCALE = (0.0, 0.0, 0.1), (0.76, 0.78, 0.72)
"""Centre and size of the brain, as fractions of the head's semi-axes."""

LESION_DENT, LESION_REACH = 0.35, 2.2
"""How far, in radii, a lesion's surface departs from a sphere, and where its function ends."""

SPLINE_STD = 0.479**1.5
"""Standard deviation of a cubic B-spline of three variables with coefficients of deviation 1."""


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
    """Return whether a folder holds the data set; DatasetError if it has other content."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return False
    with suppress(OSError, ValueError):
        if read_json(folder / "dataset.json") == description:
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


def head_phantom(
    seed: int, shape: Shape, spacing_mm: Spacing = (1.0, 1.0, 1.0)
) -> tuple[Array, npt.NDArray[np.uint8]]:
    """Return a head, float32 ``(1, X, Y, Z)`` of whole numbers, and its label map, uint8."""
    if min(shape) < MIN_VOXELS:
        raise ConfigError(
            f"phantom shape {shape} is too small for a head; use at least {MIN_VOXELS} voxels"
            " along each axis"
        )
    num_planes = max(1, SLAB_VOXELS // (shape[1] * shape[2]))
    rng = np.random.default_rng(seed)
    head = _Head(rng, shape, spacing_mm)
    image = np.empty((1, *shape), dtype=np.float32)
    labels = np.empty(shape, dtype=np.uint8)
    for start in range(0, shape[0], num_planes):
        stop = min(start + num_planes, shape[0])
        first = max(start - 1, 0)  # one more plane on each side gives the slope of the surfaces
        sampled = head.sample(slice(first, min(stop + 1, shape[0])))
        tissue, labels[start:stop] = (array[start - first : stop - first] for array in sampled)
        # Rician noise, which magnitude images of scanners have.
        tissue += NOISE * rng.standard_normal(tissue.shape, dtype=np.float32)
        other = NOISE * rng.standard_normal(tissue.shape, dtype=np.float32)
        image[0, start:stop] = np.rint(np.hypot(tissue, other) * np.float32(head.gain))
    return image, labels


class _Head:
    """Shapes of a head, drawn with a seed; lengths are in mm."""

    def __init__(self, rng: np.random.Generator, shape: Shape, spacing_mm: Spacing) -> None:
        extent_mm = np.array(shape) * spacing_mm
        bounds_mm = np.minimum(extent_mm, 1.5 * extent_mm.min())
        self.shape, self.spacing_mm = shape, spacing_mm
        semi_axes = bounds_mm * (0.36, 0.43, 0.42) * rng.uniform(0.92, 1.06, 3)
        self.semi_axes = semi_axes.tolist()
        self.ventricle_size = float(rng.uniform(0.85, 1.35))
        self.fields = {
            name: rng.standard_normal((cells + 3,) * 3).astype(np.float32) / SPLINE_STD
            for name, cells in (("folds", 18), ("texture", 30), ("lesion", 14), ("bias", 2))
        }
        mean_mm = float(np.prod(bounds_mm)) ** (1 / 3)
        num_small, num_large = rng.integers(0, 4), rng.integers(1, 4)
        large = rng.uniform(0.055, 0.09, num_large) * mean_mm
        radii = [*large, *rng.uniform(0.03, 0.05, num_small) * mean_mm]
        self.lesions = [(self._place_in_brain(rng) * semi_axes, radius) for radius in radii]
        self.centre = rng.uniform(-0.03, 0.03, 3) * bounds_mm
        turn = Rotation.from_euler("xyz", rng.uniform(-12, 12, 3), degrees=True)
        self.rotation = turn.as_matrix().astype(np.float32)
        self.gain = float(rng.uniform(700, 1300))

    def sample(self, planes: slice) -> tuple[Array, npt.NDArray[np.uint8]]:
        """Return tissue intensities and labels of some planes along X."""
        position = self._in_head_axes(planes)
        ex, ey, ez = (axis / size for axis, size in zip(position, self.semi_axes, strict=True))
        ex *= 1 + 0.14 * ey  # narrower in front
        bx, by, bz = (
            (axis - centre) / size
            for axis, centre, size in zip((ex, ey, ez), BRAIN_CENTRE, BRAIN_SCALE, strict=True)
        )
        surface = np.sqrt(ex * ex + ey * ey + ez * ez) - 1
        depth = np.sqrt(bx * bx + by * by + bz * bz) - 1
        folds = np.clip(1 - np.abs(self._smooth("folds", planes)) / 0.4, 0, 1)
        furrows = np.maximum(folds, 1.4 * np.clip(1 - np.abs(bx) / 0.05, 0, 1))
        cortex = depth + 0.13 * furrows * np.clip((depth + 0.35) / 0.25, 0, 1)
        ventricles = self._ventricles(bx, by, bz)
        lesions = np.full_like(surface, LESION_REACH - 1 - LESION_DENT)
        dents = LESION_DENT * np.clip(self._smooth("lesion", planes), -1, 1)
        for centre, radius in self.lesions:  # spheres that a random field has dented
            x, y, z = (axis - np.float32(at) for axis, at in zip(position, centre, strict=True))
            distance = np.sqrt(x * x + y * y + z * z) / np.float32(radius)
            lesions = np.minimum(lesions, distance - 1 + dents)

        tissue = np.full_like(surface, AIR)
        layers: list[tuple[Array, dict[float, float]]] = [
            (surface, {0.0: SKIN, -0.035: FAT, -0.12: MUSCLE}),
            (depth, {0.17: SKULL, 0.06: FLUID}),
            (cortex, {0.0: GREY, -0.17: WHITE}),
            (np.maximum(lesions, cortex), {0.0: LESION}),
            (ventricles, {0.0: FLUID}),
        ]
        for function, levels in layers:  # inside its surface, each tissue replaces earlier ones
            slopes = (np.abs(np.gradient(function, axis=axis)) for axis in range(3))
            per_voxel = sum(slopes, start=np.full_like(function, 1e-6))  # corner to corner
            for level, intensity in levels.items():
                tissue += (intensity - tissue) * np.clip(0.5 - (function - level) / per_voxel, 0, 1)
        tissue *= 1 + 0.07 * self._smooth("texture", planes)
        tissue *= np.exp(0.2 * self._smooth("bias", planes))
        labels = (cortex < 0).astype(np.uint8)
        labels[(lesions < 0) & (cortex < 0)] = LABEL_NAMES.index("lesion")
        labels[ventricles < 0] = LABEL_NAMES.index("ventricles")
        return tissue, labels

    def _in_head_axes(self, planes: slice) -> list[Array]:
        """Return the three coordinates of each voxel in mm, along the axes of the head."""
        x, y, z = (
            ((np.arange(size) + 0.5 - size / 2) * step - centre).astype(np.float32)
            for size, step, centre in zip(self.shape, self.spacing_mm, self.centre, strict=True)
        )
        x = x[planes, None, None]
        return [x * ax + y[:, None] * ay + z * az for ax, ay, az in self.rotation.T]

    def _smooth(self, name: str, planes: slice) -> Array:
        """Sample a random field: a cubic B-spline over the field of view, whose variance is 1."""
        coefficients = self.fields[name]
        num_cells = len(coefficients) - 3
        knots = np.arange(-3, num_cells + 4)
        x, y, z = (
            BSpline.design_matrix((np.arange(size) + 0.5) / size * num_cells, knots, 3)
            .toarray()
            .astype(np.float32)
            for size in self.shape
        )
        sampled: Array = y @ (np.tensordot(x[planes], coefficients, 1) @ z.T)
        return sampled

    def _ventricles(self, x: Any, y: Any, z: Any) -> Any:
        """Return values that are negative in two mirrored arcs; x, y, z are in brain semi-axes."""
        bow = y * y
        across = (np.abs(x) - 0.17 - 0.15 * bow) / 0.115
        along = (y + 0.05) / 0.45
        upward = (z - 0.12 + 0.35 * bow) / 0.17
        return np.sqrt(across * across + along * along + upward * upward) / self.ventricle_size - 1

    def _place_in_brain(self, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """Draw the centre of a lesion, in units of the head's semi-axes."""
        while True:
            place = rng.uniform(-0.75, 0.75, 3)
            if np.linalg.norm(place) < 0.75 and self._ventricles(*place) > 0.3:
                return np.array(BRAIN_CENTRE) + place * BRAIN_SCALE
