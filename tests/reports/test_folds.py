"""The table of several folds."""

from rich.console import Console

from unet3d.reports.scores import folds_table


def spread(mean, deviation):
    return {"mean": mean, "standard_deviation": deviation, "num_folds": 2}


def text_of(num_folds):
    folds = {
        str(fold): {
            "final_mean_dice": 0.5 + fold / 100,
            "final_dice": {"[b]liver": 0.6 + fold / 100, "tumour": None if fold else 0.25},
        }
        for fold in range(num_folds)
    }
    summary = {
        "folds": folds,
        "final_mean_dice": spread(0.505, 0.0071),
        "best_dice": spread(0.7, None),
        "final_dice": {"[b]liver": spread(0.605, 0.0071), "tumour": spread(0.25, None)},
    }
    console = Console(width=80, record=True, color_system=None)
    with console.capture() as captured:
        console.print(folds_table(summary))
    return captured.get()


def test_labels_have_a_number_of_each_fold_and_their_mean():
    found = [line.split() for line in text_of(2).splitlines()]
    assert ["[b]liver", "0.600", "0.610", "0.605", "0.007"] in found
    assert ["tumour", "0.250", "–", "0.250", "–"] in found
    assert ["mean", "0.500", "0.510", "0.505", "0.007"] in found
    assert "mean of the best networks: 0.700" in text_of(2)


def test_many_folds_are_a_mean():
    found = [line.split() for line in text_of(20).splitlines()]
    assert ["label", "mean", "spread"] in found and ["[b]liver", "0.605", "0.007"] in found
    assert all(len(line) <= 80 for line in text_of(6).splitlines())
