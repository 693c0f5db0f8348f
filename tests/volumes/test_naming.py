"""What names of labels say."""

import pytest

from unet3d.volumes.naming import has_sides


@pytest.mark.parametrize(
    "names",
    [
        ("background", "left ventricle", "myocardium"),
        ("lung_right",),
        ("KidneyLeft", "liver"),
        ("RIGHT-hippocampus",),
        ("leftatrium",),
        ("lungleft", "lungright"),
        ("kidney_l", "kidney_r"),
        ("Femur R", "Hip", "Femur L"),
        ("lh-cortex", "rh-cortex"),
        ("Rt Parotid", "Lt Parotid"),
    ],
)
def test_left_and_right_are_found(names: tuple[str, ...]) -> None:
    assert has_sides(names)


@pytest.mark.parametrize(
    "names",
    [
        ("background", "Anterior", "Posterior"),
        ("liver", "tumour"),
        ("L1", "L2", "L3"),  # vertebrae
        ("r", "g", "b"),
        ("kidney_l",),  # alone it may mean anything
        ("label 1", "label 2"),
        ("femur_l", "tibia_r"),
        ("cleft", "bright spot"),
        (),
    ],
)
def test_what_has_no_side(names: tuple[str, ...]) -> None:
    assert not has_sides(names)
