"""Loading a network to predict with, ours or one of nnU-Net, by what its file holds."""

from functools import partial
from pathlib import Path

from unet3d.atomic import temporary_folder
from unet3d.distributed.group import Group
from unet3d.nnunet.model_files import SUFFIX
from unet3d.runs.checkpoint import Checkpoint, Part, load_checkpoint, save_checkpoint
from unet3d.runs.tensor_file import read_tensors


def load_network(path: Path, part: Part = "network") -> Checkpoint:
    """Read a network to predict with: a checkpoint of ours, or one of nnU-Net.

    Either may be named like the other.
    """
    if not _is_theirs(path):
        return load_checkpoint(path, part)
    from unet3d.nnunet.reading import load_model  # plans and trainers: few predict with them

    return load_model(path, part)


def _is_theirs(path: Path) -> bool:
    """Return whether a file holds a model of nnU-Net, or else is named like one."""
    try:
        content = read_tensors(path, described=True)
    except (OSError, ValueError, MemoryError):
        content = None
    if not isinstance(content, dict) or not content.keys() & {"network_weights", "format"}:
        return path.suffix == SUFFIX
    return "network_weights" in content


def network_from_first(path: Path, group: Group) -> Checkpoint:
    """Return a network of a file that only the first rank needs to see; all ranks call it."""
    read = partial(load_checkpoint, part="network")
    if not group.from_first(lambda: _is_theirs(path)):
        return group.file_from_first(path, read)
    with temporary_folder("unet3d-model") as folder:  # a model of nnU-Net is several files
        converted = folder / "network.pt"
        group.from_first(lambda: save_checkpoint(load_network(path), converted))
        return group.file_from_first(converted, read)
