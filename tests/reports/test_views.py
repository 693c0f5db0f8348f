"""Where planes and legend stand: at one scale, and none on another."""

from itertools import combinations

import pytest

from unet3d.reports.views import AXIAL, CORONAL, SAGITTAL, Layout


def apart(a, b):
    return a[0] + a[2] <= b[0] or b[0] + b[2] <= a[0] or a[1] + a[3] <= b[1] or b[1] + b[3] <= a[1]


@pytest.mark.parametrize(
    "extents_mm",
    [(180, 210, 180), (500, 500, 1900), (256, 256, 6), (1e-4, 2e-4, 1e-3), (1, 1, 1e6)],
)
@pytest.mark.parametrize("legend", [(3.6, 2.0), (4.7, 5.0)])
def test_nothing_covers_another(extents_mm, legend):
    layout = Layout.of(extents_mm, legend)
    places = [*layout.panels.values(), layout.legend]
    assert all(apart(*pair) for pair in combinations(places, 2))
    for left, bottom, width, height in places:
        assert 0 <= left and left + width <= layout.size[0]
        assert 0 <= bottom and bottom + height <= layout.size[1]
    assert max(layout.size) < 16


def test_planes_line_up():
    layout = Layout.of((180, 210, 150), (3.6, 2.0))
    coronal, sagittal, axial = (layout.panels[one] for one in (CORONAL, SAGITTAL, AXIAL))
    assert (coronal[1], coronal[3]) == (sagittal[1], sagittal[3])
    assert (coronal[0], coronal[2]) == (axial[0], axial[2])
    sizes = (*coronal[2:], *sagittal[2:], *axial[2:])
    expected = [mm * layout.inches_per_mm for mm in (180, 150, 210, 150, 180, 210)]
    assert sizes == pytest.approx(expected)
