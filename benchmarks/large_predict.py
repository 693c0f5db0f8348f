"""Memory of ``unet3d predict`` on a volume larger than the memory, from OME-Zarr to OME-Zarr.

    python benchmarks/large_predict.py --json large.json
    python benchmarks/large_predict.py --varied 300 --compared 12 --json large-skipped.json
    python benchmarks/large_predict.py --shape 200,200,100 --window 50,20,50 --levels 3
    python benchmarks/large_predict.py --shape 600,600,200 --window 100,60,100 --suffix .tif

The scan, uint8 in chunks of 128^3, is written chunk by chunk; the network is small and has random
weights. The command runs in a separate process on a CPU. Its memory is the peak of all its
processes, without cached files. Windows do not overlap and divide the volume, so the labels in some
of them are compared with PyTorch's own computation of the same network. ``--predict=--preview``
passes an option on. With ``--varied``, only the first planes along Y are not constant, and windows
elsewhere are skipped and background, which saves most of the time. Needs the extra ``microscopy``.
"""

import argparse
import math
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zarr
from common import GIB, new_parser, run_watched, shape, write_record

from unet3d.config import Shape, load_config
from unet3d.images.image import open_source
from unet3d.model import Topology, UNet3d
from unet3d.preparation.normalization import ChannelNormalization
from unet3d.preparation.transform import Preprocessing
from unet3d.runs.checkpoint import Checkpoint, save_checkpoint

CHUNK = 128
MEAN, STD = 128.0, 74.0
ROUNDING = 1e-4
"""Logits that differ by less, as a share of their standard deviation, may give either class."""


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--shape", type=shape, default="2000,2000,500", help="of the scan")
    parser.add_argument("--window", type=shape, default="100,50,100", help="divides the scan")
    parser.add_argument("--classes", type=int, default=2)
    parser.add_argument("--levels", type=int, default=1, help="of the scan's pyramid")
    parser.add_argument("--varied", type=int, help="planes that are not constant; default: all")
    parser.add_argument("--compared", type=int, default=4, help="windows to compare")
    parser.add_argument("--suffix", default=".ome.zarr", help="ending of the segmentation")
    parser.add_argument("--folder", type=Path, help="for scan and segmentation; default: temporary")
    parser.add_argument("--predict", action="append", default=[], help="an option of predict")
    return parser


class Pattern:
    """A volume of uint8 that is computed where it is needed, from a line along each axis."""

    def __init__(self, size: Shape, num_varied: int | None) -> None:
        """Take the number of planes along Y that are not constant; None: all."""
        rng = np.random.default_rng(0)
        self._is_varied = np.arange(size[1]) < (size[1] if num_varied is None else num_varied)
        self._lines = [np.cumsum(rng.integers(0, 9, n)).astype(np.uint8) for n in size]

    def box(self, x: slice, y: slice, z: slice) -> npt.NDArray[np.uint8]:
        """Return the voxels (X, Y, Z) in a box."""
        of_x, of_y, of_z = self._lines
        found = of_x[x][:, None, None] + of_y[y][:, None] + of_z[z]
        found[:, ~self._is_varied[y]] = 7
        return found


def write_scan(path: Path, size: Shape, pattern: Pattern, num_levels: int) -> None:
    """Write the pattern as OME-Zarr; each level has every second voxel of the previous one."""
    levels = range(num_levels)
    scales = [{"type": "scale", "scale": [float(2**level)] * 3} for level in levels]
    multiscale = {
        "axes": [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"],
        "datasets": [
            {"path": str(level), "coordinateTransformations": [scale]}
            for level, scale in zip(levels, scales, strict=True)
        ],
    }
    ome = {"version": "0.5", "multiscales": [multiscale]}
    zarr.create_group(path, attributes={"ome": ome})
    for level in levels:
        step = 2**level
        of_level = tuple(-(-voxels // step) for voxels in reversed(size))
        array = zarr.create_array(
            path,
            name=str(level),
            shape=of_level,
            chunks=tuple(min(CHUNK, voxels) for voxels in of_level),
            dtype="uint8",
        )
        for z, y, x in product(*(range(0, voxels, CHUNK) for voxels in of_level)):
            ends = zip((x, y, z), reversed(of_level), strict=True)
            box = [slice(one * step, min(one + CHUNK, n) * step, step) for one, n in ends]
            z_part, y_part, x_part = (slice(one, one + CHUNK) for one in (z, y, x))
            array[z_part, y_part, x_part] = pattern.box(*box).T


def write_network(path: Path, window: Shape, num_classes: int) -> UNet3d:
    """Write a checkpoint of random weights, in which no class is favoured; return its network."""
    strides: Any = ((1, 1, 1), (2, 2, 2))
    topology = Topology(in_channels=1, num_classes=num_classes, channels=(4, 8), strides=strides)
    torch.manual_seed(0)
    model = UNet3d(topology)
    with torch.no_grad():
        heads: Any = model.decoder.heads
        (head,) = heads
        head.weight -= head.weight.mean(dim=1, keepdim=True)
        head.bias.zero_()
    labels = range(num_classes)
    fixed = ChannelNormalization(kind="ct", low=0.0, high=255.0, mean=MEAN, std=STD)
    checkpoint = Checkpoint(
        topology=topology,
        preprocessing=Preprocessing(
            spacing_mm=None,
            channels=(fixed,),
            channel_names=("EM",),
            label_names=tuple(f"label {value}" for value in labels),
            label_values=tuple(labels),
        ),
        patch_size=window,
        config=load_config(None, []),
        model=model.state_dict(),
        training={},
    )
    save_checkpoint(checkpoint, path)
    return model.eval()


def compare(
    result: Path, model: UNet3d, pattern: Pattern, size: Shape, window: Shape, count: int
) -> float:
    """Return the share of voxels in some windows whose label is not that of a largest logit."""
    voxels = open_source(result).voxels()
    if voxels.shape[:3] != size:
        sys.exit(f"{result} has the shape {voxels.shape}, not {size}")
    starts = list(product(*(range(0, n, step) for n, step in zip(size, window, strict=True))))
    some = np.random.default_rng(1).choice(len(starts), min(count, len(starts)), replace=False)
    different = total = 0
    for number in some:
        ends = zip(starts[number], window, strict=True)
        x, y, z = (slice(first, first + n) for first, n in ends)
        image = torch.from_numpy((pattern.box(x, y, z).astype(np.float32) - MEAN) / STD)
        found = torch.from_numpy(np.array(voxels[x, y, z, 0:1])[None, ..., 0]).long()
        total += found.numel()
        if image.min() == image.max():  # skipped
            different += int((found != 0).sum())
            continue
        with torch.inference_mode():
            logits = model(image[None, None])[0]
        below = logits.max(0).values - logits.gather(0, found)[0]
        different += int((below > ROUNDING * logits.std()).sum())
    return different / total


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Write the scan, predict, and compare."""
    size, window = arguments.shape, arguments.window
    if any(n % step for n, step in zip(size, window, strict=True)):
        sys.exit(f"a window of {window} voxels does not divide a scan of {size}")
    pattern = Pattern(size, arguments.varied)
    scan, network = folder / "scan.ome.zarr", folder / "network.pt"
    result = folder / f"found{arguments.suffix}"
    if not scan.exists():
        write_scan(scan, size, pattern, arguments.levels)
    model = write_network(network, window, arguments.classes)
    said: list[object] = [sys.executable, "-m", "unet3d", "predict", scan, "-c", network]
    said += ["-o", result, "--overwrite", "--overlap", "0", "--no-tta", "--precision", "float32"]
    if arguments.varied is not None:
        said += ["--skip-background"]
    row = run_watched([*said, "--devices", "cpu", *arguments.predict], {})
    if "reason" in row:
        sys.exit(f"unet3d predict: {row['reason']}")
    row["different"] = compare(result, model, pattern, size, window, arguments.compared)
    row["voxels"] = math.prod(size)
    return row


def main() -> None:
    """Measure, print the line, write the record."""
    arguments = make_parser().parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        row = measure(arguments, arguments.folder or Path(name))
    print(
        f"{'x'.join(map(str, arguments.shape))} voxels, windows of "
        f"{'x'.join(map(str, arguments.window))}: {row['seconds']:.0f} s, "
        f"{row['host_bytes'] / GIB:.2f} GiB; {row['different']:.2g} of the labels differ"
    )
    names = ("shape", "window", "varied", "classes", "levels", "suffix", "predict")
    request = {name: getattr(arguments, name) for name in names}
    write_record(arguments.json, [torch.device("cpu")], request=request, row=row)
    if row["different"]:
        sys.exit("the labels are not those of the network")


if __name__ == "__main__":
    main()
