"""Pages in a headless Chromium, from the disk: what is seen, keys, and not a word to the network.

They need a Chromium of the system, which none of our dependencies brings.
"""

import io
import re
import shutil
from pathlib import Path
from typing import Any

import matplotlib.image
import nibabel as nib
import numpy as np
import numpy.typing as npt
import pytest

from tests.reports.pages import sample_run
from tests.reports.pages.sample_run import write_run
from unet3d.reports.pages.page import encoded
from unet3d.reports.pages.run_page import run_page
from unet3d.reports.pages.segmentation_page import segmentation_page

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=f"there is none of {', '.join(NAMES)}")

FLAGS = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
SKY, ORANGE, VERMILION = (86, 180, 233), (230, 159, 0), (213, 94, 0)  # Okabe and Ito
EVIL = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"


class Opened:
    """A page in the browser, and what went wrong in it."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.page = browser.new_context(**options).new_page()
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.wrong.append(message.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: self.wrong.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self._address = path.as_uri()

    def ready(self) -> Any:
        """Wait until the viewer is drawn, and return the page."""
        self.page.wait_for_selector("html.is-ready", state="attached", timeout=60_000)
        return self.page

    def press(self, *keys: str) -> None:
        self.page.focus("#canvas")
        for key in keys:
            self.page.keyboard.press(key)

    @property
    def place(self) -> dict[str, float]:  # in mm to the right, front and top
        text = self.page.text_content("#place")
        found = re.match(r"([LR]) ([\d.]+)  ([PA]) ([\d.]+)  ([IS]) ([\d.]+) mm", text)
        assert found, text
        signs = [-1 if letter in "LPI" else 1 for letter in found.groups()[::2]]
        return dict(
            zip("xyz", np.multiply(signs, list(map(float, found.groups()[1::2]))), strict=True)
        )

    def pixels(self) -> npt.NDArray[np.int64]:
        """Return what the viewer shows, (height, width, 3), from 0 to 255."""
        content = self.page.locator("#canvas").screenshot()
        picture = matplotlib.image.imread(io.BytesIO(content))
        # Without the rounded corners, where the outline of the focus is.
        return np.rint(picture[20:-20, 20:-20, :3] * 255).astype(np.int64)

    def close(self) -> None:
        assert self.wrong == []
        assert self.requests == [self._address]
        self.page.context.close()


def near(pixels: npt.NDArray[np.int64], colour: tuple[int, int, int]) -> npt.NDArray[np.bool_]:
    """Return where pixels have a colour."""
    return np.abs(pixels - colour).max(axis=2) <= 12


def coloured(pixels: npt.NDArray[np.int64]) -> int:
    """Return how many pixels are not grey, as those of a scan are."""
    return int((np.ptp(pixels, axis=2) > 20).sum())


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as started:
        yield started.chromium


@pytest.fixture(scope="module")
def browser(chromium):
    started = chromium.launch(executable_path=CHROMIUM, args=FLAGS)
    yield started
    started.close()


@pytest.fixture(scope="module")
def segmentation(tmp_path_factory):
    """The page of a scan stored from left to right and front to back.

    Its labels are ``organ``, on the patient's right, in front and on top, and one of another name
    opposite of it.
    """
    folder = tmp_path_factory.mktemp("a page #1?")
    shape, affine = (40, 32, 24), np.diag([-2.0, -2.0, 3.0, 1.0])
    image = np.random.default_rng(0).normal(100, 20, shape).astype(np.float32)
    labels = np.zeros(shape, np.uint8)
    labels[4:14, 4:12, 14:22] = 1
    labels[30:36, 24:30, 2:8] = 2
    for name, array in (("scan", image), ("seg", labels)):
        nib.save(nib.Nifti1Image(array, affine), folder / f"{name}.nii.gz")
    page = segmentation_page(folder / "seg.nii.gz", folder / "scan.nii.gz", {1: "organ", 2: EVIL})
    (folder / "seg.html").write_bytes(encoded(page))
    return folder / "seg.html"


@pytest.fixture
def viewer(browser, segmentation):
    opened = Opened(browser, segmentation, viewport={"width": 1000, "height": 900})
    opened.ready()
    yield opened
    opened.close()


def test_the_canvas_shows_the_labels_in_their_colours(viewer):
    viewer.press(*["+"] * 5)
    assert viewer.page.input_value("#opacity") == "100"
    organ, other = (viewer.page.locator("button.place").nth(number) for number in range(2))
    other.click()
    assert near(viewer.pixels(), ORANGE).sum() > 2000
    organ.click()
    assert near(viewer.pixels(), SKY).sum() > 2000
    viewer.press("o")
    assert viewer.page.input_value("#opacity") == "0"
    without = viewer.pixels()
    assert coloured(without) == 0 and without.max() > 200  # the scan alone
    viewer.press("o", "1")
    assert near(viewer.pixels(), SKY).sum() == 0
    other.click()
    assert near(viewer.pixels(), ORANGE).sum() > 2000
    organ.click()
    assert not viewer.page.is_checked(".toggle >> nth=0")
    viewer.page.check(".toggle >> nth=0")
    assert near(viewer.pixels(), SKY).sum() > 2000


@pytest.mark.nightly
def test_the_patients_right_is_on_the_left_and_the_front_on_top(viewer):
    viewer.page.click("button.place >> nth=0")
    viewer.press("v", *["+"] * 5)
    assert viewer.page.is_checked("input[name=view][value='0']")  # axial
    pixels = viewer.pixels()
    rows, columns = np.nonzero(near(pixels, SKY))
    height, width, _ = pixels.shape
    assert columns.mean() < width / 2 and rows.mean() < height / 2
    viewer.press("v")  # coronal: right is on the left, top above
    rows, columns = np.nonzero(near(viewer.pixels(), SKY))
    assert columns.mean() < width / 2 and rows.mean() < height / 2
    viewer.press("v")  # sagittal: the front is on the left
    rows, columns = np.nonzero(near(viewer.pixels(), SKY))
    assert columns.mean() < width / 2 and rows.mean() < height / 2


@pytest.mark.nightly
def test_the_crosshair_is_seen_in_every_plane(viewer):
    viewer.press("o")
    for _ in range(3):
        viewer.press("v")
        for _ in range(3):  # wherever it lies between the pixels
            viewer.press("ArrowLeft", "ArrowDown")
            white = (viewer.pixels() > 170).all(axis=2)
            assert white.mean(axis=0).max() > 0.6 and white.mean(axis=1).max() > 0.6


@pytest.mark.nightly
def test_a_name_leads_to_its_label(viewer):
    # Voxels 4 to 13, 4 to 11, 14 to 21, of which the scan begins with the rightmost and foremost.
    viewer.page.click("button.place >> nth=1")
    assert viewer.page.text_content("#place").endswith(EVIL)
    viewer.page.click("button.place >> nth=0")
    assert viewer.page.text_content("#place").endswith("organ")
    place = viewer.place
    assert -2 * 13 <= place["x"] <= -2 * 4 and -2 * 11 <= place["y"] <= -2 * 4
    assert 3 * 14 <= place["z"] <= 3 * 21


@pytest.mark.nightly
@pytest.mark.parametrize("num_labels", [64, 300])
def test_many_labels_have_their_colours_and_the_background_has_none(browser, tmp_path, num_labels):
    labels = np.zeros((40, 40, 40), np.uint16)
    labels.ravel()[: num_labels - 1] = np.arange(1, num_labels)
    labels[8:32, 8:32, 24:36] = num_labels
    image = np.full(labels.shape, 100, np.int16)
    image[:, :4] = 300
    for name, array in (("scan", image), ("seg", labels)):
        nib.save(nib.Nifti1Image(array, np.eye(4)), tmp_path / f"{name}.nii.gz")
    page = segmentation_page(tmp_path / "seg.nii.gz", tmp_path / "scan.nii.gz")
    (tmp_path / "seg.html").write_bytes(encoded(page))
    opened = Opened(browser, tmp_path / "seg.html", viewport={"width": 700, "height": 700})
    opened.ready().locator("button.place").last.click()
    assert opened.page.text_content("#place").endswith(f"label {num_labels}")
    opened.press("v", *["+"] * 5)
    pixels = opened.pixels()
    # The colours begin anew behind the seventh.
    own = near(pixels, (SKY, VERMILION)[num_labels == 300])
    assert own.mean() > 0.2
    # At the edges colours are mixed; the background would be twice as much.
    assert own.sum() < coloured(pixels) < 1.3 * own.sum()
    opened.close()


@pytest.mark.nightly
def test_every_key_does_what_the_page_says(viewer):
    page = viewer.page
    page.click("button.place >> nth=0")
    begin = viewer.place
    for key, back, axis, step in (
        ("ArrowLeft", "ArrowRight", "x", 2),
        ("ArrowUp", "ArrowDown", "y", 2),
        ("PageUp", "PageDown", "z", 3),
    ):
        viewer.press(key)
        assert viewer.place == {**begin, axis: pytest.approx(begin[axis] + step)}
        viewer.press(back)
        assert viewer.place == pytest.approx(begin)
    views = []
    for _ in range(5):
        viewer.press("v")
        views.append(page.input_value("input[name=view]:checked"))
    assert views == ["0", "1", "2", "4", "3"]
    viewer.press("v", "v", "v", "v")  # 3D
    before = viewer.pixels()
    for key in ("ArrowLeft", "ArrowUp", "c"):
        viewer.press(key)
        after = viewer.pixels()
        assert (np.abs(after - before).max(axis=2) > 20).mean() > 0.005, key
        before = after
    viewer.press("+", "1", "r")
    assert page.input_value("#opacity") == "50" and page.is_checked(".toggle >> nth=0")
    assert page.input_value("input[name=view]:checked") == "3"
    viewer.press("-")
    assert page.input_value("#opacity") == "40"


@pytest.mark.nightly
def test_the_viewer_is_reached_and_left_with_tab_and_that_is_seen(viewer):
    page = viewer.page
    reached = []
    outline = "getComputedStyle(document.querySelector('.canvas')).outlineStyle"
    assert page.evaluate(outline) == "none"
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.name"))
        if reached[-1] == "canvas":
            assert page.evaluate(outline) == "solid"
    for name in ("view", "opacity", "black", "white", "cut", "reset", "canvas"):
        assert name in reached
    assert reached[-1] != "canvas"


@pytest.mark.nightly
def test_black_and_white_can_be_changed(viewer):
    viewer.press("o")
    before = viewer.pixels().mean()
    page = viewer.page
    page.focus("#white")
    page.keyboard.press("Home")
    assert viewer.pixels().mean() > 1.5 * before  # all is white
    page.click("#reset")
    viewer.press("o")
    assert viewer.pixels().mean() == pytest.approx(before, rel=0.05)


@pytest.mark.nightly
def test_on_paper_and_without_javascript_there_is_a_picture(browser, segmentation, viewer):
    page = viewer.page
    assert page.is_visible("#canvas") and not page.is_visible("#picture")
    page.emulate_media(media="print")
    assert not page.is_visible("#canvas") and page.is_visible("#picture")
    opened = Opened(browser, segmentation, java_script_enabled=False)
    assert opened.page.is_visible("#picture") and not opened.page.is_visible("#canvas")
    assert "needs JavaScript" in opened.page.inner_text("noscript")
    assert opened.page.is_visible("text=organ")
    opened.close()


@pytest.mark.nightly
def test_without_webgl_the_page_says_so_and_shows_a_picture(chromium, segmentation):
    browser = chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-3d-apis"])
    opened = Opened(browser, segmentation)
    page = opened.page
    assert "WebGL 2" in page.inner_text("#viewer-note")
    assert page.is_visible("#picture") and not page.is_visible("#canvas")
    assert page.is_visible("text=organ") and not page.is_visible(".toggle >> nth=0")
    opened.close()
    browser.close()


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_pages_fit_their_width_in_light_and_dark(browser, segmentation, tmp_path, scheme, width):
    folder = write_run(tmp_path, **{"validation/cases.json": sample_run.cases(EVIL)})
    (tmp_path / "report.html").write_bytes(encoded(run_page(folder)))
    for path in (segmentation, tmp_path / "report.html"):
        view = {"width": width, "height": 800}
        opened = Opened(browser, path, viewport=view, color_scheme=scheme)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        colour = opened.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        levels = list(map(int, re.findall(r"\d+", colour)))
        assert max(levels) < 40 if scheme == "dark" else min(levels) > 240
        opened.close()


@pytest.mark.nightly
def test_headings_sort_by_keyboard(browser, tmp_path):
    folder = write_run(tmp_path)
    (tmp_path / "report.html").write_bytes(encoded(run_page(folder)))
    opened = Opened(browser, tmp_path / "report.html")
    page = opened.page

    def cases():
        found: list[str] = page.locator("table.sortable tbody th").all_text_contents()
        return found

    def sort(column):
        page.locator("table.sortable thead button").nth(column).focus()
        page.keyboard.press("Enter")
        state: str = page.locator("table.sortable thead th").nth(column).get_attribute("aria-sort")
        return state

    assert cases() == ["low", "high"]
    assert sort(1) == "descending" and cases() == ["high", "low"]
    assert sort(1) == "ascending" and cases() == ["low", "high"]
    assert sort(0) == "ascending" and cases() == ["high", "low"]
    # The tumour of "high" has no Dice: last in both directions.
    assert sort(3) == "ascending" and cases() == ["low", "high"]
    assert sort(3) == "descending" and cases() == ["low", "high"]
    assert page.locator("th[aria-sort]").count() == 1
    assert page.evaluate("[...document.images].every((one) => one.naturalWidth > 0)")
    opened.close()
