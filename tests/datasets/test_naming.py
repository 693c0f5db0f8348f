"""What names of labels say."""

from unet3d.datasets.naming import has_sides


def test_left_and_right_are_found():
    for names in (
        ("background", "left ventricle", "myocardium"),
        ("KidneyLeft", "liver"),
        ("RIGHT-hippocampus",),
        ("lungleft", "lungright"),
        ("kidney_l", "kidney_r"),
        ("Femur R", "Hip", "Femur L"),
        ("lh-cortex", "rh-cortex"),
        ("Rt Parotid", "Lt Parotid"),
    ):
        assert has_sides(names), names


def test_what_has_no_side():
    for names in (
        ("background", "Anterior", "Posterior"),
        ("liver", "tumour"),
        ("L1", "L2", "L3"),  # vertebrae
        ("r", "g", "b"),
        ("kidney_l",),  # alone it may mean anything
        ("label 1", "label 2"),
        ("femur_l", "tibia_r"),
        ("cleft", "bright spot"),
        (),
    ):
        assert not has_sides(names), names
