"""``unet3d predict`` and ``nnUNetv2_predict`` with the same trained model, from file to file.

    python benchmarks/nnunet_phantoms.py MODELS       # trains MODELS/1.5 and MODELS/0.8
    python benchmarks/nnunet_models.py MODELS --scan 512,512,400 --spacing 0.8 [--models 1.5,0.8]
        [--ways plain,mirrored] [--repeats 3] [--nnunet-repeats 1] [--precision float32]
        [--nnunet-precision float32-sums] [--device cpu --threads 2] [--seconds 540] [--json FILE]
    python benchmarks/nnunet_models.py MODELS --scan 512,512,824 --spacing 0.8 --classes 117
        --nnunet-repeats 0
    python benchmarks/nnunet_models.py MODELS --scan 256,256,192 --spacing 1.5 --to-nnunet RUN

The scan is a phantom in int16, compressed, of the anatomy that the models were trained on. Both
commands are processes of their own, as a user starts them: nnU-Net's by its entry point for a
folder, with its default workers, uncompiled unless ``nnUNet_compile`` says otherwise. Without
``--threads`` each takes the cores that it takes; with it both have that many cores. Of our runs the
first is cold: it compiles what kernels it needs into an empty cache. The time is the median of the
others. Host memory is the most that a process and those that it started had at once, GPU memory
what nvidia-smi says of the whole GPU at most. Segmentations of nnU-Net stay in MODELS, so a later
call with ``--nnunet-repeats 0`` compares with them. ``--classes`` takes a network of random weights
and 1.5 mm, ``--to-nnunet`` a run or a checkpoint of ours, which nnU-Net predicts with after
``unet3d convert``. No measurement begins after ``--seconds``; the record is written after each.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from common import command, parse_shape, tuning_key
from nnunet_phantoms import LABELS, SPACING_MM, write_phantom
from numpy.typing import NDArray
from prediction import watch_gpu

from unet3d.config import load_config
from unet3d.model import Topology, UNet3d
from unet3d.nnunet.model_files import networks_in
from unet3d.nnunet.reading import load_network
from unet3d.nnunet.writing import write_model
from unet3d.runs.checkpoint import Checkpoint, save_checkpoint
from unet3d.volumes.files import write_nifti
from unet3d.volumes.normalization import ChannelNormalization
from unet3d.volumes.resample import Interpolation
from unet3d.volumes.transform import Preprocessing

SECONDS_BETWEEN_LOOKS = 0.3

ENTRY = """
import sys, multiprocessing, torch
from nnunetv2.inference.predict_from_raw_data import predict_entry_point_modelfolder as predict
if __name__ == "__main__":
    sys.argv[0] = "nnUNetv2_predict_from_modelfolder"
    {before}
    predict()
"""
"""nnU-Net's command, also where its scripts are not installed."""

PRECISIONS = {
    "auto": [],
    "float32": [
        "lower = torch.autocast",
        "torch.autocast = lambda kind, **_: lower(kind, enabled=False)",
    ],
}
PRECISIONS["float32-sums"] = [*PRECISIONS["float32"], "torch.half = torch.float32"]
"""What changes nnU-Net's precision: on a GPU it computes windows in float16, and everywhere it adds
up their logits in float16."""
ALL_CORES = "multiprocessing.cpu_count = lambda: {threads}"
"""nnU-Net on a CPU computes in as many threads as this says, wherever it may run."""

CHANNELS = (32, 64, 128, 256, 320, 320)
WINDOW = (128, 128, 128)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model that both predict with."""

    name: str
    ours: Path
    """What ``unet3d predict --checkpoint`` takes."""
    theirs: Path
    """The folder of nnU-Net's model."""


def processes_of(root: int) -> Iterator[int]:
    """Return a process and all that descend from it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            after_name = (entry / "stat").read_text().rpartition(")")[2]  # which may hold spaces
            parents[int(entry.name)] = int(after_name.split()[1])
        except (OSError, ValueError):  # it has ended
            continue
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
        yield pid


def bytes_of(pid: int, file: str, field: str) -> int:
    """Return a field of what the system says of a process's memory, or 0."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def watch_host(pid: int, stop: threading.Event, together: list[int], alone: list[int]) -> None:
    """Note what the processes hold together, and the most that the first one had resident.

    What several share counts once: each process's part of it is added.
    """
    while not stop.wait(SECONDS_BETWEEN_LOOKS):
        alone.append(bytes_of(pid, "status", "VmHWM"))
        # Not every system tells the parts; then what is shared counts as often as it is.
        held = [
            bytes_of(one, "smaps_rollup", "Pss") or bytes_of(one, "status", "VmRSS")
            for one in processes_of(pid)
        ]
        together.append(sum(held))


def run(words: list[str], environment: dict[str, str], threads: int | None, on_gpu: bool) -> Any:
    """Run a command, and return what it took."""
    stop = threading.Event()
    together, alone, gpu = [0], [0], [0]
    before = os.sched_getaffinity(0)
    if threads is not None:  # what a process starts inherits it
        os.sched_setaffinity(0, sorted(before)[:threads])
        environment = {**environment, "OMP_NUM_THREADS": str(threads)}
    began = time.perf_counter()
    child = subprocess.Popen(words, stdout=sys.stderr.fileno(), env={**os.environ, **environment})
    os.sched_setaffinity(0, before)
    looking = [threading.Thread(target=watch_host, args=(child.pid, stop, together, alone))]
    if on_gpu and shutil.which("nvidia-smi"):
        looking.append(threading.Thread(target=watch_gpu, args=(stop, gpu)))
    for thread in looking:
        thread.start()
    status = child.wait()
    seconds = time.perf_counter() - began
    stop.set()
    for thread in looking:
        thread.join()
    if status:
        return {"reason": f"it ended with {status}", "seconds": seconds}
    return {
        "seconds": seconds,
        "host_bytes": max(*together, *alone),
        "first_process_bytes": max(alone),
        "gpu_bytes": max(gpu),
    }


class Measurement:
    """One scan and the commands that segment it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.folder: Path = arguments.folder.absolute()
        self.device: str = arguments.device
        self.on_gpu = self.device != "cpu"
        self.threads: int | None = arguments.threads
        self.arguments = arguments
        size = "x".join(map(str, arguments.scan))
        self.scan_name = f"phantom-{size}-{arguments.spacing:g}mm"
        self.scan = self.folder / "scans" / self.scan_name / f"{self.scan_name}_0000.nii.gz"
        self.labels = self.scan.parent.with_name(f"{self.scan_name}-labels.nii.gz")
        if not self.labels.exists():
            self.scan.parent.mkdir(parents=True, exist_ok=True)
            label = write_phantom(self.scan, arguments.scan, arguments.spacing)
            affine = np.diag([arguments.spacing] * 3 + [1.0])
            write_nifti(self.labels, nib.Nifti1Image(label, affine))

    def nnunet(self, model: Model, way: str) -> dict[str, Any]:
        """Segment with nnU-Net; where it shall not run, return no time."""
        precision = self.arguments.nnunet_precision
        out = self.folder / "nnunet" / f"{model.name}-{way}-{self.device[:4]}-{precision}"
        written = out / f"{self.scan_name}.nii.gz"
        lines = [*PRECISIONS[precision]]
        if self.threads is not None:
            lines.append(ALL_CORES.format(threads=self.threads))
        words: list[object] = [
            sys.executable,
            "-c",
            ENTRY.format(before="; ".join(lines) or "pass"),
        ]
        words += ["-i", self.scan.parent, "-o", out, "-m", model.theirs, "-f", "0"]
        words += ["-device", "cuda" if self.on_gpu else "cpu", "--disable_progress_bar"]
        words += [] if way == "mirrored" else ["--disable_tta"]
        environment = {f"nnUNet_{name}": str(out) for name in ("raw", "preprocessed", "results")}
        if precision != "auto":
            environment["NVIDIA_TF32_OVERRIDE"] = "0"
        row: dict[str, Any] = {"precision": precision, "file": written}
        if self.arguments.nnunet_repeats and importlib.util.find_spec("nnunetv2") is None:
            return {**row, "reason": "nnunetv2 is not installed"}
        runs = []
        for _ in range(self.arguments.nnunet_repeats):
            written.unlink(missing_ok=True)
            runs.append(run([*map(str, words)], environment, self.threads, self.on_gpu))
        return {**row, **summary(runs, runs)}

    def ours(self, model: Model, way: str, precision: str) -> dict[str, Any]:
        """Segment with unet3d; the first run's kernels are compiled anew."""
        written = self.folder / "ours" / f"{model.name}-{way}-{precision}-{self.scan_name}.nii.gz"
        written.parent.mkdir(exist_ok=True)
        kernels = self.folder / "kernels"
        shutil.rmtree(kernels, ignore_errors=True)
        environment = {"TRITON_CACHE_DIR": str(kernels)}
        checkpoint = model.ours
        if precision == "float32":
            checkpoint = self.in_float32(model)
            environment["NVIDIA_TF32_OVERRIDE"] = "0"
        words: list[object] = [sys.executable, "-m", "unet3d", "predict", self.scan]
        words += ["--checkpoint", checkpoint]
        words += ["-o", written, "--overwrite", "--no-postprocessing"]
        words += ["--devices", self.device]
        words += ["--tta" if way == "mirrored" else "--no-tta"]
        runs = [
            run([*map(str, words)], environment, self.threads, self.on_gpu)
            for _ in range(self.arguments.repeats)
        ]
        return {"precision": precision, **summary(runs, runs[1:]), "file": written}

    def in_float32(self, model: Model) -> Path:
        """Return a checkpoint of the same network whose settings say float32."""
        file = self.folder / "ours" / f"{model.name}-float32.pt"
        network = load_network(networks_in(model.ours)[0])
        config = network.config.with_values({"training.precision": "float32"})
        save_checkpoint(replace(network, config=config), file)
        return file

    def compare(self, model: Model, way: str) -> dict[str, Any]:
        """Segment with both, in turn, and compare."""
        theirs = self.nnunet(model, way)
        row: dict[str, Any] = {"model": model.name, "way": way, "nnunet": theirs, "ours": {}}
        reference = read(theirs.pop("file"))
        truth = read(self.labels)
        for precision in self.arguments.precision.split(","):
            if not self.arguments.repeats:
                break
            mine = self.ours(model, way, precision)
            found = read(mine.pop("file"))
            if "seconds" in mine and "seconds" in theirs:
                mine["ratio"] = mine["seconds"] / theirs["seconds"]
            if found is not None and reference is not None:
                mine["to_nnunet"] = agreement(found, reference)
            if found is not None and truth is not None and not self.arguments.classes:
                mine["to_phantom"] = agreement(found, truth)["dice"]
            row["ours"][precision] = mine
        if reference is not None and truth is not None and not self.arguments.classes:
            theirs["to_phantom"] = agreement(reference, truth)["dice"]
        return row


def read(file: Path) -> NDArray[Any] | None:
    """Return the labels of a segmentation; None: there is none."""
    return np.asanyarray(nib.load(file).dataobj) if file.exists() else None


def agreement(found: NDArray[Any], reference: NDArray[Any]) -> dict[str, Any]:
    """Return the share of equal voxels, and Dice of each label that either of them has."""
    count = 1 + int(max(found.max(), reference.max()))
    equal = 0
    pairs = np.zeros(count * count, np.int64)
    for z in range(found.shape[2]):  # by planes: a scan of wide integers is large
        a, b = found[..., z].astype(np.int64), reference[..., z]
        equal += int((a == b).sum())
        pairs += np.bincount((count * a + b).ravel(), minlength=count * count)
    table = pairs.reshape(count, count)
    sums = table.sum(0) + table.sum(1)
    return {
        "equal_voxels": equal / found.size,
        "different_voxels": found.size - equal,
        "dice": {
            str(label): float(2 * table[label, label] / sums[label])
            for label in range(1, count)
            if sums[label]
        },
    }


def summary(runs: list[dict[str, Any]], warm: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median time of warm runs, the most memory, and the runs; or why there is none."""
    if not runs:
        return {}
    failed = [one["reason"] for one in runs if "reason" in one]
    if failed:
        return {"reason": failed[0], "runs": runs}
    return {
        "seconds": statistics.median(one["seconds"] for one in warm or runs),
        "cold_seconds": runs[0]["seconds"],
        "host_bytes": max(one["host_bytes"] for one in runs),
        "gpu_bytes": max(one["gpu_bytes"] for one in runs),
        "runs": runs,
    }


def random_model(arguments: argparse.Namespace) -> Model:
    """Write a model of nnU-Net with random weights, in which no class is favoured."""
    num_classes: int = arguments.classes
    channels = tuple(int(number) for number in arguments.channels.split(","))
    theirs = arguments.folder.absolute() / f"random-{num_classes}"
    shutil.rmtree(theirs, ignore_errors=True)
    topology = Topology(
        in_channels=1,
        num_classes=num_classes,
        channels=channels,
        strides=((1, 1, 1), *[(2, 2, 2)] * (len(channels) - 1)),
        deep_supervision=True,
        upsampling_bias=True,
    )
    torch.manual_seed(0)
    labels = tuple(range(num_classes))
    checkpoint = Checkpoint(
        topology=topology,
        preprocessing=Preprocessing(
            spacing_mm=(SPACING_MM, SPACING_MM, SPACING_MM),
            channels=(ChannelNormalization(kind="ct", low=-1000, high=1000, mean=50, std=200),),
            channel_names=("CT",),
            label_names=tuple(f"label {value}" if value else "background" for value in labels),
            label_values=labels,
            crops_to_nonzero=True,
            orientation="stored",
            interpolation=Interpolation(across_slices=0, logits_across_slices=0, clips=True),
        ),
        patch_size=arguments.window,
        config=load_config(None, []),
        model=UNet3d(topology).state_dict(),
        training={},
    )
    write_model({0: checkpoint}, theirs)
    plans = json.loads((theirs / "plans.json").read_text())
    plans["image_reader_writer"] = "NibabelIO"  # as the other models; the axes are the same
    (theirs / "plans.json").write_text(json.dumps(plans))
    return Model(name=theirs.name, ours=theirs, theirs=theirs)


def converted_model(folder: Path, ours: Path) -> Model:
    """Turn a network of ours into a model of nnU-Net."""
    name = f"converted-{ours.stem}"
    shutil.rmtree(folder / name, ignore_errors=True)
    words = ["convert", str(ours), "--to", "nnunet", "-o", str(folder / name)]
    done = subprocess.run([sys.executable, "-m", "unet3d", *words], stdout=sys.stderr.fileno())
    if done.returncode:
        sys.exit("unet3d convert failed")
    return Model(name=name, ours=ours.absolute(), theirs=folder / name)


def models_of(arguments: argparse.Namespace) -> list[Model]:
    """Return what is asked for."""
    folder: Path = arguments.folder.absolute()
    if arguments.classes is not None:
        return [random_model(arguments)]
    if arguments.to_nnunet is not None:
        return [converted_model(folder, arguments.to_nnunet)]
    names = arguments.models.split(",")
    missing = [name for name in names if not (folder / name / "plans.json").is_file()]
    if missing:
        sys.exit(f"{folder.name} has no model {missing[0]}; train it with nnunet_phantoms.py")
    return [Model(name=name, ours=folder / name, theirs=folder / name) for name in names]


def lines_of(row: dict[str, Any]) -> Iterator[str]:
    """Return the lines of a table about a row."""
    labels = {str(value): name for name, value in LABELS.items()}
    who = {f"unet3d, {precision}": one for precision, one in row["ours"].items()}
    if "runs" in row["nnunet"] or "reason" in row["nnunet"]:
        who = {f"nnU-Net, {row['nnunet']['precision']}": row["nnunet"], **who}
    for name, one in who.items():
        line = f"{row['model']:>14} {row['way']:>8}  {name:<22}"
        if "reason" in one:
            yield f"{line} {one['reason']}"
            continue
        line += f"{one['seconds']:8.1f}{one['cold_seconds']:8.1f}"
        line += f"{one['host_bytes'] / 2**30:8.2f}{one['gpu_bytes'] / 2**30:8.2f}"
        line += f"{one['ratio']:8.3f}" if "ratio" in one else " " * 8
        drawn = one.get("to_phantom")
        line += f"{statistics.mean(drawn.values()):9.4f}" if drawn else " " * 9
        agreed = one.get("to_nnunet")
        if agreed is not None:
            worst = min(agreed["dice"], key=lambda label: agreed["dice"][label], default=None)
            line += f"{100 * agreed['equal_voxels']:10.4f}"
            if worst is not None:
                line += f"{agreed['dice'][worst]:9.5f} {labels.get(worst, worst)}"
        yield line


def main() -> None:
    """Measure, print a table, write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="of nnunet_phantoms.py")
    parser.add_argument("--scan", type=parse_shape, default=(512, 512, 400))
    parser.add_argument("--spacing", type=float, default=0.8, help="of the scan, in mm")
    parser.add_argument("--models", default="1.5,0.8")
    parser.add_argument("--ways", default="plain,mirrored")
    parser.add_argument("--repeats", type=int, default=3, help="of ours; 0: only nnU-Net")
    parser.add_argument("--nnunet-repeats", type=int, default=1, help="0: only ours")
    parser.add_argument("--precision", default="auto", help="of ours: auto, float32, or both")
    parser.add_argument("--nnunet-precision", choices=PRECISIONS, default="auto")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="cores of either")
    parser.add_argument("--classes", type=int, help="of a network of random weights")
    parser.add_argument("--channels", default=",".join(map(str, CHANNELS)), help="of that network")
    parser.add_argument("--window", type=parse_shape, default=WINDOW, help="of that network")
    parser.add_argument("--to-nnunet", type=Path, metavar="RUN", help="a run or checkpoint of ours")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began = time.perf_counter()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    models = models_of(arguments)
    measurement = Measurement(arguments)
    record: dict[str, Any] = {
        **tuning_key([torch.device(arguments.device)], arguments.precision),
        "nnunet": version_of_nnunet(),
        "nnunet_compile": os.environ.get("nnUNet_compile", "its default"),
        "cores": len(os.sched_getaffinity(0)),
        "threads": arguments.threads,
        "scan": {"shape": arguments.scan, "spacing_mm": arguments.spacing},
        "host_counts": "Pss" if Path("/proc/self/smaps_rollup").exists() else "VmRSS",
        "scan_bytes": measurement.scan.stat().st_size,
        "command": command(),
        "rows": [],
        "left_out": [],
    }
    for model in models:
        for way in arguments.ways.split(","):
            if time.perf_counter() - began > arguments.seconds:
                record["left_out"].append(f"{model.name}, {way}")
                continue
            record["rows"].append(measurement.compare(model, way))
            for line in lines_of(record["rows"][-1]):
                print(line, file=sys.stderr)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    heads = ("s", "cold s", "host", "GPU GiB", "ratio")
    print(
        f"{measurement.scan_name} on {', '.join(record['devices'])}\n"
        f"{'model':>14} {'way':>8}  {'who':<22}{''.join(f'{head:>8}' for head in heads)}"
        f"{'phantom':>9}{'equal %':>10}{'Dice':>9} of the worst label"
    )
    for row in record["rows"]:
        for line in lines_of(row):
            print(line)
    for name in record["left_out"]:
        print(f"left out for lack of time: {name}")


def version_of_nnunet() -> str | None:
    """Return the version of the installed package, or None."""
    try:
        return importlib.metadata.version("nnunetv2")
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
