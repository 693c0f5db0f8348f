from pathlib import Path

from tests.reports.records import cells, printed
from unet3d.datasets.labels import ScoredLabels
from unet3d.inference.evaluation import CaseScores, Evaluation
from unet3d.inference.label_scores import LabelScore
from unet3d.reports.figures import drawable
from unet3d.reports.tables import (
    GIB,
    MIB,
    amount,
    duration,
    evaluation_table,
    folds_table,
    score,
    unit_for,
)


def evaluation(num_cases, **more):
    scores = {
        1: LabelScore(dice=0.91234, hd95_mm=1.5, nsd=0.75, prediction_ml=12.3456, label_ml=12.0),
        255: LabelScore(dice=None, hd95_mm=None, nsd=None, prediction_ml=0.0, label_ml=0.0),
    }
    other = LabelScore(dice=0.5, hd95_mm=3.5, nsd=0.25, prediction_ml=1.0, label_ml=2.0)
    each = {f"case_{i}": scores for i in range(num_cases - 1)} | {"[/last]": {1: other, 255: other}}
    cases = tuple(
        CaseScores(name=name, prediction=Path("p"), label=Path("l"), scores=scores)
        for name, scores in each.items()
    )
    return Evaluation(cases=cases, labels=(1, 255), **more)


def test_the_table_has_each_case_and_the_means():
    table = evaluation_table(evaluation(2))
    assert table.whole_heads == [
        *("case", "label", "Dice", "HD95 (mm)", "NSD (1 mm)", "segmented (mL)", "labelled (mL)")
    ]
    assert cells(table) == [
        ("case_0", "1", "0.9123", "1.50", "0.750", "12.346", "12.000"),
        ("", "255", "–", "–", "–", "0.000", "0.000"),
        ("[/last]", "1", "0.5000", "3.50", "0.250", "1.000", "2.000"),
        ("", "255", "0.5000", "3.50", "0.250", "1.000", "2.000"),
        ("mean of 2 cases", "1", "0.7062", "2.50", "0.500", "6.673", "7.000"),
        ("", "255", "0.5000", "3.50", "0.250", "0.500", "1.000"),
    ]
    mean = (0.70617 + 0.5) / 2
    assert " ".join(table.notes) == f"Mean Dice over the labels: {mean:.4f}"


def test_one_case_needs_no_means_and_labels_may_have_names():
    table = evaluation_table(evaluation(1))
    assert [row[0] for row in cells(table)] == ["[/last]", ""]
    assert " ".join(table.notes) == "Mean Dice over the labels: 0.5000"
    named = ScoredLabels(names={1: "[bold]left", 255: "1"})
    table = evaluation_table(evaluation(1, scored=named, tolerance_mm=2.5))
    assert [row[1] for row in cells(table)] == ["[bold]left", "1"]
    assert "NSD (2.5 mm)" in table.whole_heads


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
    return printed(folds_table(summary), 80)


def test_labels_have_a_number_of_each_fold_and_their_mean():
    found = [line.split() for line in text_of(2).splitlines()]
    assert ["[b]liver", "0.600", "0.610", "0.605", "0.007"] in found
    assert ["tumour", "0.250", "–", "0.250", "–"] in found
    assert ["mean", "0.500", "0.510", "0.505", "0.007"] in found
    assert "best validation Dice during training: 0.700" in " ".join(text_of(2).split())


def test_many_folds_are_a_mean():
    found = [line.split() for line in text_of(20).splitlines()]
    assert ["label", "mean", "std.", "dev."] in found and ["[b]liver", "0.605", "0.007"] in found
    assert all(len(line) <= 80 for line in text_of(6).splitlines())


def test_amounts_have_the_digits_that_matter():
    for num_bytes, text in (
        *((0, "0.00"), (100, "<0.001"), (MIB // 100, "0.01"), (MIB // 4, "0.25")),
        *((int(99.99 * MIB), "99.99"), (100 * MIB, "100"), (81920 * MIB, "81,920")),
    ):
        assert amount(num_bytes, MIB) == text


def test_units_suit_the_largest_number():
    assert unit_for(8 * GIB - 1) == ("MiB", MIB)
    assert unit_for(8 * GIB) == ("GiB", GIB)
    assert (score(0.12345), score(None), score(2, 1)) == ("0.123", "–", "2.0")


def test_durations_read_as_people_write_them():
    for seconds, words in (
        *((41.4, "41 s"), (59.7, "1 min 00 s"), (61, "1 min 01 s")),
        *((3599.6, "1 h 00 min"), (7500, "2 h 05 min"), (90000, "25 h 00 min")),
    ):
        assert duration(seconds) == words


def test_names_are_drawn_as_they_are():
    assert drawable("$x$ \ud800") == r"\$x\$ ?"
    assert drawable("a" * 20, 20) == "a" * 20
    assert drawable("abc def", 5) == "abc…"
