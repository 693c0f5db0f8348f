"""``unet3d report`` as a user meets it."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from tests.command_line import SMALL, refusal, run, scan_array
from tests.images.samples import write_json, write_volume
from tests.networks import write_checkpoint
from tests.trainings import contents


@pytest.fixture
def finished(folder):
    """The smallest run that has a page."""
    write_json(folder / "runs/mine/data.json", {"unet3d": "0.1.0"})
    return folder / "runs/mine"


@pytest.fixture
def segmentation(folder, scan):
    labels = (scan_array() > 110).astype(np.uint8)
    return write_volume(folder / "a scan_seg.nii.gz", labels)


@pytest.mark.nightly
def test_a_training_and_its_prediction_have_pages(folder, scan, capsys):
    """Pages understand what other commands write: no file is called damaged or missing."""
    phantoms = ("--set", "data.phantom_shape=16,16,16")
    assert run("train", *SMALL, *phantoms, "--output", "runs/mine", "--quiet") == 0
    assert run("predict", scan, "--checkpoint", "runs/mine") == 0
    capsys.readouterr()
    assert run("report", "runs/mine") == 0
    out = capsys.readouterr().out
    assert re.fullmatch(r"runs/mine -> runs/mine/report\.html \(\d+\.\d MB\)\n", out)
    page = Path("runs/mine/report.html").read_text()
    assert 'class="notes"' not in page and 'class="missing"' not in page
    for word in ("ventricles", "segmented", "predicted", "worst case", "Finished after 1 epoch,"):
        assert word in page, word
    assert run("report", "a scan_seg.nii.gz", "--image", scan) == 0
    page = Path("a scan_seg.html").read_text()
    assert page.count('class="notes"') == 2  # for the viewer, and for browsers without scripts
    assert "ventricles" in page


def test_pages_lie_beside_what_they_show(folder, finished, segmentation, scan, capsys):
    before = contents(folder)
    assert run("report", finished) == 0
    assert run("report", segmentation, "--image", scan) == 0
    page = finished / "report.html"
    after = contents(folder)
    assert after.keys() - before.keys() == {page, folder / "a scan_seg.html"}
    assert {path: after[path] for path in before} == before
    assert run("report", finished, "-o", "pages.html") == 0
    assert Path("pages.html").read_bytes() == page.read_bytes()
    for name in ("pages.html", "a scan_seg.html"):
        shown = (segmentation, "--image", scan) if "seg" in name else (finished,)
        line = refusal(capsys, "report", *shown, "-o", name)
        assert f"{name} exists; add --overwrite to replace it" in line
        assert run("report", *shown, "-o", name, "--overwrite") == 0


def test_the_page_of_a_training_that_goes_on_is_made_again_and_again(folder, finished, capsys):
    page = finished / "report.html"
    for num_epochs in (0, 1, 2):
        lines = [{"epoch": epoch + 1, "loss": 1.0} for epoch in range(num_epochs)]
        (finished / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        assert run("report", finished) == 0
        plural = "" if num_epochs == 1 else "s"
        assert f"Not finished: {num_epochs} epoch{plural} done." in page.read_text()
    page.write_text("of somebody else")
    line = refusal(capsys, "report", finished)
    assert f"{page} exists; add --overwrite to replace it" in line
    assert page.read_text() == "of somebody else"
    assert run("report", finished, "--overwrite") == 0


def test_nothing_but_a_page_is_written_over(
    folder, finished, segmentation, scan, monkeypatch, capsys
):
    (folder / "link.html").symlink_to(finished / "data.json")
    (folder / "folder.html").mkdir()
    os.mkfifo(folder / "pipe.html")
    before = contents(folder)
    for shown in ((finished,), (segmentation, "--image", scan)):
        command = ("report", *shown, "--overwrite", "-o")
        for name in (finished / "data.json", scan, "page", "page.png"):
            assert "ends in .html" in refusal(capsys, *command, name)
        for name in ("link.html", "folder.html", "pipe.html", "absent/page.html"):
            assert f"cannot write {name}" in refusal(capsys, *command, name)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    assert "No space left on device" in refusal(capsys, "report", finished)
    assert contents(folder) == before and (folder / "link.html").is_symlink()


def test_what_has_no_page_is_refused_in_one_line(folder, finished, segmentation, scan, capsys):
    other = write_volume(folder / "other.nii.gz", scan_array((9, 9, 9)))
    for arguments, words in (
        ((segmentation,), "to show a segmentation, name its scan with --image SCAN"),
        (("absent",), "not the folder of a run"),
        ((finished, "--checkpoint", write_checkpoint(folder / "a.pt")), "--image"),
        ((segmentation, "--image", "absent.nii.gz"), "absent.nii.gz"),
        (("absent.nii.gz", "--image", scan), "absent.nii.gz"),
        ((segmentation, "--image", other), "do not lie on one grid"),
        ((scan, "--image", scan), "a label map holds whole numbers"),
        ((segmentation, "--image", scan, "--checkpoint", "absent.pt"), "absent.pt"),
    ):
        assert words in refusal(capsys, "report", *arguments)
    assert not list(folder.rglob("*.html"))


def test_a_network_names_the_labels(folder, segmentation, scan, capsys):
    network = write_checkpoint(folder / "network.pt", label_values=(0, 1, 5))
    assert run("report", segmentation, "--image", scan, "--checkpoint", network) == 0
    page = (folder / "a scan_seg.html").read_text()
    assert "label 5" in page


def test_folds_have_a_page_of_their_own(folder, capsys):
    for fold in (0, 1):
        write_json(folder / f"runs/all/fold{fold}/data.json", {"unet3d": "0.1.0", "fold": fold})
    (folder / "runs/all/config.yaml").touch()
    (folder / "runs/all/fold2").mkdir()  # a fold that has not begun
    for _ in range(2):
        assert run("report", "runs/all") == 0
        shown = [line.split(" (")[0] for line in capsys.readouterr().out.splitlines()]
        assert shown == [
            f"runs/all{one} -> runs/all{one}/report.html" for one in ("/fold0", "/fold1", "")
        ]
    page = (folder / "runs/all/report.html").read_text()
    for fold in (0, 1):
        assert f'<a href="fold{fold}/report.html">' in page
        own = (folder / f"runs/all/fold{fold}/report.html").read_text()
        assert f"all/fold{fold}: fold {fold}" in own
    assert "fold2/report.html" not in page and not any((folder / "runs/all/fold2").iterdir())
    (folder / "runs/all/fold0/report.html").write_text("of somebody else")
    assert run("report", "runs/all") == 0
    assert (folder / "runs/all/fold0/report.html").read_text() == "of somebody else"
    assert "fold0/report.html" not in (folder / "runs/all/report.html").read_text()
