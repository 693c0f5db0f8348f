"""Checks of the files in a folder after a fault."""

import json

import matplotlib.image
import nibabel as nib
import numpy as np

from unet3d.runs.checkpoint import load_checkpoint


def assert_whole(folder):
    """Check that every file with a final name is whole."""
    for path in folder.rglob("*"):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue  # an unfinished file of a killed process
        if path.suffix == ".pt":
            load_checkpoint(path)
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.name == "metrics.jsonl":
            for line in path.read_text().split("\n")[:-1]:
                json.loads(line)
        elif path.suffix == ".npy":
            np.load(path)
        elif path.suffix == ".png" and path.stat().st_size:  # some tests leave pictures empty
            matplotlib.image.imread(path)
        elif path.name.endswith(".nii.gz"):
            np.asanyarray(nib.load(path).dataobj)
