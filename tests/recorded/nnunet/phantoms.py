"""Scans of balls and rods, with labels, each determined by a seed; needs NumPy and nibabel only."""

from dataclasses import dataclass
from pathlib import Path

import nibabel as nib
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Labels = npt.NDArray[np.uint8]
Triple = tuple[float, float, float]

SUFFIX = ".nii.gz"


@dataclass(frozen=True)
class Scan:
    """How to make and write one scan; fields are along the stored axes of its file."""

    name: str
    seed: int
    shape: tuple[int, int, int]
    spacing_mm: Triple
    axes: str = "RAS"
    """Directions of the stored axes: R, L, A, P, S, I."""
    tilt_degrees: float = 0.0
    """Rotation of the whole scan about the axis from head to foot."""
    shear: float = 0.0
    """Shear: mm along the last world axis for each mm along the first axis."""
    is_empty: bool = False
    """Whether every voxel is 0."""

    def affine(self) -> Array:
        """Return the (4, 4) affine from voxel indices to mm."""
        matrix = np.zeros((3, 3))
        for axis, towards in enumerate(self.axes):
            row = next(row for row, pair in enumerate(("RL", "AP", "SI")) if towards in pair)
            matrix[row, axis] = self.spacing_mm[axis] * (1 if towards in "RAS" else -1)
        angle = np.deg2rad(self.tilt_degrees)
        turn = [[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]]
        matrix = np.array(turn) @ matrix
        matrix[2] += self.shear * matrix[0]
        affine = np.eye(4)
        affine[:3, :3] = matrix
        affine[:3, 3] = (-21.5, 12.25, -40.0)
        return affine


def isotropic(scan: Scan) -> tuple[list[Array], Labels]:
    """Return one channel with balls, cubes and rods, each with its own brightness."""
    random, mm = np.random.default_rng(scan.seed), _grid(scan)
    label = np.zeros(scan.shape, np.uint8)
    for value, count in ((1, 2), (2, 2), (3, 3)):
        for _ in range(count):
            centre = _centre(random, scan)
            if value == 1:
                inside = _radius(mm, centre, (1, 1, 1)) < random.uniform(6, 9)
            elif value == 2:
                inside = np.abs(mm - centre).max(-1) < random.uniform(4, 6)
            else:
                inside = _radius(mm, centre, (1, 1, 0)) < random.uniform(3.0, 4.5)
            label[inside] = value
    brightness = np.array([40.0, 90.0, 140.0, 5.0])[label]
    return [_noisy(random, brightness, 5.0)], label


def thick_slices(scan: Scan) -> tuple[list[Array], Labels]:
    """Return one channel in Hounsfield units: a body in air, with an organ and a vessel."""
    random, mm = np.random.default_rng(scan.seed), _grid(scan)
    extent = np.array(scan.shape) * scan.spacing_mm
    body = _radius(mm, extent / 2, tuple(1 / extent)) < 0.48
    label = np.zeros(scan.shape, np.uint8)
    for value, count in ((1, 3), (2, 3)):
        for _ in range(count):
            centre = _centre(random, scan)
            if value == 1:
                inside = _radius(mm, centre, (0.7, 1, 1)) < random.uniform(8, 12)
            else:
                inside = _radius(mm, centre, (0.4, 1, 1)) < random.uniform(4, 6)
            label[inside & body] = value
    brightness = np.where(body, np.array([-20.0, 60.0, 160.0])[label], -1000.0)
    return [_noisy(random, brightness, 8.0)], label


def regions(scan: Scan) -> tuple[list[Array], Labels]:
    """Return four channels, 0 outside of a head: an oedema (2) with a core (1) and a rim (3)."""
    random, mm = np.random.default_rng(scan.seed), _grid(scan)
    extent = np.array(scan.shape) * scan.spacing_mm
    head = _radius(mm, extent / 2, tuple(1 / extent)) < 0.41
    label = np.zeros(scan.shape, np.uint8)
    for _ in range(2):
        centre = extent / 2 + random.uniform(-0.17, 0.17, 3) * extent
        radius = _radius(mm, centre, tuple(random.uniform(0.8, 1.2, 3)))
        size = random.uniform(13, 16)
        for value, share in ((2, 1.0), (3, 0.8), (1, 0.6)):
            label[(radius < share * size) & head] = value
    contrasts = (
        (100.0, 60.0, 80.0, 110.0),
        (100.0, 55.0, 85.0, 190.0),
        (80.0, 170.0, 140.0, 120.0),
        (70.0, 100.0, 180.0, 150.0),
    )
    channels = []
    for contrast in contrasts:
        brightness = _noisy(random, np.array(contrast)[label], 6.0)
        channels.append(np.where(head, np.maximum(brightness, 1), 0))
    return channels, label


def write(scan: Scan, channels: list[Array], folder: Path) -> list[Path]:
    """Write the channels of a scan under nnU-Net's names, such as ``scan_0000.nii.gz``."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, channel in enumerate(channels):
        voxels = np.zeros_like(channel) if scan.is_empty else channel
        paths.append(folder / f"{scan.name}_{number:04}{SUFFIX}")
        nib.save(_image(voxels.astype(np.int16), scan), paths[-1])
    return paths


def write_label(scan: Scan, label: Labels, folder: Path) -> None:
    """Write the label map of a scan."""
    folder.mkdir(parents=True, exist_ok=True)
    nib.save(_image(label, scan), folder / f"{scan.name}{SUFFIX}")


def _image(voxels: npt.NDArray[np.generic], scan: Scan) -> nib.Nifti1Image:
    affine = scan.affine()
    image = nib.Nifti1Image(voxels, affine)
    image.header.set_xyzt_units("mm")
    if scan.shear:
        image.set_qform(None)  # a quaternion cannot express a shear
    else:
        image.set_qform(affine, 1)
    image.set_sform(affine, 1)
    return image


def _grid(scan: Scan) -> Array:
    """Return each voxel's position in mm along the stored axes, shape (I, J, K, 3)."""
    axes = [np.arange(n) * mm for n, mm in zip(scan.shape, scan.spacing_mm, strict=True)]
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1)


def _centre(random: np.random.Generator, scan: Scan) -> Array:
    place = random.uniform(0.15, 0.85, 3) * scan.shape * np.array(scan.spacing_mm)
    return np.asarray(place, np.float64)


def _radius(mm: Array, centre: Array, scale: tuple[float, ...]) -> Array:
    return np.asarray(np.linalg.norm((mm - centre) * scale, axis=-1), np.float64)


def _noisy(random: np.random.Generator, brightness: Array, deviation: float) -> Array:
    return np.round(brightness + random.normal(0, deviation, brightness.shape))
