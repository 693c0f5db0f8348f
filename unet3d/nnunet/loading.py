"""Loading a network for prediction, from a checkpoint of unet3d or of nnU-Net."""

from functools import partial
from pathlib import Path

from unet3d.atomic import temporary_folder
from unet3d.distributed.group import Group
from unet3d.nnunet.model_files import known_as
from unet3d.runs.checkpoint import (
    Checkpoint,
    Part,
    checkpoint_of,
    explained,
    load_checkpoint,
    save_checkpoint,
)
from unet3d.runs.tensor_file import read_tensors


def load_network(path: Path, part: Part = "network") -> Checkpoint:
    """Read a network for prediction onto the CPU, from a checkpoint of unet3d or of nnU-Net."""
    with explained(known_as(path)):
        content = read_tensors(path, described=part == "description")
        if not isinstance(content, dict) or "network_weights" not in content:
            return checkpoint_of(content, path, part)
        from unet3d.nnunet.reading import model_of  # not above: few runs need nnU-Net's models

        return model_of(content, path, part)


def network_from_first(path: Path, group: Group) -> Checkpoint:
    """Load a network from a file that only the first rank can see; a collective call."""
    if group.size == 1:
        return load_network(path)
    with temporary_folder("unet3d-model") as folder:  # a model of nnU-Net is several files
        converted = folder / "network.pt"
        group.from_first(lambda: save_checkpoint(load_network(path), converted))
        return group.file_from_first(converted, partial(load_checkpoint, part="network"))
