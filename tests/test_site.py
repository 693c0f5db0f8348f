"""The site that ``make docs`` builds: strict, complete, and without network requests."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from unet3d.cli.app import commands
from unet3d.config import Config
from unet3d.config.explain import settings_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers")
missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
]


class Page(HTMLParser):
    """The text of a page, its links, and the files that it loads."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loaded = set(), [], []
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag, attrs):
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
        links = page.loaded + page.links
        for link in links if path.name != "404.html" else ():  # its links are relative to the root
            if re.match(r"(https?|mailto):", link):
                assert link not in page.loaded, f"{path.name} loads {link}"
                continue
            file, anchor = urldefrag(unquote(link))
            target = (path.parent / file).resolve() if file else path
            assert target.is_file() or target == site.resolve(), f"{path.name}: {link}"
            if anchor and target in pages:
                assert anchor in pages[target].ids, f"{path.name}: {link}"
        assert "@import" not in page.text
        # Docstrings appear without reStructuredText markup.
        assert not re.search(r":(?:class|func|meth|mod):", page.text), path.name


def test_every_setting_command_and_public_name_is_explained(site, pages):
    shown = set(re.findall(r'<h2 id="unet3d-(\w+)">', pages[site / "reference/commands.html"].text))
    assert shown == {name for name, command in commands.commands.items() if not command.hidden}
    keys = {setting.key for setting in settings_of(Config).values() if not setting.is_section}
    assert keys <= pages[site / "reference/settings.html"].ids
    public = """errors.DatasetError model.loss.SegmentationLoss model.loss.dice_cross_entropy
        model.topology.plan_topology model.unet.UNet3d parallel.executor.Executor.forward_backward
        parallel.parallelize parallel.placement.Layout planning.memory_estimate.predict_memory
        api.train datasets.dataset.load_dataset images.image.open_image"""
    ids = set().union(*(page.ids for page in pages.values()))
    assert {f"unet3d.{name}" for name in public.split()} <= ids


def test_the_readme_is_the_front_page_with_its_links(site, pages):
    page = pages[site / "index.html"]
    pages_linked = {"design.html", "data.html", "how-do-i/index.html", "reference/settings.html"}
    assert pages_linked <= set(page.links)
    assert "preview.png" in page.loaded


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium")
def test_search_works_in_pages_opened_from_the_disk(site):
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        flags = ["--no-sandbox"]
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        page = browser.new_page()
        requests = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto((site / "how-do-i/train.html").as_uri())
        page.click("input.md-search__input")
        page.keyboard.type("thick slices")
        found = page.wait_for_selector(".md-search-result__item a", timeout=60_000)
        assert found.get_attribute("href").startswith((site / "how-do-i/data.html").as_uri())
        assert all(url.startswith("file:") for url in requests)
        browser.close()
