from unet3d.reports.format import GIB, MIB, amount, drawable, millilitres, size_text, unit_for


def test_amounts_have_the_digits_that_matter():
    for num_bytes, text in (
        *((0, "0.00"), (100, "<0.001"), (MIB // 100, "0.01"), (MIB // 4, "0.25")),
        *((int(99.99 * MIB), "99.99"), (100 * MIB, "100"), (81920 * MIB, "81,920")),
    ):
        assert amount(num_bytes, MIB) == text


def test_units_suit_the_largest_number_and_sizes_are_along_x_y_z():
    assert unit_for(8 * GIB - 1) == ("MiB", MIB)
    assert unit_for(8 * GIB) == ("GiB", GIB)
    assert size_text((192, 192, 160)) == "192x192x160"


def test_volumes_have_three_digits():
    for volume_ml, text in (
        *((0, "0 mL"), (1e-9, "1.00e-09 mL"), (0.01234, "0.0123 mL")),
        *((99.94, "99.9 mL"), (99.96, "100 mL"), (1234.5, "1,234 mL")),
    ):
        assert millilitres(volume_ml) == text


def test_names_are_drawn_as_they_are():
    assert drawable("$x$ \ud800") == r"\$x\$ ?"
    assert drawable("a" * 20, 20) == "a" * 20
    assert drawable("abc def", 5) == "abc…"
