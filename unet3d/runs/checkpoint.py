"""Checkpoints: written whole or not at all, independent of devices, safe to load.

A checkpoint is one file of tensors on the CPU, numbers and strings. Parameters have their plain
names, so it loads in every mode and on every number of devices. It is untrusted: no code in it is
run, and its fields are checked before its tensors are read.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import ConfigDict, Field, PlainValidator, model_validator
from torch import Tensor

from unet3d import __version__
from unet3d.atomic import write_atomically
from unet3d.config import MAX_PATCH_VOXELS, Config, Shape
from unet3d.datasets.labels import LabelValue
from unet3d.errors import CheckpointError, ConfigError, DatasetError, reason_of
from unet3d.inputs.plain_data import PLAIN, Name, at_most, listed, printable, validated
from unet3d.memory.host import is_out_of_memory
from unet3d.model import Topology, UNet3d
from unet3d.preparation.transform import Preprocessing
from unet3d.runs.case_split import CaseSplit
from unet3d.runs.tensor_file import on_tensors, own, own_tensors, read_tensors, write_tensors

FORMAT = 1
"""Incremented whenever the layout of checkpoints changes."""

Part = Literal["all", "network", "description"]
"""What to read of a checkpoint. network: all but the training state; description: neither the
training state nor the values of weights, which are on the meta device."""


def _config(text: Any) -> Config:
    if not isinstance(text, str):
        raise ValueError("must be text")
    return Config.from_yaml(text)


Values = Annotated[tuple[LabelValue, ...], Field(min_length=1), at_most(2**16)]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A network, with everything to use it or to continue its training.

    A field that is added gets a default, because older files lack it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(**PLAIN, arbitrary_types_allowed=True)

    topology: Topology
    """The architecture, which fixes names and shapes of the parameters."""
    preprocessing: Preprocessing
    """How the images of its training were prepared."""
    patch_size: Shape | None
    """Voxels along X, Y, Z of the patches that it was trained on; None: whole volumes."""
    config: Annotated[Config, PlainValidator(_config)]
    """The settings of its run."""
    split: CaseSplit | None = None
    """The training and validation cases of its run; None: an older file does not record them."""
    postprocessing: Annotated[tuple[Values, ...], at_most(2**16)] = ()
    """Groups of label values: prediction keeps only the largest component of each group."""
    model: dict[Name, Tensor]
    """Parameters and buffers by name; on the meta device if only a description was read."""
    training: Annotated[dict[Name, Any], at_most(8)]
    """The training state, for ``--resume``; empty if there is nothing to continue."""

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        """Refuse a file whose network, images and labels contradict each other."""
        classes, labels = self.topology.num_classes, self.preprocessing.num_outputs
        channels, images = self.topology.in_channels, len(self.preprocessing.channels)
        if classes != labels or channels != images:
            raise ValueError(
                f"has a network of {channels} channels and {classes} classes, but prepares "
                f"{images} channels and {labels} "
                f"{'regions' if self.preprocessing.regions else 'labels'}"
            )
        if self.patch_size is not None and math.prod(self.patch_size) > MAX_PATCH_VOXELS:
            raise ValueError(
                f"has a patch_size of {math.prod(self.patch_size):,} voxels, and may have "
                f"{MAX_PATCH_VOXELS:,}"
            )
        values = {value for rule in self.postprocessing for value in rule}
        unknown = values.difference(self.preprocessing.label_values[1:])
        if unknown:
            raise ValueError(f"has post-processing of label {min(unknown)}, which it does not have")
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters: float64 or float32."""
        is_double = any(value.dtype == torch.float64 for value in self.model.values())
        return torch.float64 if is_double else torch.float32

    @property
    def mirror_axes(self) -> tuple[int, ...]:
        """Axes, counted from 0, along which patches were mirrored in training."""
        known = self.config.patches.random_changes.known_mirror_axes
        return tuple("xyz".index(axis) for axis in known)

    @property
    def mirrored_axes(self) -> tuple[int, ...]:
        """Axes, counted from 0, along which windows are mirrored in prediction."""
        return self.mirror_axes if self.config.inference.tta else ()

    def build_model(self) -> UNet3d:
        """Return the network, on the CPU."""
        model = described_network(self.topology, self.model)
        model.load_state_dict(on_tensors(own, self.model), assign=True)
        return model


def save_checkpoint(checkpoint: Checkpoint, path: Path) -> None:
    """Write a checkpoint, with tensors on any device, to a folder that exists.

    At every moment ``path`` is the old file or the new one.
    """
    content = {
        "format": FORMAT,
        "unet3d": __version__,
        "topology": checkpoint.topology.to_dict(),
        "preprocessing": checkpoint.preprocessing.to_dict(),
        "patch_size": checkpoint.patch_size,
        "config": checkpoint.config.to_yaml(),
        "split": None if checkpoint.split is None else asdict(checkpoint.split),
        "postprocessing": [list(rule) for rule in checkpoint.postprocessing],
        "model": on_tensors(own, checkpoint.model),
        "training": on_tensors(own, checkpoint.training),
    }
    try:
        write_atomically(path, lambda file: write_tensors(content, file))
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint {path}: {reason_of(error)}; make space there, or choose "
            "another --output"
        ) from error


def load_checkpoint(path: Path, part: Part = "all") -> Checkpoint:
    """Read a checkpoint onto the CPU.

    Raises CheckpointError if the file is missing, damaged or not a checkpoint of unet3d, or has
    values out of range, tensors of another network or weights that are not finite.
    """
    with explained(path):
        content = read_tensors(path, described=part == "description")
        return checkpoint_of(content, path, part)


def checkpoint_of(content: Any, path: Path, part: Part) -> Checkpoint:
    """Return the checkpoint in a file's content; ValueError or ConfigError if it is invalid."""
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise CheckpointError(f"{path} is not a checkpoint of unet3d; train one with unet3d train")
    if content["format"] != FORMAT:
        raise ValueError(f"its format is {content['format']}, and this version reads {FORMAT}")
    fields = {key: content[key] for key in content if key not in ("format", "unet3d")}
    checkpoint = validated(Checkpoint, fields)
    described_network(checkpoint.topology, checkpoint.model)
    model, training = checkpoint.model, checkpoint.training if part == "all" else {}
    if part != "description":
        model, training = own_tensors((model, training), path.stat().st_size)
        refuse_non_finite(model)
    return replace(checkpoint, model=model, training=training)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn errors of reading the checkpoint at a path into a CheckpointError that explains them."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot read the checkpoint {path}: {reason_of(error)}; name one or a run"
        ) from error
    except (ValueError, RecursionError, ConfigError, DatasetError) as error:
        raise CheckpointError(
            f"{path} is not a checkpoint that can be used: {error}; use another one, or train again"
        ) from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"cannot read the checkpoint {path}: too little memory; use a machine with more"
        ) from error


def described_network(topology: Topology, model: Mapping[str, Tensor]) -> UNet3d:
    """Return the network on the meta device, if it has the stored parameters and buffers.

    Raises a one-line ValueError if names, shapes or types differ.
    """
    with torch.device("meta"):
        network = UNet3d(topology)
    if any(value.dtype == torch.float64 for value in model.values()):
        network.double()
    compare_tensors(model, network.state_dict(), _kind)
    return network


def compare_tensors(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], kind: Callable[[Tensor], str]
) -> None:
    """Raise a one-line ValueError if tensors differ in their names or in the result of ``kind``."""
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{printable(name)} is unknown" for name in found if name not in wanted]
    for name, value in wanted.items():
        if name in found and kind(found[name]) != kind(value):
            problems.append(f"{name} is {kind(found[name])} instead of {kind(value)}")
    if problems:
        raise ValueError(listed(problems, 3))


def refuse_non_finite(weights: Mapping[str, Tensor]) -> None:
    """Raise a ValueError that names the first weight with NaN or infinity, if there is one."""
    for name, weight in weights.items():
        if weight.is_floating_point() and not torch.stack(torch.aminmax(weight)).isfinite().all():
            raise ValueError(
                f"the weight {printable(name)} holds numbers that are not finite: training had "
                "diverged"
            )


def _kind(tensor: Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "one number"
    return f"{shape} in {str(tensor.dtype).removeprefix('torch.')}"
