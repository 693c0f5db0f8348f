"""The page of a training over several folds."""

from tests.images.samples import write_json
from tests.reports.pages.html import Page, assert_closed
from tests.reports.pages.sample_run import write_run
from unet3d.reports.pages import folds_page as module
from unet3d.runs.run_folder import folds_in


def folds_page(folder, output, with_pages=()):
    pages = {fold: folder / f"fold{fold}/report.html" for fold in with_pages}
    return module.folds_page(folder, folds_in(folder), pages, output)


def spread(mean, deviation):
    return {"mean": mean, "standard_deviation": deviation, "num_folds": 2}


def summary(label="liver"):
    """What a training of folds 0 and 2 writes."""
    return {
        "folds": {
            "0": {"final_mean_dice": 0.5, "final_dice": {label: 0.25}, "epochs": 4, "seconds": 60},
            "2": {"final_mean_dice": 0.75, "final_dice": {label: 0.5}, "epochs": 4, "seconds": 90},
        },
        "final_mean_dice": spread(0.625, 0.177),
        "final_dice": {label: spread(0.375, 0.178)},
    }


def test_finished_folds_show_their_scores_and_lead_to_their_pages(tmp_path):
    folder = tmp_path / "all folds"
    for fold in (0, 2):
        write_run(folder / f"fold{fold}")
    write_json(folder / "summary.json", summary())
    page = Page(folds_page(folder, folder / "report.html", [2]))
    assert_closed(page)
    assert page.links == ["fold2/report.html"]
    assert "all folds: 2 folds" in page.text and "2 of 2 folds have ended." in page.text
    assert "final networks of 2 folds" in page.text
    assert page.cells("fold 0")[1:4] == ["0.500", "4", "1 min 00 s"]
    assert page.cells("fold 0")[4] == "not begun"  # without a page
    assert page.cells("fold 2")[1:] == ["0.750", "4", "1 min 30 s", "report of fold 2"]
    assert page.cells("liver") == ["liver", "0.250", "0.500", "0.375", "0.178"]
    write_run(folder / "fold1", **{"summary.json": None})  # which the summary does not know
    page = Page(folds_page(folder, folder / "report.html"))
    assert page.cells("liver") == ["liver", "0.250", "–", "0.500", "0.375", "0.178"]
    elsewhere = Page(folds_page(folder, tmp_path / "page.html", [2]))
    assert elsewhere.links == ["all%20folds/fold2/report.html"]


def test_folds_that_have_not_ended_show_what_there_is(tmp_path):
    write_run(tmp_path / "fold0")
    write_run(tmp_path / "fold1", **{"summary.json": None})
    page = Page(folds_page(tmp_path, tmp_path / "report.html"))
    assert_closed(page)
    assert "1 of 2 folds have ended." in page.text
    assert page.cells("fold 0")[1:4] == ["0.547", "4", "1 h 02 min"]
    assert page.cells("fold 1")[1:4] == ["–", "–", "–"]
    assert "when all of them have ended" in page.text


def test_names_are_text_and_damage_is_named(tmp_path):
    evil = '"><script>alert(1)</script>'
    write_run(tmp_path / "fold0")
    write_json(tmp_path / "summary.json", summary(evil))
    page = Page(folds_page(tmp_path, tmp_path / "report.html"))
    assert_closed(page)
    assert page.cells(evil)[0] == evil and "script" not in page.tags
    (tmp_path / "summary.json").write_text('{"folds": 1}')
    page = Page(folds_page(tmp_path, tmp_path / "report.html"))
    assert "summary.json is damaged, and is left out." in page.text
