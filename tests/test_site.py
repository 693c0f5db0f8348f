"""The site that ``make docs`` builds: strict, complete, and without a word to the network."""

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from unet3d.config.reference import settings

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers")
missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
]


class Page(HTMLParser):
    """What a page shows, links to, and loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids.add(values.get("id") or "")
        if tag == "a" and values.get("href"):
            self.links.append(values["href"] or "")
        elif values.get("src") or (tag == "link" and values.get("href")):
            self.loaded.append(values.get("src") or values.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site as ``make docs`` does."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "which is excluded from" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    """Each page of the site."""
    return {path: Page(path) for path in site.rglob("*.html")}


def test_links_lead_somewhere_and_nothing_is_loaded_from_elsewhere(site, pages):
    assert len(pages) > 15
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are those of the site's root
        for link in page.loaded + page.links:
            if re.match(r"(https?|mailto):", link):
                assert link not in page.loaded, f"{path.name} loads {link}"
                continue
            file, anchor = urldefrag(unquote(link))
            target = (path.parent / file).resolve() if file else path
            assert target.is_file() or target == site.resolve(), f"{path.name}: {link}"
            if anchor and target in pages:
                assert anchor in pages[target].ids, f"{path.name}: {link}"
        assert "@import" not in page.text


def test_every_setting_is_explained(site, pages):
    page = pages[site / "settings.html"]
    for setting in settings():
        if not setting.is_section:
            assert setting.key in page.ids


@pytest.mark.parametrize(
    "name",
    [
        "unet3d.errors.DatasetError",
        "unet3d.model.loss.SegmentationLoss",
        "unet3d.model.loss.dice_cross_entropy",
        "unet3d.model.topology.plan_topology",
        "unet3d.model.unet.UNet3d",
        "unet3d.parallel.executor.Executor.forward_backward",
        "unet3d.parallel.parallelize",
        "unet3d.parallel.placement.Layout",
        "unet3d.planning.memory_estimate.predict_memory",
        "unet3d.trainer.train",
        "unet3d.volumes.dataset.load_dataset",
        "unet3d.volumes.nifti.read_image",
    ],
)
def test_what_is_public_is_in_the_reference(pages, name):
    assert any(name in page.ids for page in pages.values())


def test_docstrings_are_shown_without_marks_of_another_language(pages):
    for path, page in pages.items():
        assert not re.search(r":(?:class|func|meth|mod):", page.text), path.name


def test_the_readme_is_the_front_page_with_its_links(site, pages):
    page = pages[site / "index.html"]
    assert {"parallel.html", "design.html", "data.html", "settings.html"} <= set(page.links)
    assert "two-devices.svg" in page.loaded
