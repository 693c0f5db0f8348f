import warnings

import numpy as np
import pytest
import torch
from monai.metrics import compute_hausdorff_distance, compute_surface_dice
from scipy.spatial.transform import Rotation

from tests.inference.distances import hd95_by_hand, nearest_mm, tilted
from unet3d.inference.surfaces import surface_distances

SPACING_MM = (0.5, 1.0, 3.0)


def masks(density: float, shape: tuple[int, int, int] = (9, 10, 11)) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.random(shape) < density for _ in range(2)]


def monai_scores(one: np.ndarray, other: np.ndarray, tolerance_mm: float) -> tuple[float, float]:
    batches = [torch.from_numpy(mask)[None, None] for mask in (one, other)]
    with warnings.catch_warnings():
        # MONAI warns about an argument that it passes to itself.
        warnings.filterwarnings("ignore", ".*always_return_as_numpy", FutureWarning)
        hd95 = compute_hausdorff_distance(
            *batches, include_background=True, percentile=95, spacing=list(SPACING_MM)
        )
        nsd = compute_surface_dice(
            *batches, [tolerance_mm], include_background=True, spacing=list(SPACING_MM)
        )
    return hd95.item(), nsd.item()


@pytest.mark.parametrize(("density", "tolerance_mm"), [(0.01, 1.2), (0.2, 0.0), (0.9, 0.5)])
def test_scores_are_those_of_monai(density: float, tolerance_mm: float) -> None:
    one, other = masks(density)
    distances = surface_distances(one, other, np.diag([*SPACING_MM, 1.0]))
    ours = distances.hd95_mm, distances.surface_dice(tolerance_mm)
    assert ours == pytest.approx(monai_scores(one, other, tolerance_mm), rel=1e-5)


@pytest.mark.parametrize("degrees", [0.0, 20.0])
def test_scores_are_those_of_all_distances_between_the_places_of_surface_voxels(
    degrees: float,
) -> None:
    affine = tilted(degrees, SPACING_MM)
    pair = masks(0.6)
    there, back = nearest_mm(*pair, affine)
    distances = surface_distances(*pair, affine)
    assert distances.hd95_mm == pytest.approx(hd95_by_hand(*pair, affine), rel=1e-5)
    for tolerance_mm in (0.0, 0.6, 1.1):
        share = np.mean(np.concatenate([there, back]) <= tolerance_mm)
        assert distances.surface_dice(tolerance_mm) == pytest.approx(share)
    assert 0 < distances.surface_dice(0.0) < distances.surface_dice(1.1)


@pytest.mark.parametrize("spacing_mm", [0.1, 0.3, 0.7, 1.0, 1.1])
@pytest.mark.parametrize("degrees", [0.0, 33.0])
def test_a_neighbour_at_the_tolerance_is_within_it(spacing_mm: float, degrees: float) -> None:
    one = np.zeros((6, 6, 6), bool)
    one[2:4, 2:4, 2:4] = True
    affine = np.eye(4)
    rotation = Rotation.from_euler("xyz", [degrees] * 3, degrees=True).as_matrix()
    # As a header stores it.
    affine[:3, :3] = (rotation * spacing_mm).astype(np.float32)
    distances = surface_distances(one, np.roll(one, 1, axis=2), affine)
    assert distances.surface_dice(spacing_mm) == 1.0
    assert distances.surface_dice(0.99 * spacing_mm) == 0.5
