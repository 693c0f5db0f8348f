"""Draw the pictures that show unet3d at work, with its commands, on built-in phantoms.

``make pictures`` writes them to ``docs``, ``python docs/draw_tour.py FOLDER`` to another folder.
Options after the folder, such as ``--epochs 2``, are passed to ``unet3d train``. A Chromium of the
system shows the pages.
"""

import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

from unet3d.datasets.phantom import write_phantom_dataset

DOCS = Path(__file__).resolve().parent
COLUMNS = 92
MARGIN = 10
"""Pixels below the last element of a page."""
UNSEEN_SEED = 2024
"""A seed other than that of the training data, so that the head is another."""

TRAIN = """train --config configs/quickstart.yaml \\
    --parallel model --devices cpu,cpu -o runs/heads"""
PREDICT = "predict scan.nii.gz -c runs/heads --preview"
REPORTS = "report runs/heads", "report scan_seg.nii.gz --image scan.nii.gz"

DRAWN = {  # by the commands
    "preview.png": "scan_seg.png",
    "progress.png": "runs/heads/progress.png",
    "memory.png": "runs/heads/memory.png",
}
SEEN = {  # in the browser: the page, its width, and the element below which the picture ends
    "report-run.png": ("runs/heads/report.html", 960, "figure"),
    "report-segmentation.png": ("scan_seg.html", 1060, "html.is-ready #place"),
}
TERMINAL = "terminal.svg"


def main(target: Path, more: list[str]) -> None:
    """Train, predict and report in a folder of its own; write the pictures to ``target``."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name).resolve()
        (home / "configs").symlink_to(DOCS.parent / "configs")
        write_phantom_dataset(home / "unseen", 1, (64, 64, 64), (1.0, 1.0, 1.0), UNSEEN_SEED)
        shutil.move(home / "unseen/imagesTr/phantom_000.nii.gz", home / "scan.nii.gz")
        shown = while_training(recorded(TRAIN, more, home))
        (target / TERMINAL).write_text(terminal(f"$ unet3d {TRAIN}\n{shown}"))
        for command in (PREDICT, *REPORTS):
            recorded(command, [], home)
        for picture, made in DRAWN.items():
            shutil.copy(home / made, target / picture)
        photograph(home, target)
    for picture in (*DRAWN, *SEEN):
        shrink(target / picture)


def recorded(command: str, more: list[str], home: Path) -> str:
    """Run a command of unet3d in a terminal in its home; return all that it wrote there."""
    words = command.replace("\\\n", "").split()
    screen, end = pty.openpty()
    caches = {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
    process = subprocess.Popen(
        [sys.executable, "-m", "unet3d", *words, *more],
        stdin=end,
        stdout=end,
        stderr=end,
        cwd=home,
        env={**os.environ, **caches, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)},
    )
    os.close(end)
    written = b""
    try:
        while piece := os.read(screen, 65536):
            written += piece
            os.write(sys.stdout.fileno(), piece)
    except OSError:  # on Linux: the command has closed the terminal
        pass
    os.close(screen)
    if status := process.wait():
        sys.exit(status)
    return written.decode().replace(str(home), "~")


def while_training(written: str) -> str:
    """Return the lines that the terminal shows halfway through the training."""
    bars = [found.start() for found in re.finditer(r"\r\x1b\[2Kepoch ", written)]
    pieces = re.split(r"(\n|\x1b\[[0-9;?]*[A-Za-ln-z])", written[: bars[len(bars) // 2]])
    rows, row = [""], 0
    for text, control in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        rows[row] += text.replace("\r", "")
        if control == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif control.endswith("A"):
            row -= int(control[2:-1])
        elif control == "\x1b[2K":
            rows[row] = ""
    return "\n".join(rows)


def terminal(text: str) -> str:
    """Return a picture of a terminal with a text, in a font of the reader's system."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(text), highlight=False)
    drawn = console.export_svg(title="unet3d", unique_id="terminal")
    drawn = re.sub(r"@font-face {.*?}", "", drawn, flags=re.DOTALL)  # the font is on a server
    return drawn.replace("Fira Code", "ui-monospace, Menlo, Consolas")


def photograph(home: Path, target: Path) -> None:
    """Write pictures of the pages in ``home`` as a browser shows them."""
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    flags = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=flags)
        for picture, (name, width, last) in SEEN.items():
            page = browser.new_page(viewport={"width": width, "height": 860})
            page.goto((home / name).as_uri())
            element = page.wait_for_selector(last, timeout=60_000)
            box = element and element.bounding_box()
            assert box, f"{name} does not show {last}"
            height = box["y"] + box["height"] + MARGIN
            page.screenshot(
                path=target / picture,
                full_page=True,
                clip={"x": 0, "y": 0, "width": width, "height": height},
            )
        browser.close()


def shrink(picture: Path) -> None:
    """Reduce a picture to a palette of 256 colours that are close to all of its colours."""
    with Image.open(picture) as opened:
        pixels = opened.convert("RGB")
    reduced = pixels.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    reduced.save(picture, optimize=True)


if __name__ == "__main__":
    folder, *options = sys.argv[1:] or [str(DOCS)]
    main(Path(folder), options)
