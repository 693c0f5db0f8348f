"""The page of a training run shows everything in its folder, and nothing else."""

import base64
import json
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tests.images.samples import write_json
from tests.reports.pages import sample_run
from tests.reports.pages.html import Page, assert_closed
from tests.reports.pages.sample_run import write_run
from unet3d.reports.pages import run_page as run_pages
from unet3d.reports.pages.run_page import run_page
from unet3d.runs.run_folder import folds_in

EVIL = "</script><script>alert(1)</script>\"'&"
"""Must be shown as text wherever it appears."""


def test_a_finished_run_shows_all_that_was_found(tmp_path):
    page = Page(run_page(write_run(tmp_path / "mine")))
    assert_closed(page)
    text = page.text
    assert "mine: fold 2 of Task01_Sample" in text
    assert "Finished after 4 epochs, in 1 h 02 min." in text
    # Labels: mean Dice, HD95, NSD, volumes, number of cases.
    assert page.cells("liver") == ["liver", "0.844", "2.25", "0.844", "12.500", "10.000", "2"]
    assert page.cells("tumour") == ["tumour", "0.250", "4.75", "0.250", "12.500", "10.000", "1"]
    assert "NSD (2 mm)" in text
    assert "Only the largest component is kept of liver, tumour together; of tumour." in text
    # Cases: the worst first; a label without a Dice has a dash.
    names = [row[0] for row in page.rows]
    assert names.index("low") < names.index("high")
    assert page.cells("low") == ["low", "0.500", "0.750", "0.250"]
    assert page.cells("high") == ["high", "0.938", "0.938", "–"]
    # Memory in MiB; the last numbers are the predicted peak, and the device's total.
    sizes = ("6.00", "6.00", "12.00", "70.00", "100")
    assert page.cells("0") == ["0", "cuda:0", "encoder.0.0", *sizes, "110", "81,920"]
    blocks = "encoder.0.0 … encoder.0.1"
    assert page.cells("1") == ["1", "cuda:1 of rank 1", blocks, *sizes, "–", "81,920"]
    for fact in (
        *("/data/Task01_Sample", "2, 5", "2: a, b", "2: high, low", "1 x 1.25 x 3 mm"),
        *("background, liver, tumour", "cuda:0 (NVIDIA H200), cuda:1 (NVIDIA H200)"),
        *("model, bfloat16", "Dice 0.500 in epoch 2", "unet3d 0.1.0, python 3.12.1, torch 2.13.0"),
        "epochs: 4",
    ):
        assert fact in text, fact
    # Means over the labels are at the top.
    assert "mean HD95 3.5 mm" in text and "mean Dice 0.547" in text


def test_pictures_are_in_the_page_with_their_words(tmp_path):
    text = run_page(write_run(tmp_path))
    pictures = [base64.b64decode(one.partition(",")[2]) for one in Page(text).addresses]
    files = ("validation/worst.png", "validation/best.png", "memory.png")
    assert pictures[1:] == [(tmp_path / name).read_bytes() for name in files]
    curves = pictures[0]
    assert b"<svg" in curves and b'href="http' not in curves and b"<script" not in curves
    words = re.findall('<img [^>]*alt="([^"]*)"', text)
    assert all(map(str.strip, words)) and text.count("<img ") == len(words)
    assert re.findall("<h1", text) == ["<h1"] and '<html lang="en">' in text
    assert run_page(tmp_path) == text  # the same run has the same page


def test_names_are_text_and_nothing_else(tmp_path):
    data = sample_run.data(EVIL) | {"training": {EVIL: "00"}}
    data["preprocessing"]["channel_names"] = [EVIL]
    dice = {EVIL: 0.5, "肝臓": 0.75, "$x^": 0.25}
    metrics = {"epoch": 1, "loss": 1.0, "dice": dice, "mean_dice": 0.5}
    changes = {
        "data.json": data,
        # A lone surrogate, as in a file name of another encoding, and letters that reverse the
        # text.
        "validation/cases.json": sample_run.cases(EVIL, "half\udcff turned\u202e"),
        "metrics.jsonl": json.dumps(metrics) + "\n",
        "config.yaml": f"# {EVIL}\n",
    }
    folder = write_run(tmp_path / "<b>run", **changes)
    page = Page(run_page(folder))
    assert_closed(page)
    assert len(page.sources["script"]) == 1
    assert page.cells(EVIL)[0] == EVIL
    assert r"half\udcff turned\u202e" in page.text and page.text.encode()
    assert f"# {EVIL}" in page.text and "<b>run" in page.text
    (folder / "validation/cases.json").unlink()
    page = Page(run_page(folder))
    assert_closed(page)
    for name, dice in ((EVIL, "0.500"), ("肝臓", "0.750"), ("$x^", "0.250")):
        assert page.cells(name) == [name, dice]


def test_a_run_that_has_not_ended_says_how_far_it_is(tmp_path):
    late = ("summary.json", "memory.json", "memory.png")
    of_validation = [f"validation/{name}" for name in ("cases.json", "worst.png", "best.png")]
    page = Page(run_page(write_run(tmp_path, **dict.fromkeys([*late, *of_validation]))))
    assert_closed(page)
    text = page.text
    assert "Not finished: 4 of 4 epochs done." in text
    assert "from the validation in epoch 4" in text
    assert page.cells("tumour") == ["tumour", "0.250"]
    assert "Memory has not been measured yet." in text and "Pictures" not in text


@pytest.mark.parametrize("kept", ["data.json", "config.yaml", "metrics.jsonl"])
def test_a_run_that_was_killed_early_has_a_page(tmp_path, kept):
    write_run(tmp_path)
    for path in tmp_path.rglob("*.*"):
        if path.name != kept:
            path.unlink()
    page = Page(run_page(tmp_path))
    assert "Not finished" in page.text
    assert ("No epoch has ended yet." in page.text) == (kept != "metrics.jsonl")


@pytest.fixture
def without_curves(monkeypatch):
    """Skip drawing curves, which takes most of a second for each page."""
    monkeypatch.setattr("unet3d.reports.pages.run_page.progress_figure", lambda *_: Figure((1, 1)))


@pytest.mark.parametrize(
    "name", ["data.json", "summary.json", "memory.json", "validation/cases.json"]
)
def test_a_damaged_file_is_named_and_the_rest_is_shown(tmp_path, name, without_curves):
    for damage in ("{", "[1]", '{"epochs": "4", "cases": 3, "slots": [], "seed": 5}', "\0"):
        page = Page(run_page(write_run(tmp_path, **{name: damage})))
        assert_closed(page)
        assert f"{Path(name).name} is damaged, and is left out." in page.text
        assert page.cells("liver")[0] == "liver"
    line = '{"epoch": 1, "loss": "x", "dice": {"liver": 1e999}, "mean_dice": []}\n'
    changes = {"memory.png": "no picture", "validation/worst.png": "", "metrics.jsonl": line}
    page = Page(run_page(write_run(tmp_path, **changes)))
    assert "metrics.jsonl is damaged, and is left out." in page.text
    assert len(page.addresses) == 1  # only the best case's is intact


def test_of_many_labels_the_lowest_one_of_each_case_is_named(tmp_path, without_curves):
    cases, score = sample_run.cases(), sample_run.score
    counts = {"num_cases_dice": 2}
    cases["mean"] = {str(n): score(f"organ {n}", 0.5) | counts for n in range(1, 31)}
    for case in cases["cases"]:
        case["labels"] = {key: score(f"organ {key}", 1 - int(key) / 100) for key in cases["mean"]}
    page = Page(run_page(write_run(tmp_path, **{"validation/cases.json": cases})))
    assert page.cells("low") == ["low", "0.500", "organ 30 0.700"]
    assert page.cells("organ 17")[:2] == ["organ 17", "0.500"]


def test_one_cpu_has_the_memory_of_the_process_and_no_slots(tmp_path):
    memory = sample_run.memory()
    memory["slots"] = [{**memory["slots"][0], "device": "cpu"}]
    memory["slots"][0]["measured"]["reserved_bytes"] = 600 * sample_run.MIB
    page = Page(run_page(write_run(tmp_path, **{"memory.json": memory})))
    assert "peak memory 600 MiB of the process" in page.text and "slot" not in page.text
    sizes = ["6.00", "6.00", "12.00", "70.00", "600", "–", "81,920"]
    assert page.cells("the process") == ["the process", *sizes]
    assert "that of the whole process" in page.text and "lower bound" not in page.text


def test_an_image_of_a_microscope_has_its_units(tmp_path):
    """JSON has mm and mL; 2 nm are 2e-6 mm, and 5 µm3 are 5e-12 mL."""
    data, cases = sample_run.data(), sample_run.cases()
    data["preprocessing"]["spacing_mm"] = [1e-5, 1e-5, 4e-5]
    cases["tolerance_mm"] = 2e-5
    mean = cases["mean"]["1"]
    mean |= {"hd95_mm": 2e-6, "prediction_ml": 5e-12, "label_ml": 7.5e-12}
    cases["mean"]["2"]["hd95_mm"] = None
    changes = {"data.json": data, "validation/cases.json": cases}
    page = Page(run_page(write_run(tmp_path, **changes)))
    assert page.cells("liver") == ["liver", "0.844", "2.00", "0.844", "5.000", "7.500", "2"]
    for words in ("HD95 (nm)", "NSD (20 nm)", "segmented (µm³)", "10 x 10 x 40 nm"):
        assert words in page.text, words
    assert "mean HD95 2 nm" in page.text and " mm" not in page.text


# Several folds


def folds_page(folder, output, with_pages=()):
    pages = {fold: folder / f"fold{fold}/report.html" for fold in with_pages}
    return run_pages.folds_page(folder, folds_in(folder), pages, output)


def spread(mean, deviation):
    return {"mean": mean, "standard_deviation": deviation, "num_folds": 2}


def folds_summary(label="liver"):
    """Return the summary of a training of folds 0 and 2."""
    return {
        "folds": {
            "0": {"final_mean_dice": 0.5, "final_dice": {label: 0.25}, "epochs": 4, "seconds": 60},
            "2": {"final_mean_dice": 0.75, "final_dice": {label: 0.5}, "epochs": 4, "seconds": 90},
        },
        "final_mean_dice": spread(0.625, 0.177),
        "final_dice": {label: spread(0.375, 0.178)},
        "best_dice": spread(0.75, None),
    }


def test_finished_folds_show_their_scores_and_lead_to_their_pages(tmp_path):
    folder = tmp_path / "all folds"
    for fold in (0, 2):
        write_run(folder / f"fold{fold}")
    write_json(folder / "summary.json", folds_summary())
    page = Page(folds_page(folder, folder / "report.html", [2]))
    assert_closed(page)
    assert page.links == ["fold2/report.html"]
    assert "all folds: 2 folds" in page.text and "Finished: 2 of 2 folds." in page.text
    assert "final networks of 2 folds" in page.text
    assert page.cells("fold 0") == ["fold 0", "0.547", "4", "1 h 02 min", "not started"]
    assert page.cells("fold 2")[-1] == "report of fold 2"
    assert page.cells("liver") == ["liver", "0.250", "0.500", "0.375", "0.178"]
    elsewhere = Page(folds_page(folder, tmp_path / "page.html", [2]))
    assert elsewhere.links == ["all%20folds/fold2/report.html"]


def test_folds_that_have_not_ended_show_what_there_is(tmp_path):
    write_run(tmp_path / "fold0")
    write_run(tmp_path / "fold1", **{"summary.json": None})
    page = Page(folds_page(tmp_path, tmp_path / "report.html"))
    assert_closed(page)
    assert "Finished: 1 of 2 folds." in page.text
    assert page.cells("fold 0")[1:4] == ["0.547", "4", "1 h 02 min"]
    assert page.cells("fold 1")[1:4] == ["–", "–", "–"]
    assert "when all folds have finished" in page.text


def test_names_of_folds_are_text_and_damage_is_named(tmp_path):
    evil = '"><script>alert(1)</script>'
    write_run(tmp_path / "fold0")
    write_json(tmp_path / "summary.json", folds_summary(evil))
    page = Page(folds_page(tmp_path, tmp_path / "report.html"))
    assert_closed(page)
    assert page.cells(evil)[0] == evil and "script" not in page.tags
    (tmp_path / "summary.json").write_text('{"folds": 1}')
    page = Page(folds_page(tmp_path, tmp_path / "report.html"))
    assert "summary.json is damaged, and is left out." in page.text
