"""The folder of a training run, written by hand."""

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from unet3d.config import load_config

MIB = 2**20
SIZES = {"parameters": 6, "gradients": 6, "optimizer": 12, "activations": 70}


def write_run(folder: Path, **changes: Any) -> Path:
    """Write every file that a page reads; ``changes`` replace files, None leaves one out."""
    files = {
        "data.json": data(),
        "config.yaml": load_config(None, ["training.epochs=4"]).to_yaml(),
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in metrics()),
        "memory.json": memory(),
        "memory.png": Figure((1, 1)),
        "summary.json": summary(),
        "validation/cases.json": cases(),
        "validation/worst.png": Figure((1, 1)),
        "validation/best.png": Figure((1, 1)),
    }
    for name, content in {**files, **changes}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Figure):
            content.savefig(path)
        elif content is not None:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def data(dataset="/data/Task01_Sample"):
    preprocessing = {
        "spacing_mm": [1.0, 1.25, 3.0],
        "channel_names": ["CT"],
        "label_names": ["background", "liver", "tumour"],
    }
    return {
        **{"unet3d": "0.1.0", "dataset": dataset, "fold": 2, "seed": 5},
        "preprocessing": preprocessing,
        "training": {"a": "00", "b": "01"},
        "validation": {"low": "02", "high": "03"},
    }


def metrics():
    lines = [
        {"epoch": epoch, "loss": 2.0 / epoch, "learning_rate": 0.01 / epoch, "seconds": 3.0}
        for epoch in range(1, 5)
    ]
    lines[1] |= {"dice": {"liver": 0.5, "tumour": None}, "mean_dice": 0.5, "validation_loss": 1.0}
    lines[3] |= {"dice": {"liver": 0.75, "tumour": 0.25}, "mean_dice": 0.5}
    return lines


def score(name, dice, hd95_mm=2.5):
    volumes = {"prediction_ml": 12.5, "label_ml": 10.0}
    return {"name": name, "dice": dice, "hd95_mm": hd95_mm, "nsd": dice, **volumes}


def cases(liver="liver", low="low"):
    """Return scores with the better case first, an order that a page reverses."""
    better = {"1": score(liver, 0.9375), "2": score("tumour", None, None)}
    worse = {"1": score(liver, 0.75), "2": score("tumour", 0.25)}
    return {
        "cases": [
            {"case": "high", "mean_dice": 0.9375, "labels": better},
            {"case": low, "mean_dice": 0.5, "labels": worse},
        ],
        "mean": {
            "1": score(liver, 0.84375, 2.25) | {"num_cases_dice": 2, "num_cases_hd95": 2},
            "2": score("tumour", 0.25, 4.75) | {"num_cases_dice": 1, "num_cases_hd95": 1},
        },
        "mean_dice": 0.546875,
        "tolerance_mm": 2.0,
        "postprocessing": [{"largest_component_of": [1, 2]}, {"largest_component_of": [2]}],
    }


def memory():
    """Return the memory of two slots: one predicted a tenth too large, one not predicted."""

    def record(factor):
        sizes = {f"{name}_bytes": size * MIB for name, size in SIZES.items()}
        return sizes | {"peak_bytes": round(100 * factor) * MIB, "reserved_bytes": 120 * MIB}

    slots = [
        {
            **{"slot": slot, "rank": slot, "device": f"cuda:{slot}", "device_bytes": 81920 * MIB},
            "blocks": ["encoder.0.0", "encoder.0.1"][: slot + 1],
            "predicted": None if slot else record(1.1),
            "measured": record(1.0),
        }
        for slot in range(2)
    ]
    return {"parallel": "model", "slots": slots, "timeline": []}


def summary():
    seconds = {"training": 3600.0, "validation": 123.0, "waited": 9.0}
    return {
        **{"best_dice": 0.5, "best_epoch": 2, "epochs": 4},
        "final": {"mean_dice": 0.546875, "num_cases": 2},
        "seconds": 3723.0,
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "parallel": "model",
        "devices": ["cuda:0 (NVIDIA H200)", "cuda:1 (NVIDIA H200)"],
        "precision": "bfloat16",
        "versions": {"unet3d": "0.1.0", "python": "3.12.1", "torch": "2.13.0", "cuda": None},
    }
