"""The experiment of a configuration: all that training needs except devices."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unet3d.config import Config, Shape
from unet3d.datasets.dataset import Case, Dataset, Finding, fold_cases, load_dataset
from unet3d.datasets.naming import has_sides, with_labels
from unet3d.datasets.phantom import NUM_CASES, SPACING_MM, write_phantom_dataset
from unet3d.errors import DatasetError, counted
from unet3d.images.files import times
from unet3d.model import Topology
from unet3d.parallel import ParallelDims
from unet3d.patches.patches import padded_shape
from unet3d.planning.memory_estimate import Step
from unet3d.planning.network_plan import (
    NetworkPlan,
    batch_shape,
    check_shards,
    check_stages,
    plan_fingerprint,
    plan_notes,
)
from unet3d.preparation.cache import Cache, PreparedCase
from unet3d.preparation.check import examine
from unet3d.preparation.preprocess import plan_preprocessing, prepare_cases
from unet3d.preparation.transform import Preprocessing
from unet3d.runs.case_split import CaseSplit

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A network and the data it is trained on."""

    config: Config
    """The settings, including all values that depend on the data."""
    preprocessing: Preprocessing
    network: NetworkPlan
    """The network and the patch size, or the sizes of all whole volumes, also for validation."""
    training: tuple[PreparedCase, ...]
    validation: tuple[PreparedCase, ...]
    validation_files: tuple[Case, ...]
    """The files of the validation cases, in the order of these cases."""
    split: CaseSplit

    @property
    def topology(self) -> Topology:
        """The network."""
        return self.network.topology

    @property
    def patch_size(self) -> Shape | None:
        """Voxels along X, Y, Z, multiples of the total stride; None: whole volumes."""
        return None if self.config.patches.size == "whole" else self.network.size

    def largest_patch(self, num_patches: int) -> Shape:
        """Return the size of patches in the largest batch of a replica; see :func:`batch_shape`."""
        if self.patch_size is not None:
            return self.patch_size
        stride = self.topology.total_stride
        shapes = {case.shape for case in self.training}
        return batch_shape([padded_shape(shape, stride) for shape in shapes], num_patches)

    def step(self, dims: ParallelDims, precision: str) -> Step:
        """Return the step of the replica with the largest share of a batch of these cases."""
        step = self.network.step(self.config, dims, precision)
        augmentation = step.augmentation and replace(
            step.augmentation,
            cases=tuple({(case.shape, case.spacing_mm) for case in self.training}),
            # A case with an intensity that float16 cannot hold is stored in float32.
            voxel_bytes=max(case.image().itemsize for case in self.training),
        )
        size = self.largest_patch(step.batch_size)
        return replace(step, size=size, augmentation=augmentation)


def open_dataset(config: Config) -> Dataset:
    """Return the configured data set, or the phantom data, which are created on first use."""
    dataset = load_dataset(config.data.dataset or _phantoms(config), config.data.reading)
    return dataset if config.data.labels is None else with_labels(dataset, config.data.labels)


def _phantoms(config: Config) -> Path:
    shape, seed = config.data.phantom_shape, config.training.seed
    folder = Cache(config.data.cache).folder / f"phantom-{times(shape)}-seed{seed}"
    logger.debug("phantom data in %s", folder)
    return write_phantom_dataset(folder, NUM_CASES, shape, SPACING_MM, seed)


def plan_experiment(
    config: Config,
    num_workers: int,
    num_stages: int = 1,
    num_shards: int = 1,
    num_replicas: int = 1,
    architecture: Topology | None = None,
) -> Experiment:
    """Check and prepare the data, and choose patch, batch and network.

    ``num_workers`` processes prepare cases; 0: this process. The stages share a network, the shards
    each volume and the replicas a batch.
    """
    dataset = open_dataset(config)
    findings, geometries, _ = examine(dataset, config.data.spacing_mm)
    report_findings(findings)
    training, validation = fold_cases(
        dataset, config.data.fold, config.data.num_folds, config.training.seed
    )
    preprocessing, fingerprint = plan_preprocessing(dataset, config.data, geometries)
    # Before the cases are prepared, so that impossible settings are refused early.
    network = plan_fingerprint(
        config,
        fingerprint,
        len(dataset.channel_names),
        preprocessing.num_outputs,
        num_replicas,
        preprocessing.region_classes,
        architecture,
    )
    check_stages(config, network, num_stages)
    window = config.inference.window
    windows = fingerprint.shapes if window == "whole" else [window] if window != "auto" else ()
    check_shards(network, num_shards, windows)
    for note in plan_notes(config, network):
        logger.log(logging.DEBUG if note == network.limits else logging.INFO, "%s", note)
    values: dict[str, Any] = {"data.spacing_mm": preprocessing.spacing_mm or "native"}
    if config.patches.random_changes.mirror_axes == "auto":
        names = (*dataset.label_names, *(region.name for region in dataset.regions))
        axes = ("y", "z") if has_sides(names) else ("x", "y", "z")
        values["patches.augmentation_details.mirror_axes"] = axes
    return Experiment(
        config=network.settled(config).with_values(values),
        preprocessing=preprocessing,
        network=network,
        training=tuple(prepare_cases(training, preprocessing, config.data.cache, num_workers)),
        validation=tuple(prepare_cases(validation, preprocessing, config.data.cache, num_workers)),
        validation_files=validation,
        split=CaseSplit.of(training, validation, Cache(config.data.cache)),
    )


def report_findings(findings: list[Finding], shown: int = 5) -> None:
    """Log warnings about a data set, and raise its errors; names at most ``shown`` of each."""
    errors = [finding for finding in findings if finding.severity == "error"]
    warnings = [finding for finding in findings if finding.severity == "warning"]
    for finding in warnings[:shown]:
        logger.warning("%s: %s", finding.case, finding.message)
    if len(warnings) > shown:
        logger.warning(
            "and %s; unet3d check lists all", counted(len(warnings) - shown, "more warning")
        )
    if errors:
        named = "; ".join(f"{finding.case}: {finding.message}" for finding in errors[:shown])
        more = f"; and {len(errors) - shown} more" if len(errors) > shown else ""
        raise DatasetError(
            f"the data set has {counted(len(errors), 'fault')}; unet3d check lists all: "
            f"{named}{more}"
        )
