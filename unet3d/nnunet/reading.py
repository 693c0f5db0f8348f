"""A trained model of nnU-Net v2, read as a checkpoint of ours.

Everything comes from ``checkpoint_final.pth`` and, where they lie above it, from ``plans.json`` and
``dataset.json``. No code in them is run: :mod:`unet3d.runs.tensor_file` reads plain values, and
shapes are compared with the plan before a weight is read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from unet3d.config import Config
from unet3d.datasets.naming import Labels, channel_names, read_labels
from unet3d.errors import CheckpointError, ConfigError, DatasetError
from unet3d.inputs.plain_data import printable, shown
from unet3d.inputs.reading import read_json
from unet3d.nnunet.layout import DATASET, PLANS, known_as
from unet3d.nnunet.loading import Part
from unet3d.nnunet.plans import Plan, read_plan
from unet3d.nnunet.trainers import warn_of_trainer
from unet3d.nnunet.weights import from_nnunet, of_plan
from unet3d.preparation.transform import Preprocessing
from unet3d.runs.checkpoint import Checkpoint, explained
from unet3d.runs.checkpoint_content import described_network, refuse_non_finite
from unet3d.runs.tensor_file import own_tensors, read_tensors

STEP = 0.5
"""Of nnU-Net's windows, in windows."""


def load_model(path: Path, part: Part = "network") -> Checkpoint:
    """Read a trained model of nnU-Net v2, by a checkpoint of it, onto the CPU."""
    known = known_as(path)
    with explained(known, foreign=True):
        content = read_tensors(path, described=part == "description", foreign=True)
        try:
            said = _Said.of(path, content)
            topology = said.plan.topology
            weights = of_plan(said.weights, topology, said.plan.axes, said.trainer)
            if part == "network":
                weights = own_tensors(weights, path.stat().st_size)
            model = from_nnunet(weights, topology, said.plan.axes)
            if part == "network":
                refuse_non_finite(model, "the weight")
            checkpoint = _checkpoint(said, model)
            warn_of_trainer(said.trainer, printable(known_as(path.absolute()).parent.parent.name))
        except (ValueError, RecursionError, ConfigError, DatasetError) as error:
            reason = str(error).replace(f"{path.parent.parent}/", "")
            raise CheckpointError(
                f"{known} is not a model of nnU-Net that can be used: {reason}; use another model, "
                "or nnU-Net itself"
            ) from error
        return checkpoint


@dataclass(frozen=True, kw_only=True)
class _Said:
    """What a checkpoint and the files above it say, checked field by field."""

    plan: Plan
    labels: Labels
    channels: tuple[str, ...]
    weights: Mapping[str, Tensor]
    """By nnU-Net's names."""
    mirror_axes: tuple[int, ...]
    """Axes of a file."""
    trainer: str

    @classmethod
    def of(cls, path: Path, content: Any) -> "_Said":
        if not isinstance(content, dict) or not isinstance(content.get("network_weights"), dict):
            raise ValueError("it has no network_weights")
        weights = content["network_weights"]
        if not all(isinstance(n, str) and isinstance(one, Tensor) for n, one in weights.items()):
            raise ValueError("its network_weights are not all tensors with names")
        given = content.get("init_args")
        given = given if isinstance(given, dict) else {}
        configuration = given.get("configuration")
        if not isinstance(configuration, str):
            raise ValueError("it does not say which configuration of its plan it is of")
        dataset = _record(path, DATASET, given.get("dataset_json"))
        labels = _labels(path, dataset)
        num_classes = len(labels.regions) or len(labels.names)
        plan = read_plan(_record(path, PLANS, given.get("plans")), configuration, num_classes)
        channels = channel_names(path.parent.parent / DATASET, dataset, [])
        if len(channels) != len(plan.channels):
            raise ValueError(
                f"{DATASET} names {len(channels)} channels, but {PLANS} is for {len(plan.channels)}"
            )
        mirrored = content.get("inference_allowed_mirroring_axes") or ()
        if not isinstance(mirrored, list | tuple) or any(
            type(axis) is not int or not 0 <= axis <= 2 for axis in mirrored
        ):
            raise ValueError(f"inference_allowed_mirroring_axes is {shown(mirrored)}")
        return cls(
            plan=plan,
            labels=labels,
            channels=channels,
            weights=weights,
            mirror_axes=tuple(sorted({plan.axes.back[axis] for axis in mirrored})),
            trainer=printable(content.get("trainer_name")),
        )


def _record(path: Path, name: str, inside: Any) -> dict[str, Any]:
    """Return a file above a checkpoint; where there is none, what the checkpoint has of it."""
    file = path.absolute().parent.parent / name
    try:
        found = read_json(file) if file.is_file() else json.loads(json.dumps(inside))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"there is no {name} in the folder above it")
    return found


def _labels(path: Path, dataset: Mapping[str, Any]) -> Labels:
    """Return the labels; a list of one value is that value, as in nnU-Net."""
    given = dataset.get("labels")
    if not isinstance(given, dict):
        raise ValueError(f"labels is {shown(given)}; it needs names and values")
    if all(not isinstance(value, list) or len(value) == 1 for value in given.values()):
        given = {name: v[0] if isinstance(v, list) else v for name, v in given.items()}
    labels = read_labels(path.parent.parent / DATASET, {**dataset, "labels": given}, [])
    values = list(labels.names)
    if not labels.regions and values != list(range(len(values))):
        raise ValueError("its labels are not 0, 1, 2, ... without a gap")
    return labels


def _checkpoint(said: _Said, model: dict[str, Tensor]) -> Checkpoint:
    plan, labels = said.plan, said.labels
    described_network(plan.topology, model)
    preprocessing = Preprocessing(
        spacing_mm=plan.spacing_mm,
        channels=plan.channels,
        channel_names=said.channels,
        label_names=tuple(labels.names.values()),
        label_values=tuple(labels.names),
        ignore_value=labels.ignore_value,
        crops_to_nonzero=True,
        regions=labels.regions,
        orientation=plan.orientation,
        interpolation=plan.interpolation,
    )
    settings = {
        "data.spacing_mm": plan.spacing_mm,
        "patches.size": plan.patch_size,
        "patches.augmentation.mirror_axes": tuple("xyz"[axis] for axis in said.mirror_axes),
        "training.precision": "float16",  # which nnU-Net trains in on GPUs
        "inference.overlap": 1 - STEP,
        "inference.tta": bool(said.mirror_axes),
        "inference.averaging": "logits",
        "inference.postprocessing": False,
    }
    return Checkpoint(
        topology=plan.topology,
        preprocessing=preprocessing,
        patch_size=plan.patch_size,
        config=Config().with_values(settings),
        model=model,
        training={},
    )
