"""Pages in a headless Chromium, from the disk: what they show, keys, and no network requests.

The tests need a Chromium of the system; no dependency brings one.
"""

import io
import re
import shutil

import matplotlib.image
import nibabel as nib
import numpy as np
import pytest

from tests.reports.pages import sample_run
from tests.reports.pages.sample_run import write_run
from unet3d.reports.pages.run_page import run_page
from unet3d.reports.pages.segmentation_page import segmentation_page

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason=f"there is none of {', '.join(NAMES)}"),
    pytest.mark.nightly,
]

FLAGS = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
SKY, ORANGE, VERMILION = (86, 180, 233), (230, 159, 0), (213, 94, 0)  # Okabe and Ito
EVIL = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"


class Opened:
    """A page in the browser, with its errors and requests."""

    def __init__(self, browser, path, **options):
        self.page = browser.new_context(**options).new_page()
        self.wrong, self.requests = [], []
        self.page.on("console", lambda message: self.wrong.append(message.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: self.wrong.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self._address = path.as_uri()
        self.page.goto(self._address)

    def ready(self):
        """Wait until the viewer is drawn, and return the page."""
        self.page.wait_for_selector("html.is-ready", state="attached", timeout=60_000)
        return self.page

    def press(self, *keys):
        self.page.focus("#canvas")
        for key in keys:
            self.page.keyboard.press(key)

    @property
    def place(self):  # in mm to the right, front and top
        text = self.page.text_content("#place")
        found = re.match(r"([LR]) ([\d.]+)  ([PA]) ([\d.]+)  ([IS]) ([\d.]+) mm", text)
        assert found, text
        signs = [-1 if letter in "LPI" else 1 for letter in found.groups()[::2]]
        mm = np.multiply(signs, list(map(float, found.groups()[1::2])))
        return dict(zip("xyz", mm, strict=True))

    def pixels(self):
        """Return the viewer's pixels, (height, width, 3), from 0 to 255."""
        content = self.page.locator("#canvas").screenshot()
        picture = matplotlib.image.imread(io.BytesIO(content))
        # Rounded corners show the outline of the focus, so a margin is cut off.
        return np.rint(picture[20:-20, 20:-20, :3] * 255).astype(np.int64)

    def close(self):
        assert self.wrong == []
        assert self.requests == [self._address]
        self.page.context.close()


def near(pixels, colour):
    """Return which pixels have about this colour."""
    return np.abs(pixels - colour).max(axis=2) <= 12


def coloured(pixels):
    """Return the number of pixels that are not grey; a scan's pixels are grey."""
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


def write_page(folder, image, labels, affine, names=None):
    for name, array in (("scan", image), ("seg", labels)):
        nib.save(nib.Nifti1Image(array, affine), folder / f"{name}.nii.gz")
    page = segmentation_page(folder / "seg.nii.gz", folder / "scan.nii.gz", names)
    (folder / "seg.html").write_text(page)
    return folder / "seg.html"


@pytest.fixture(scope="module")
def segmentation(tmp_path_factory):
    """The page of a scan that is stored from left to right and front to back.

    Label ``organ`` is on the patient's right, in front and on top; another label is opposite.
    """
    folder = tmp_path_factory.mktemp("a page #1?")
    shape, affine = (40, 32, 24), np.diag([-2.0, -2.0, 3.0, 1.0])
    image = np.random.default_rng(0).normal(100, 20, shape).astype(np.float32)
    labels = np.zeros(shape, np.uint8)
    labels[4:14, 4:12, 14:22] = 1
    labels[30:36, 24:30, 2:8] = 2
    return write_page(folder, image, labels, affine, {1: "organ", 2: EVIL})


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
    assert coloured(without) == 0 and without.max() > 200  # the scan without labels
    viewer.press("o", "1")
    assert near(viewer.pixels(), SKY).sum() == 0
    other.click()
    assert near(viewer.pixels(), ORANGE).sum() > 2000
    organ.click()
    assert not viewer.page.is_checked(".toggle >> nth=0")
    viewer.page.check(".toggle >> nth=0")
    assert near(viewer.pixels(), SKY).sum() > 2000


def test_a_name_leads_to_its_label_which_is_on_its_side_of_every_plane(viewer):
    page = viewer.page
    page.click("button.place >> nth=1")
    assert page.text_content("#place").endswith(EVIL)
    page.click("button.place >> nth=0")
    assert page.text_content("#place").endswith("organ")
    # The label has voxels 4 to 13, 4 to 11 and 14 to 21; the scan begins at the right and in front.
    place = viewer.place
    assert -2 * 13 <= place["x"] <= -2 * 4 and -2 * 11 <= place["y"] <= -2 * 4
    assert 3 * 14 <= place["z"] <= 3 * 21
    viewer.press(*["+"] * 5)
    for view in range(3):  # axial; coronal: right is on the left, top above; sagittal: front left
        viewer.press("v")
        assert page.is_checked(f"input[name=view][value='{view}']")
        pixels = viewer.pixels()
        rows, columns = np.nonzero(near(pixels, SKY))
        assert columns.mean() < pixels.shape[1] / 2 and rows.mean() < pixels.shape[0] / 2


def test_many_labels_have_their_colours_and_the_background_has_none(browser, tmp_path):
    num_labels = 300
    labels = np.zeros((40, 40, 40), np.uint16)
    labels.ravel()[: num_labels - 1] = np.arange(1, num_labels)
    labels[8:32, 8:32, 24:36] = num_labels
    image = np.full(labels.shape, 100, np.int16)
    image[:, :4] = 300
    path = write_page(tmp_path, image, labels, np.eye(4))
    opened = Opened(browser, path, viewport={"width": 700, "height": 700})
    opened.ready().locator("button.place").last.click()
    assert opened.page.text_content("#place").endswith(f"label {num_labels}")
    opened.press("v", *["+"] * 5)
    pixels = opened.pixels()
    own = near(pixels, VERMILION)  # the eighth label has the first colour again
    assert own.mean() > 0.2
    # At edges colours are mixed; a coloured background would double the number.
    assert own.sum() < coloured(pixels) < 1.3 * own.sum()
    opened.close()


def test_where_left_is_unknown_x_runs_to_the_right_and_lengths_are_those_of_cells(
    browser, tmp_path
):
    labels = np.zeros((20, 20, 20), np.uint8)
    labels[2:8, 12:18, 12:18] = 1  # near the low end of X, which nibabel assumes to run to the left
    for name, array in (("scan", labels * 100 + 5), ("seg", labels)):
        image = nib.Nifti1Image(array, None)
        image.header.set_zooms((0.2, 0.2, 0.2))
        image.header.set_xyzt_units("micron")
        nib.save(image, tmp_path / f"{name}.nii.gz")
    page = segmentation_page(tmp_path / "seg.nii.gz", tmp_path / "scan.nii.gz")
    (tmp_path / "seg.html").write_text(page)
    opened = Opened(browser, tmp_path / "seg.html", viewport={"width": 900, "height": 900})
    page = opened.ready()
    # The centre of voxels 12 to 17; nibabel places the centre of all voxels at the origin.
    place = page.text_content("#place")
    assert re.match(r"X (0.9|1.1)0  Y (0.9|1.1)0  Z (0.9|1.1)0 µm", place), place
    opened.press(*["+"] * 5)
    for view in ("XY", "XZ", "YZ"):
        opened.press("v")
        assert page.locator("label:has(input:checked) span").first.text_content() == view
        pixels = opened.pixels()
        rows, columns = np.nonzero(near(pixels, SKY))
        assert columns.mean() > pixels.shape[1] / 2 and rows.mean() < pixels.shape[0] / 2
    opened.press("v", "v", "ArrowRight")  # the 3D view, then all views
    moved = page.text_content("#place")
    assert float(moved.split()[1]) == pytest.approx(float(place.split()[1]) + 0.2)
    opened.close()


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
    viewer.press("v", "v", "v", "v")  # the 3D view
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


def test_where_the_viewer_cannot_be_is_a_picture(chromium, browser, segmentation, viewer):
    viewer.page.emulate_media(media="print")
    blind = chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-3d-apis"])
    scriptless = Opened(browser, segmentation, java_script_enabled=False)
    without_webgl = Opened(blind, segmentation)
    assert "needs JavaScript" in scriptless.page.inner_text("noscript")
    assert "WebGL 2" in without_webgl.page.inner_text("#viewer-note")
    assert not without_webgl.page.is_visible(".toggle >> nth=0")
    for opened in (viewer, scriptless, without_webgl):
        assert opened.page.is_visible("#picture") and not opened.page.is_visible("#canvas")
    for opened in (scriptless, without_webgl):
        assert opened.page.is_visible("text=organ")
        opened.close()
    blind.close()


@pytest.mark.parametrize(("scheme", "width"), [("light", 360), ("dark", 1200)])
def test_pages_fit_their_width_in_light_and_dark(browser, segmentation, tmp_path, scheme, width):
    folder = write_run(tmp_path, **{"validation/cases.json": sample_run.cases(EVIL)})
    (tmp_path / "report.html").write_text(run_page(folder))
    for path in (segmentation, tmp_path / "report.html"):
        view = {"width": width, "height": 800}
        opened = Opened(browser, path, viewport=view, color_scheme=scheme)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        colour = opened.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        levels = list(map(int, re.findall(r"\d+", colour)))
        assert max(levels) < 40 if scheme == "dark" else min(levels) > 240
        opened.close()


def test_headings_sort_by_keyboard(browser, tmp_path):
    folder = write_run(tmp_path)
    (tmp_path / "report.html").write_text(run_page(folder))
    opened = Opened(browser, tmp_path / "report.html")
    page = opened.page

    def cases():
        return page.locator("table.sortable tbody th").all_text_contents()

    def sort(column):
        page.locator("table.sortable thead button").nth(column).focus()
        page.keyboard.press("Enter")
        return page.locator("table.sortable thead th").nth(column).get_attribute("aria-sort")

    assert cases() == ["low", "high"]
    assert sort(1) == "descending" and cases() == ["high", "low"]
    assert sort(1) == "ascending" and cases() == ["low", "high"]
    assert sort(0) == "ascending" and cases() == ["high", "low"]
    # The tumour of case "high" has no Dice, so it is last in both directions.
    assert sort(3) == "ascending" and cases() == ["low", "high"]
    assert sort(3) == "descending" and cases() == ["low", "high"]
    assert page.locator("th[aria-sort]").count() == 1
    assert page.evaluate("[...document.images].every((one) => one.naturalWidth > 0)")
    opened.close()
