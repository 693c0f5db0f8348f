import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from tests.inference.distances import hd95_by_hand, nearest_mm, tilted
from unet3d.inference.label_scores import surface_dice, surface_distances

SPACING_MM = (0.5, 1.0, 3.0)


def masks(density, shape=(9, 10, 11)):
    rng = np.random.default_rng(0)
    return [rng.random(shape) < density for _ in range(2)]


@pytest.mark.parametrize("density", [0.01, 0.2, 0.6, 0.9])
@pytest.mark.parametrize("degrees", [0.0, 20.0])
def test_scores_are_those_of_all_distances_between_the_places_of_surface_voxels(degrees, density):
    affine = tilted(degrees, SPACING_MM)
    pair = masks(density)
    both = np.concatenate(nearest_mm(*pair, affine))
    distances = surface_distances(*pair, affine)
    assert max(np.percentile(one, 95) for one in distances) == pytest.approx(
        hd95_by_hand(*pair, affine), rel=1e-5
    )
    for tolerance_mm in (0.0, 0.6, 1.1):
        share = np.mean(both <= tolerance_mm)
        assert surface_dice(distances, tolerance_mm) == pytest.approx(share)
    assert surface_dice(distances, 100.0) == 1


@pytest.mark.parametrize("spacing_mm", [0.1, 0.3, 0.7, 1.0, 1.1])
@pytest.mark.parametrize("degrees", [0.0, 33.0])
def test_a_neighbour_at_the_tolerance_is_within_it(spacing_mm, degrees):
    one = np.zeros((6, 6, 6), bool)
    one[2:4, 2:4, 2:4] = True
    affine = np.eye(4)
    rotation = Rotation.from_euler("xyz", [degrees] * 3, degrees=True).as_matrix()
    # As a header stores it.
    affine[:3, :3] = (rotation * spacing_mm).astype(np.float32)
    distances = surface_distances(one, np.roll(one, 1, axis=2), affine)
    assert surface_dice(distances, spacing_mm) == 1.0
    assert surface_dice(distances, 0.99 * spacing_mm) == 0.5
