"""A trained model of nnU-Net v2, read as a checkpoint of ours.

Everything comes from ``checkpoint_final.pth`` and, where they lie above it, from ``plans.json`` and
``dataset.json``. No code in them is run: :mod:`unet3d.runs.tensor_file` reads plain values, and
shapes are compared with the plan before a weight is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

from torch import Tensor

from unet3d.atomic import temporary_folder
from unet3d.config import Config
from unet3d.datasets.naming import Labels, channel_names, read_labels
from unet3d.distributed.group import Group
from unet3d.errors import CheckpointError, ConfigError, DatasetError
from unet3d.inputs.plain_data import printable, shown, validated
from unet3d.inputs.reading import read_json
from unet3d.model import Topology
from unet3d.model.topology import stated_kernels
from unet3d.nnunet.axes import Axes
from unet3d.nnunet.layout import DATASET, PLANS, SUFFIX, known_as
from unet3d.nnunet.plans import Plan, ResamplingArguments, read_plan
from unet3d.nnunet.terms import SCHEMES, THICK
from unet3d.nnunet.trainers import warn_of_trainer
from unet3d.nnunet.weights import from_nnunet, of_plan
from unet3d.preparation.normalization import ChannelNormalization
from unet3d.preparation.resample import Interpolation
from unet3d.preparation.transform import Preprocessing
from unet3d.runs.checkpoint import Checkpoint, explained, load_checkpoint, save_checkpoint
from unet3d.runs.checkpoint_content import described_network, refuse_non_finite
from unet3d.runs.tensor_file import own_tensors, read_tensors

STEP = 0.5
"""Of nnU-Net's windows, in windows."""

LEAST_STD = 1e-8
"""What nnU-Net divides intensities by at least."""

Part = Literal["network", "description"]


def load_network(path: Path, part: Part = "network") -> Checkpoint:
    """Read a network to predict with: a checkpoint of ours, or one of nnU-Net.

    Args:
        path: A file of :func:`~unet3d.runs.checkpoint.save_checkpoint`, or a ``.pth`` of nnU-Net;
            either may be named like the other.
        part: network: the weights, too; description: they are on the meta device.

    Raises:
        CheckpointError: It cannot be used; the message says why.
    """
    is_named_theirs = path.suffix == SUFFIX
    try:
        return (load_model if is_named_theirs else load_checkpoint)(path, part)
    except CheckpointError:
        if _is_theirs(path) in (is_named_theirs, None):
            raise
    return (load_checkpoint if is_named_theirs else load_model)(path, part)


def _is_theirs(path: Path) -> bool | None:
    """Return whether a file holds a model of nnU-Net; None: neither that nor a checkpoint."""
    try:
        content = read_tensors(path, described=True, foreign=True)
    except (OSError, ValueError, MemoryError, UnpicklingError):
        return None
    if not isinstance(content, dict) or not content.keys() & {"network_weights", "format"}:
        return None
    return "network_weights" in content


def network_from_first(path: Path, group: Group) -> Checkpoint:
    """Return a network of a file that only the first rank needs to see; all ranks call it.

    Args:
        path: As for :func:`load_network`.
        group: The ranks, connected.

    Raises:
        CheckpointError: It cannot be used.
    """
    read = partial(load_checkpoint, part="network")
    if not group.from_first(lambda: path.suffix == SUFFIX or _is_theirs(path) is True):
        return group.file_from_first(path, read)
    with temporary_folder("unet3d-model-") as folder:  # a model of nnU-Net is several files
        converted = folder / "network.pt"
        group.from_first(lambda: save_checkpoint(load_network(path), converted))
        return group.file_from_first(converted, read)


def load_model(path: Path, part: Part = "network") -> Checkpoint:
    """Read a trained model of nnU-Net v2 onto the CPU.

    Args:
        path: Its ``checkpoint_final.pth``, or another checkpoint of it.
        part: As for :func:`load_network`.

    Raises:
        CheckpointError: The file is missing or damaged, or this package cannot do what the model
            needs.
    """
    known = known_as(path)
    with explained(known, foreign=True):
        content = read_tensors(path, described=part == "description", foreign=True)
        try:
            said = _Said.of(path, content)
            topology = _topology(said)
            weights = of_plan(said.weights, topology, said.axes, said.trainer)
            checkpoint = _described(said, topology, from_nnunet(weights, topology, said.axes))
            if part == "network":
                own = own_tensors(weights, path.stat().st_size)
                model = from_nnunet(own, topology, said.axes)
                refuse_non_finite(model, "the weight")
                checkpoint.model.update(model)
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
    axes: Axes
    labels: Labels
    channels: tuple[str, ...]
    weights: Mapping[str, Tensor]
    """By nnU-Net's names, without memory."""
    mirror_axes: tuple[int, ...]
    """Axes of nnU-Net's network."""
    trainer: str

    @classmethod
    def of(cls, path: Path, content: Any) -> "_Said":
        if not isinstance(content, dict) or not isinstance(content.get("network_weights"), dict):
            raise ValueError("it has no network_weights")
        weights = content["network_weights"]
        if not all(isinstance(one, Tensor) for one in weights.values()):
            raise ValueError("its network_weights are not all tensors")
        _refuse_other_keys(weights, "its network_weights")
        given = content.get("init_args")
        given = given if isinstance(given, dict) else {}
        configuration = given.get("configuration")
        if not isinstance(configuration, str):
            raise ValueError("it does not say which configuration of its plan it is of")
        plan = read_plan(_record(path, PLANS, given.get("plans")), configuration)
        dataset = _record(path, DATASET, given.get("dataset_json"))
        mirrored = content.get("inference_allowed_mirroring_axes")
        return cls(
            plan=plan,
            axes=Axes.of(plan.transpose_forward),
            labels=_labels(path, dataset),
            channels=channel_names(path.parent.parent / DATASET, dataset, []),
            weights=weights,
            mirror_axes=_mirror_axes(mirrored),
            trainer=printable(content.get("trainer_name")),
        )


def _record(path: Path, name: str, inside: Any) -> dict[str, Any]:
    """Return a file above a checkpoint; where there is none, what the checkpoint has of it."""
    file = path.absolute().parent.parent / name
    try:
        found = read_json(file) if file.is_file() else inside
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} cannot be read: {error}") from error
    _refuse_other_keys(inside, f"what it has of {name}")
    if not isinstance(found, dict):
        raise ValueError(f"there is no {name} in the folder above it")
    return found


def _refuse_other_keys(value: Any, what: str) -> None:
    """Refuse keys that are not text, which a pickle may have and JSON may not."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{what} has the key {shown(key)}, which is no text")
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            _refuse_other_keys(item, what)


def _labels(path: Path, dataset: Mapping[str, Any]) -> Labels:
    """Return the labels; a list of one value is that value, as in nnU-Net."""
    given = dataset.get("labels")
    if isinstance(given, dict) and not any(
        isinstance(value, list) and len(value) > 1 for value in given.values()
    ):
        given = {
            name: value[0] if isinstance(value, list) and value else value
            for name, value in given.items()
        }
    if not isinstance(given, dict):
        raise ValueError(f"labels is {shown(given)}; it needs names and values")
    labels = read_labels(path.parent.parent / DATASET, {**dataset, "labels": given}, [])
    values = list(labels.names)
    if not labels.regions and values != list(range(len(values))):
        raise ValueError("its labels are not 0, 1, 2, ... without a gap")
    return labels


def _mirror_axes(found: Any) -> tuple[int, ...]:
    axes = () if found is None else found
    if not isinstance(axes, list | tuple) or any(
        type(axis) is not int or not 0 <= axis <= 2 for axis in axes
    ):
        raise ValueError(f"inference_allowed_mirroring_axes is {shown(found)}")
    return tuple(sorted(set(axes)))


def _described(said: _Said, topology: Topology, model: dict[str, Tensor]) -> Checkpoint:
    """Return the checkpoint with weights that have no memory."""
    plan, axes = said.plan, said.axes
    described_network(topology, model)
    size = axes.from_network(plan.patch_size)
    for axis, (voxels, step) in enumerate(zip(size, topology.total_stride, strict=True)):
        if voxels % step:
            raise ValueError(
                f"its patch has {voxels} voxels along {'XYZ'[axis]}, which its strides of {step} "
                "do not divide"
            )
    spacing_mm = axes.from_network(plan.spacing)
    mirrored = sorted(axes.back[axis] for axis in said.mirror_axes)
    return Checkpoint(
        topology=topology,
        preprocessing=_preprocessing(said),
        patch_size=size,
        config=Config().with_values(
            {
                "data.spacing_mm": spacing_mm,
                "patches.size": size,
                "patches.augmentation.mirror_axes": tuple("xyz"[axis] for axis in mirrored),
                "training.precision": "float16",  # which nnU-Net trains in on GPUs
                "inference.overlap": 1 - STEP,
                "inference.tta": bool(mirrored),
                "inference.averaging": "logits",
                "inference.postprocessing": False,
            }
        ),
        model=model,
        training={},
    )


def _topology(said: _Said) -> Topology:
    num_schemes = len(said.plan.normalization_schemes)
    if len(said.channels) != num_schemes:
        raise ValueError(
            f"{DATASET} names {len(said.channels)} channels, but {PLANS} is for {num_schemes}"
        )
    network, axes = said.plan.network, said.axes
    kernels = tuple(axes.from_network(kernel) for kernel in network.kernels)
    num_outputs = len(said.labels.regions) or len(said.labels.names)
    return validated(
        Topology,
        {
            "in_channels": len(said.channels),
            "num_classes": num_outputs,
            "channels": network.features,
            "strides": tuple(axes.from_network(stride) for stride in network.strides),
            "kernels": stated_kernels(kernels),
            "encoder": "residual" if network.is_residual else "plain",
            "norm": "instance",
            "deep_supervision": True,
            "units": network.units,
            "decoder_units": network.decoder_units[::-1],
            "upsampling_bias": network.has_biases,
            "norm_eps": network.norm.eps,
            "negative_slope": network.activation.negative_slope,
        },
    )


def _preprocessing(said: _Said) -> Preprocessing:
    plan, labels = said.plan, said.labels
    return Preprocessing(
        spacing_mm=said.axes.from_network(plan.spacing),
        channels=tuple(_normalization(plan, channel) for channel in range(len(said.channels))),
        channel_names=said.channels,
        label_names=tuple(labels.names.values()),
        label_values=tuple(labels.names),
        ignore_value=labels.ignore_value,
        crops_to_nonzero=True,
        regions=labels.regions,
        orientation=plan.orientation,
        interpolation=_interpolation(plan.image_resampling, plan.logit_resampling),
    )


def _normalization(plan: Plan, channel: int) -> ChannelNormalization:
    scheme, known = plan.normalization_schemes[channel], plan.intensities[channel]
    if scheme == "CTNormalization" and known is not None:
        return ChannelNormalization(
            kind="ct",
            low=known.percentile_00_5,
            high=known.percentile_99_5,
            mean=known.mean,
            std=max(known.std, LEAST_STD),
        )
    masked = (scheme, plan.use_mask_for_norm[channel])
    kind = SCHEMES.get(masked) or SCHEMES[scheme, False]
    return ChannelNormalization(kind=kind, least_std=LEAST_STD)


def _interpolation(image: ResamplingArguments, logits: ResamplingArguments) -> Interpolation:
    if logits.order != 1:
        raise ValueError(f"logits are resampled with order {logits.order}; only 1 is known here")
    if image.force_separate_z != logits.force_separate_z:
        raise ValueError("force_separate_z differs between images and logits")
    return Interpolation(
        order=image.order,
        thick=THICK[image.force_separate_z],
        across_slices=image.order_z,
        logits_across_slices=logits.order_z,
        clips=True,
    )
