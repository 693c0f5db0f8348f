"""A trained model of nnU-Net v2, read as a checkpoint of unet3d.

Everything comes from ``checkpoint_final.pth`` and, if they are in the folder above, ``plans.json``
and ``dataset.json``. No code in them is run: :mod:`unet3d.runs.tensor_file` reads plain values, and
shapes are compared with the plan before a weight is read.
"""

import json
import logging
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from unet3d.config import Config
from unet3d.datasets.labels import Labels
from unet3d.datasets.naming import channel_names, read_labels
from unet3d.errors import counted
from unet3d.inputs.plain_data import printable, shown, validated
from unet3d.inputs.reading import read_json
from unet3d.nnunet.model_files import DATASET, PLANS, known_as
from unet3d.nnunet.plans import Axis, read_plan
from unet3d.nnunet.weights import from_nnunet, inverse_of, of_plan
from unet3d.preparation.transform import Preprocessing
from unet3d.runs.checkpoint import Checkpoint, Part, refuse_non_finite
from unet3d.runs.tensor_file import own_tensors

logger = logging.getLogger(__name__)

_KEEPS_NETWORK = re.compile(
    r"nnUNet_?Trainer(Benchmark|noDataLoading|[0-9]+ep(ochs?)?"
    r"|DA5|(DA)?(Seg)?[oO]rd0|noDummy2DDA|NoDA|NoMirroring|onlyMirror01"
    r"|warmup|CosAnneal|(Vanilla)?Ada[mn]|[0-9]en[0-9]"
    r"|Dice|CE|Top[kK]10|LS01|Loss|noSmooth|NoDeepSupervision"
    r"|probabilisticOversampling|0[0-9]{2}|BS[0-9]+|_)*"
)
"""Matches the names of nnU-Net's trainers that change only the training, not the network."""


class _Arguments(BaseModel):
    """Arguments of the trainer that wrote a checkpoint."""

    configuration: str
    plans: Any = None
    dataset_json: Any = None


class _Content(BaseModel):
    """The parts of a checkpoint of nnU-Net that affect segmentations."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    network_weights: dict[str, Tensor]
    init_args: _Arguments
    trainer_name: Any = None
    inference_allowed_mirroring_axes: tuple[Axis, ...] | None = None


def model_of(found: Mapping[str, Any], path: Path, part: Part) -> Checkpoint:
    """Convert the content of a checkpoint of nnU-Net v2 to a checkpoint of unet3d.

    Raises ValueError, in one line, DatasetError and ConfigError.
    """
    content = validated(_Content, found)
    given = content.init_args
    dataset = _record(path, DATASET, given.dataset_json)
    labels = _labels(dataset)
    num_classes = len(labels.regions) or len(labels.label_values)
    plan = read_plan(_record(path, PLANS, given.plans), given.configuration, num_classes)
    channels = channel_names(Path(DATASET), dataset, [])
    if len(channels) != len(plan.channels):
        raise ValueError(
            f"{DATASET} names {counted(len(channels), 'channel')}, but {PLANS} is for "
            f"{len(plan.channels)}"
        )
    trainer = printable(content.trainer_name)
    weights = of_plan(content.network_weights, plan.topology, plan.order, trainer)
    if part != "description":
        weights = own_tensors(weights, path.stat().st_size)
        refuse_non_finite(weights)
    mirrored = sorted(
        {inverse_of(plan.order)[i] for i in content.inference_allowed_mirroring_axes or ()}
    )
    settings = {
        "data.spacing_mm": plan.spacing_mm,
        "patches.size": plan.patch_size,
        "patches.augmentation_details.mirror_axes": tuple("xyz"[axis] for axis in mirrored),
        "training.precision": "float16",  # which nnU-Net trains in on GPUs
        "inference.overlap": 0.5,
        "inference.tta": bool(mirrored),
        "inference.averaging": "logits",
        "inference.postprocessing": False,
    }
    checkpoint = Checkpoint(
        topology=plan.topology,
        preprocessing=Preprocessing(
            spacing_mm=plan.spacing_mm,
            channels=plan.channels,
            channel_names=channels,
            **vars(labels),
            crops_to_nonzero=True,
            orientation=plan.orientation,
            interpolation=plan.interpolation,
        ),
        patch_size=plan.patch_size,
        config=Config().with_values(settings),
        model=from_nnunet(weights, plan.topology, plan.order),
        training={},
    )
    warn_of_trainer(trainer, printable(known_as(path.absolute()).parent.parent.name))
    return checkpoint


def _record(path: Path, name: str, inside: Any) -> dict[str, Any]:
    """Return the content of a file in the folder above, or else its copy in the checkpoint."""
    file = path.absolute().parent.parent / name
    try:
        found = read_json(file) if file.is_file() else json.loads(json.dumps(inside))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"there is no {name} in the folder above it")
    return found


def _labels(dataset: Mapping[str, Any]) -> Labels:
    if not isinstance(dataset.get("labels"), dict):
        raise ValueError(f"labels is {shown(dataset.get('labels'))}; it needs names and values")
    labels = read_labels(Path(DATASET), dataset, [])
    if not labels.regions and labels.label_values != tuple(range(len(labels.label_values))):
        raise ValueError("its labels are not 0, 1, 2, ... without a gap")
    return labels


def keeps_network(trainer: str) -> bool:
    """Return whether a trainer, by its name, is one of nnU-Net's that keep the plan's network."""
    return _KEEPS_NETWORK.fullmatch(trainer) is not None


@cache  # a model has several folds, and each of them is read more than once
def warn_of_trainer(trainer: str, model: str) -> None:
    """Warn, once for each model, that it may need another network than its plan describes."""
    if not keeps_network(trainer):
        logger.warning(
            "%s was trained by %s, which nnU-Net does not have: if this trainer changes the "
            "network, such as the activation, the segmentations are wrong; compare one with "
            "nnU-Net's",
            model,
            trainer,
        )
