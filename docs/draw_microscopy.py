"""Draw the pictures of the pages on microscopy, from synthetic tissue that is made here.

``make pictures`` writes them to ``docs``, ``python docs/draw_microscopy.py FOLDER`` to another
folder. Options after the folder, such as ``--epochs 2``, are passed to ``unet3d train``. The
windows of ImageJ and napari are drawn where these programs are: Debian's ``imagej``, and napari
with napari-ome-zarr in the environment of the interpreter that ``NAPARI_PYTHON`` names. Both need
a display, such as that of ``xvfb-run``.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import tifffile
import zarr
from draw_tour import shrink
from PIL import Image
from scipy.ndimage import gaussian_filter, zoom
from scipy.spatial import cKDTree

DOCS = Path(__file__).resolve().parent
SHAPE = 48, 128, 128
"""Voxels of a volume along Z, Y, X."""
SPACING_NM = 16, 8, 8
LABELS = {"background": 0, "membrane": 1, "mitochondrion": 2}

TRAIN = """train cells -o runs/cells --devices cpu --epochs 16
    --set training.steps_per_epoch=12 --set patches.size=[48,48,32] --set data.num_workers=0
    --set model.base_channels=8 --set model.num_levels=3
    --set training.optimizer=adamw --set training.learning_rate=0.003"""
PREDICT = (
    "predict scan.ome.zarr -c runs/cells -o scan_seg.ome.zarr --preview",
    "predict stack.tif -c runs/cells -o stack_seg.tif",
)
PREVIEW, NAPARI, IMAGEJ = "microscopy.png", "napari.png", "imagej.png"

IMAGEJ_WINDOWS = 0, 0, 800, 433
"""Left, top, right and bottom of both stacks on the screen."""

IMAGEJ_MACRO = """
function show(name, left) {{
  open("{home}/" + name);
  setSlice(24);
  setLocation(left, 0, 400, 452);
  getVoxelSize(width, height, depth, unit);
  print("[" + name, width, height, depth, unit + "]");
}}
show("stack.tif", 0);
show("stack_seg.tif", 400);
selectWindow("Log");
saveAs("Text", "{home}/imagej.txt");
run("Close");
wait(1000);
run("Capture Screen");
saveAs("PNG", "{home}/{picture}");
run("Quit");
"""

NAPARI_SCRIPT = """
import napari
from qtpy.QtTest import QTest

viewer = napari.Viewer(title="napari")
(scan,) = viewer.open("{home}/scan.ome.zarr", plugin="napari-ome-zarr")
(labels,) = viewer.open("{home}/scan_seg.ome.zarr", plugin="napari-ome-zarr")
scan.name, labels.name, labels.visible = "scan", "scan_seg", True
viewer.scale_bar.visible = True
viewer.window.resize(1040, 680)
QTest.qWait(2000)
viewer.reset_view()
viewer.layers.selection.active = labels
QTest.qWait(1000)
viewer.screenshot("{home}/{picture}", canvas_only=False, flash=False)
print(scan.scale, scan.units, labels.scale, labels.units, labels.properties)
viewer.close()
"""


def main(target: Path, more: list[str]) -> None:
    """Train, predict and show in a folder of its own; write the pictures to ``target``."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name).resolve() / "home"  # napari-ome-zarr writes zarr.json above it
        write_data(home)
        caches = {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
        for command in ([*TRAIN.split(), *more], *map(str.split, PREDICT)):
            words = [sys.executable, "-m", "unet3d", *command]
            subprocess.run(words, cwd=home, env={**os.environ, **caches}, check=True)
        shutil.copy(home / "scan_seg.png", target / PREVIEW)
        shrink(target / PREVIEW)
        interpreter = os.environ.get("NAPARI_PYTHON")
        if interpreter and "DISPLAY" in os.environ:
            show_in_napari(home, interpreter)
            shutil.copy(home / NAPARI, target)
            shrink(target / NAPARI)
        if shutil.which("imagej") and "DISPLAY" in os.environ:
            show_in_imagej(home)
            with Image.open(home / IMAGEJ) as screen:
                screen.crop(IMAGEJ_WINDOWS).save(target / IMAGEJ)
            shrink(target / IMAGEJ)


def show_in_napari(home: Path, interpreter: str) -> None:
    """Write a picture of napari with the scan and its segmentation."""
    script = home / "in_napari.py"
    script.write_text(NAPARI_SCRIPT.format(home=home, picture=NAPARI))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([interpreter, script.name], cwd=home, env=environment, check=True)


def show_in_imagej(home: Path) -> None:
    """Write a picture of a screen with the stack and its segmentation, opened by ImageJ."""
    macro = home / "show.ijm"
    macro.write_text(IMAGEJ_MACRO.format(home=home, picture=IMAGEJ))
    java = ["java", "-cp", "/usr/share/java/ij.jar", "ij.ImageJ", "-macro", str(macro)]
    subprocess.run(java, check=True, timeout=120)


def write_data(home: Path) -> None:
    """Write a data set of TIFF stacks, and one other volume as OME-Zarr and as ImageJ saves it."""
    cells = home / "cells"
    for number in range(1, 5):
        for kind, array in zip(("images", "labels"), tissue(number), strict=True):
            channel = "_0000" if kind == "images" else ""
            write_stack(cells / f"{kind}Tr/block_{number}{channel}.tif", array)
    described = {"channel_names": {"0": "EM"}, "labels": LABELS, "file_ending": ".tif"}
    (cells / "dataset.json").write_text(json.dumps(described))
    image, _ = tissue(5)
    write_stack(home / "stack.tif", image)
    scale = {"type": "scale", "scale": list(map(float, SPACING_NM))}
    axes = [{"name": name, "type": "space", "unit": "nanometer"} for name in "zyx"]
    datasets = [{"path": "0", "coordinateTransformations": [scale]}]
    ome = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": datasets}]}
    group = zarr.create_group(home / "scan.ome.zarr", attributes={"ome": ome})
    group.create_array("0", data=image, chunks=(32, 64, 64), dimension_names=("z", "y", "x"))


def write_stack(path: Path, array: np.ndarray) -> None:
    """Write a stack (Z, Y, X) as ImageJ saves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    z, y, x = SPACING_NM
    fields = {"axes": "ZYX", "unit": "nm", "spacing": z}
    tifffile.imwrite(path, array, imagej=True, resolution=(1 / x, 1 / y), metadata=fields)


def tissue(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return an image of cells as an electron microscope shows them, and its labels (Z, Y, X)."""
    rng = np.random.default_rng(seed)

    def smooth(cells: int) -> np.ndarray:
        """Return a random field with a standard deviation of about 1."""
        coarse = rng.standard_normal((cells, 2 * cells, 2 * cells))
        field: np.ndarray = zoom(coarse, np.divide(SHAPE, coarse.shape), order=3)
        return field

    spacing = np.array(SPACING_NM)
    extent = spacing * SHAPE
    axes = [(np.arange(size) + 0.5) * step for size, step in zip(SHAPE, SPACING_NM, strict=True)]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), -1)
    grid += 45 * np.stack([smooth(4) for _ in range(3)], -1)
    seeds = rng.uniform(-0.2, 1.2, (60, 3)) * extent
    distances, owners = cKDTree(seeds).query(grid, 2)
    margin, cell = distances[..., 1] - distances[..., 0], owners[..., 0]
    labels = (margin < 26).astype(np.uint8)
    inside = np.zeros(SHAPE)
    for centre in rng.uniform(0, 1, (26, 3)) * extent:
        turn, _ = np.linalg.qr(rng.standard_normal((3, 3)))
        offset = (grid - centre) @ turn / rng.uniform((50, 60, 110), (70, 90, 210))
        inside = np.maximum(inside, 1 - np.sqrt((offset**2).sum(-1)))
    labels[(inside > 0) & (margin > 60)] = LABELS["mitochondrion"]
    shades = rng.uniform(165, 205, len(seeds))
    image = shades[cell] + 9 * smooth(24)
    image[labels == 2] = 105 + 14 * np.sin(inside[labels == 2] * 40)
    image[(inside > 0) & (inside < 0.12) & (labels == 2)] = 70
    image[labels == 1] = 62
    image = gaussian_filter(image, 0.7) + 11 * rng.standard_normal(SHAPE)
    return image.clip(0, 255).astype(np.uint8), labels


if __name__ == "__main__":
    folder, *options = sys.argv[1:] or [str(DOCS)]
    main(Path(folder), options)
