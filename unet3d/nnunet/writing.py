"""A network that was trained here, written as a model that nnU-Net v2 predicts with."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from unet3d.atomic import new_folder, remove_leftovers
from unet3d.errors import CheckpointError, ResultExistsError, reason_of, some
from unet3d.nnunet.model_files import DATASET, FINAL, PLANS
from unet3d.nnunet.plans import SCHEMES, THICK
from unet3d.nnunet.weights import to_nnunet, with_all_names
from unet3d.preparation.resample import Interpolation
from unet3d.preparation.transform import Preprocessing
from unet3d.runs.checkpoint import Checkpoint
from unet3d.runs.tensor_file import write_tensors

CONFIGURATION = "3d_fullres"
PLANS_NAME = "nnUNetPlans"

NOT_TRANSPOSED = [0, 1, 2]
ORDER = (2, 1, 0)
"""Order of the axes of a plan that does not transpose (Z, Y, X)."""


def write_model(
    folds: Mapping[int | str, Checkpoint], folder: Path, *, overwrite: bool = False
) -> None:
    """Write the folder of a model, which appears whole or not at all.

    The keys of ``folds`` are numbers, or ``all``. ``overwrite`` replaces an existing model with
    everything in its folder; any other existing folder is refused.
    """
    with suppress(OSError):
        remove_leftovers(folder.absolute().parent)  # a killed process may have moved it aside
    if folder.is_symlink() or (folder.exists() and not (folder / PLANS).is_file()):
        raise ResultExistsError(
            f"{folder} exists, but is not the folder of a model; choose another --output"
        )
    if folder.exists() and not overwrite:
        raise ResultExistsError(f"{folder} exists; add --overwrite to replace it")
    first = next(iter(folds.values()))
    for fold, other in folds.items():
        if _of_training(other) != _of_training(first):
            raise _refused(f"network {fold} differs from the first; name folds of one run")
    plans = json.loads(json.dumps(_plans(first)))  # lists for tuples, as nnU-Net reads them
    dataset = _dataset(first.preprocessing)
    try:
        with new_folder(folder, replace=overwrite) as unfinished:
            for name, content in ((PLANS, plans), (DATASET, dataset)):
                (unfinished / name).write_text(json.dumps(content, indent=2) + "\n")
            for fold, checkpoint in folds.items():
                arguments = {
                    "plans": plans,
                    "configuration": CONFIGURATION,
                    "fold": fold,
                    "dataset_json": dataset,
                }
                path = unfinished / f"fold_{fold}" / FINAL
                path.parent.mkdir()
                with path.open("xb") as file:
                    write_tensors(_content(checkpoint, arguments), file)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {folder}: {reason_of(error)}; choose another --output"
        ) from error


def _content(checkpoint: Checkpoint, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the content of nnU-Net's checkpoint of a fold, given the trainer's arguments."""
    weights = to_nnunet(checkpoint.model, checkpoint.topology, ORDER)
    mirrored = sorted(ORDER[axis] for axis in checkpoint.mirror_axes)
    return {
        "network_weights": with_all_names(weights, has_biases=checkpoint.topology.upsampling_bias),
        "optimizer_state": {},
        "grad_scaler_state": None,
        "logging": {},
        "_best_ema": None,
        "current_epoch": 0,
        "init_args": arguments,
        "trainer_name": "nnUNetTrainer",
        "inference_allowed_mirroring_axes": tuple(mirrored) or None,
    }


def _of_training(checkpoint: Checkpoint) -> tuple[Any, ...]:
    """Return what all folds of one model share. ``least_std`` is left out: nnU-Net has its own."""
    preprocessing = checkpoint.preprocessing.without_least_std()
    return checkpoint.topology, preprocessing, checkpoint.patch_size


def _refused(why: str) -> CheckpointError:
    return CheckpointError(f"nnU-Net cannot predict with this network: {why}")


def _plans(checkpoint: Checkpoint) -> dict[str, Any]:
    topology, preprocessing = checkpoint.topology, checkpoint.preprocessing
    if topology.norm != "instance":
        raise _refused(
            f"its plans know only instance normalisation, but this network has {topology.norm} "
            "normalisation"
        )
    if checkpoint.patch_size is None:
        raise _refused(
            "this network was trained on whole volumes, but nnU-Net's plans need a patch size"
        )
    if preprocessing.spacing_mm is None:
        raise _refused("each image keeps its own spacing, but nnU-Net's plans need one for all")
    if not preprocessing.crops_to_nonzero:
        raise _refused("it crops images to nonzero voxels, but this network uses complete images")
    spacing = preprocessing.spacing_mm[::-1]
    size = checkpoint.patch_size[::-1]
    scheme_of = {kind: scheme for scheme, kind in SCHEMES.items()}
    schemes = [scheme_of[channel.kind] for channel in preprocessing.channels]
    is_turned = preprocessing.orientation == "ras"
    return {
        "dataset_name": "Dataset001_unet3d",
        "plans_name": PLANS_NAME,
        "original_median_spacing_after_transp": spacing,
        "original_median_shape_after_transp": size,
        "image_reader_writer": "NibabelIOWithReorient" if is_turned else "SimpleITKIO",
        "transpose_forward": NOT_TRANSPOSED,
        "transpose_backward": NOT_TRANSPOSED,
        "experiment_planner_used": "unet3d",
        "label_manager": "LabelManager",
        "foreground_intensity_properties_per_channel": {
            str(number): {
                "mean": channel.mean,
                "median": channel.mean,
                "std": channel.std,
                "min": channel.low,
                "max": channel.high,
                "percentile_00_5": channel.low,
                "percentile_99_5": channel.high,
            }
            for number, channel in enumerate(preprocessing.channels)
        },
        "configurations": {
            CONFIGURATION: {
                "data_identifier": f"{PLANS_NAME}_{CONFIGURATION}",
                "preprocessor_name": "DefaultPreprocessor",
                "batch_size": 2,
                "patch_size": size,
                "median_image_size_in_voxels": size,
                "spacing": spacing,
                "normalization_schemes": [scheme for scheme, _ in schemes],
                "use_mask_for_norm": [is_masked for _, is_masked in schemes],
                **_resampling(preprocessing.interpolation),
                "architecture": _architecture(checkpoint),
                "batch_dice": False,
            }
        },
    }


def _resampling(how: Interpolation) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for what, is_label, order, across in (
        ("data", False, how.order, how.across_slices),
        ("seg", True, 1, 0),
        ("probabilities", False, 1, how.logits_across_slices),
    ):
        found[f"resampling_fn_{what}"] = "resample_data_or_seg_to_shape"
        found[f"resampling_fn_{what}_kwargs"] = {
            "is_seg": is_label,
            "order": order,
            "order_z": across,
            "force_separate_z": {thick: flag for flag, thick in THICK.items()}[how.thick],
        }
    return found


def _architecture(checkpoint: Checkpoint) -> dict[str, Any]:
    topology = checkpoint.topology
    levels = range(topology.num_levels)
    name, units = "PlainConvUNet", "n_conv_per_stage"
    if topology.encoder == "residual":
        name, units = "ResidualEncoderUNet", "n_blocks_per_stage"
    return {
        "network_class_name": f"dynamic_network_architectures.architectures.unet.{name}",
        "arch_kwargs": {
            "n_stages": topology.num_levels,
            "features_per_stage": list(topology.channels),
            "conv_op": "torch.nn.modules.conv.Conv3d",
            "kernel_sizes": [topology.kernel(level)[::-1] for level in levels],
            "strides": [stride[::-1] for stride in topology.strides],
            units: [topology.num_units(level) for level in levels],
            "n_conv_per_stage_decoder": [
                topology.num_decoder_units(level) for level in reversed(levels[:-1])
            ],
            "conv_bias": topology.upsampling_bias,
            "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
            "norm_op_kwargs": {"eps": topology.norm_eps, "affine": True},
            "dropout_op": None,
            "dropout_op_kwargs": None,
            "nonlin": "torch.nn.LeakyReLU",
            "nonlin_kwargs": {"inplace": True, "negative_slope": topology.negative_slope},
        },
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }


def _dataset(preprocessing: Preprocessing) -> dict[str, Any]:
    values, ignored = preprocessing.label_values, preprocessing.ignore_value
    labels: dict[str, Any] = dict(zip(preprocessing.label_names[1:], values[1:], strict=True))
    found: dict[str, Any] = {}
    if preprocessing.regions:
        labels = {region.name: list(region.values) for region in preprocessing.regions}
        found["regions_class_order"] = [region.written for region in preprocessing.regions]
    elif values != tuple(range(len(values))):
        raise _refused(
            f"its labels are 0, 1, 2, ... without a gap, but here they are {some(values)}"
        )
    if ignored is not None:
        if ignored != max(values) + 1:
            raise _refused(
                f"its ignore label follows the highest label, {max(values)}, but here it is "
                f"{ignored}"
            )
        labels["ignore"] = ignored
    return {
        "channel_names": {str(n): name for n, name in enumerate(preprocessing.channel_names)},
        "labels": {"background": 0, **labels},
        "numTraining": 0,
        "file_ending": ".nii.gz",
        **found,
    }
