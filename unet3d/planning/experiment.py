"""From a configuration to all that training needs except devices: cases, patches, network."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from unet3d.config import AugmentationSettings, Config, Shape, Spacing
from unet3d.errors import ConfigError, DatasetError
from unet3d.model import Topology, UNet3d, plan_topology
from unet3d.parallel.partition import check_cuts, check_num_stages
from unet3d.parallel.spatial.division import SlabRule
from unet3d.runs.case_split import CaseSplit
from unet3d.volumes.augment import DeviceAugmentation
from unet3d.volumes.cache import Cache, PreparedCase
from unet3d.volumes.check import Finding, check_headers
from unet3d.volumes.dataset import Dataset, fold_cases, load_dataset
from unet3d.volumes.patches import padded_shape
from unet3d.volumes.phantom import write_phantom_dataset
from unet3d.volumes.phantom_anatomy import LABEL_NAMES
from unet3d.volumes.preprocess import Fingerprint, plan_preprocessing, prepare_cases
from unet3d.volumes.transform import Preprocessing

logger = logging.getLogger(__name__)

PREPARED_BYTES = 2
"""What a voxel of a prepared image takes where none is there to ask: float16."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A network and the data it is trained on."""

    config: Config
    """The settings, with every choice that follows from the data written out."""
    preprocessing: Preprocessing
    """How images are prepared."""
    topology: Topology
    """The network."""
    patch_size: Shape | None
    """Voxels along X, Y, Z, multiples of the total stride; None: whole volumes."""
    planned_size: Shape
    """The patch size, or that of the median volume where whole ones are trained on."""
    training: tuple[PreparedCase, ...]
    """Prepared cases for training."""
    validation: tuple[PreparedCase, ...]
    """Prepared cases for validation."""
    split: CaseSplit
    """Names and contents of both."""

    def largest_patch(self) -> Shape:
        """Return the size of the largest patch of the training, padded to the strides."""
        return max(self.patch_sizes(), key=math.prod)

    def patch_sizes(self) -> list[Shape]:
        """Return the sizes that patches of the training have, padded to the strides."""
        if self.patch_size is not None:
            return [self.patch_size]
        stride = self.topology.total_stride
        shapes = [case.label().shape for case in self.training]
        return [padded_shape((x, y, z), stride) for x, y, z in shapes]

    def augmentation(self, device: torch.device) -> DeviceAugmentation | None:
        """Return what makes batches on a device; None where they are made on the host.

        Args:
            device: Where the network begins.

        Raises:
            DeviceError: A GPU is asked for, and this is a CPU.
        """
        cases = {(case.label().shape, case.spacing_mm) for case in self.training}
        # A case with an intensity that float16 cannot hold is stored in float32.
        num_bytes = max(case.image().itemsize for case in self.training)
        settings = self.config.patches.augmentation
        channels, classes = self.topology.in_channels, self.topology.num_classes
        return DeviceAugmentation.on(device, settings, tuple(cases), num_bytes, channels, classes)


@dataclass(frozen=True, kw_only=True)
class NetworkPlan:
    """A network, and the size that it is trained on."""

    topology: Topology
    """The network."""
    size: Shape
    """Voxels of a patch, or of the median volume, along X, Y, Z; multiples of the total stride."""
    volume: tuple[Shape, Spacing]
    """Shape and spacing of the median volume, once prepared."""

    def augmentation(
        self, settings: AugmentationSettings, device: torch.device
    ) -> DeviceAugmentation | None:
        """Return what makes batches on a device; None where they are made on the host.

        Args:
            settings: Of augmentation.
            device: Where the network begins.

        Raises:
            DeviceError: A GPU is asked for, and this is a CPU.
        """
        channels, classes = self.topology.in_channels, self.topology.num_classes
        return DeviceAugmentation.on(
            device, settings, (self.volume,), PREPARED_BYTES, channels, classes
        )


def open_dataset(config: Config) -> Dataset:
    """Return the configured data set, or the phantom data, which are created on first use.

    Raises:
        DatasetError: There is none, or it cannot be understood.
        CacheError: The cache folder, where phantom data go, cannot be written to.
    """
    if config.data.dataset is not None:
        return load_dataset(config.data.dataset)
    phantom, seed = config.data.phantom, config.training.seed
    name = "-".join(
        ["phantom", str(phantom.num_cases), _times(phantom.shape), _times(phantom.spacing_mm)]
    )
    folder = Cache(config.data.cache).folder / f"{name}-seed{seed}"
    logger.info("phantom data in %s", folder)
    return load_dataset(
        write_phantom_dataset(folder, phantom.num_cases, phantom.shape, phantom.spacing_mm, seed)
    )


def plan_experiment(
    config: Config,
    num_workers: int,
    num_stages: int = 1,
    num_shards: int = 1,
) -> Experiment:
    """Check and prepare the data, and choose patch size and network.

    Args:
        config: The configuration as the user wrote it.
        num_workers: Number of processes that prepare cases; 0: this process.
        num_stages: How many devices share the network.
        num_shards: How many devices share each volume.

    Raises:
        DatasetError: The data set has faults that would break training.
        CacheError: The cache folder cannot be written to.
        VolumeError: A volume cannot be used.
        ConfigError: The settings do not suit the data.
        DeviceError: The network cannot be cut as the settings say, or a patch has too few planes.
    """
    dataset = open_dataset(config)
    training, validation = fold_cases(
        dataset, config.data.fold, config.data.num_folds, config.training.seed
    )
    report_findings(check_headers(dataset, config.data.spacing_mm))
    # From headers alone, so that what cannot be trained is refused before a voxel is read.
    network = _network_of(dataset, config)
    check_stages(config, network, num_stages)
    rule = SlabRule(topology=network.topology, num_shards=num_shards)
    rule.divide(network.size)
    rounded = rounding(config, network)
    if rounded is not None:
        logger.info(rounded)
    preprocessing, _ = plan_preprocessing(dataset, config.data, num_workers)
    topology = network.topology
    patch_size = None if config.patches.size == "whole" else network.size
    experiment = Experiment(
        config=config.with_values(
            {
                "data.spacing_mm": preprocessing.spacing_mm or "native",
                "patches.size": patch_size or "whole",
            }
        ),
        preprocessing=preprocessing,
        topology=topology,
        patch_size=patch_size,
        planned_size=network.size,
        training=tuple(prepare_cases(training, preprocessing, config.data.cache, num_workers)),
        validation=tuple(prepare_cases(validation, preprocessing, config.data.cache, num_workers)),
        split=CaseSplit.of(training, validation, config.data.cache),
    )
    for size in experiment.patch_sizes():
        rule.divide(size)
    return experiment


def plan_without_data(config: Config) -> NetworkPlan:
    """Choose patch size and network without reading a voxel.

    Where only a shape is given, there are one channel, three classes, and the spacing of the
    settings, else 1 mm.

    Args:
        config: The configuration as the user wrote it.

    Raises:
        DatasetError: The data set cannot be understood.
        VolumeError: A header cannot be read.
        ConfigError: The settings do not suit the data.
    """
    data = config.data
    if data.dataset is not None:
        return _network_of(load_dataset(data.dataset), config)
    spacing = data.phantom.spacing_mm if isinstance(data.spacing_mm, str) else data.spacing_mm
    fingerprint = Fingerprint(
        spacing_mm=spacing, shape=data.phantom.shape, original_spacing_mm=spacing
    )
    num_classes = len(LABEL_NAMES) if isinstance(config.patches.size, str) else 3
    return _plan_network(config, fingerprint, 1, num_classes)


def check_stages(config: Config, network: NetworkPlan, num_stages: int) -> None:
    """Refuse cuts that the network does not have, and more stages than it has blocks.

    Args:
        config: The cuts.
        network: What is cut.
        num_stages: How many devices share it.

    Raises:
        DeviceError: It cannot be cut so.
    """
    if num_stages == 1 and config.parallel.cuts is None:
        return
    with torch.device("meta"):
        model = UNet3d(network.topology)
    check_num_stages(model, num_stages)
    if config.parallel.cuts is not None:
        check_cuts(config.parallel.cuts, len(model.blocks()), num_stages)


def rounding(config: Config, network: NetworkPlan) -> str | None:
    """Return a line where the size that was asked for is not the one that is trained on, or None.

    Args:
        config: The settings.
        network: What follows from them.
    """
    asked, size = config.patches.size, network.size
    if isinstance(asked, str) or asked == size:
        return None
    return (
        f"patches.size {_times(asked)} is rounded up to {_times(size)}, multiples of "
        f"{_times(network.topology.total_stride)} that the network can halve"
    )


def fitting_size(shape: Shape, spacing_mm: Spacing, max_voxels: int) -> Shape:
    """Return the largest patch within a voxel budget: a cube in mm, clipped to the volume.

    Args:
        shape: Median volume, in voxels.
        spacing_mm: Its spacing, in mm.
        max_voxels: The voxel budget.
    """

    def clipped(edge_mm: float) -> Shape:
        x, y, z = (
            max(1, min(voxels, math.floor(edge_mm / spacing)))
            for voxels, spacing in zip(shape, spacing_mm, strict=True)
        )
        return x, y, z

    low = 0.0
    high = max(voxels * spacing for voxels, spacing in zip(shape, spacing_mm, strict=True)) + 1e-6
    if math.prod(clipped(high)) <= max_voxels:
        return shape
    while high - low > min(spacing_mm) / 4:
        middle = (low + high) / 2
        low, high = (middle, high) if math.prod(clipped(middle)) <= max_voxels else (low, middle)
    return clipped(low)


def report_findings(findings: list[Finding], shown: int = 5) -> None:
    """Log warnings about a data set, and stop at errors.

    Args:
        findings: Findings of the checks.
        shown: How many findings of each kind to name.

    Raises:
        DatasetError: One of the findings is an error.
    """
    errors = [finding for finding in findings if finding.severity == "error"]
    warnings = [finding for finding in findings if finding.severity == "warning"]
    for finding in warnings[:shown]:
        logger.warning("%s: %s", finding.case, finding.message)
    if len(warnings) > shown:
        logger.warning("%d more warnings; unet3d check lists them", len(warnings) - shown)
    if errors:
        named = "; ".join(f"{finding.case}: {finding.message}" for finding in errors[:shown])
        more = f"; and {len(errors) - shown} more" if len(errors) > shown else ""
        raise DatasetError(
            f"the data set has {len(errors)} fault(s), which unet3d check lists: {named}{more}"
        )


def _network_of(dataset: Dataset, config: Config) -> NetworkPlan:
    """Return the network for a data set, of which only headers are read."""
    # Statistics of intensities are not needed here.
    headers_only = config.data.model_copy(update={"normalization": "none"})
    _, fingerprint = plan_preprocessing(dataset, headers_only)
    return _plan_network(config, fingerprint, len(dataset.channel_names), len(dataset.label_values))


def _plan_network(
    config: Config, fingerprint: Fingerprint, num_channels: int, num_classes: int
) -> NetworkPlan:
    def plan(size: Shape) -> Topology:
        return plan_topology(config.model, size, fingerprint.spacing_mm, num_channels, num_classes)

    if config.patches.size == "auto":
        return _plan_patch(plan, fingerprint, config.patches.max_voxels)
    size = fingerprint.shape if config.patches.size == "whole" else config.patches.size
    topology = plan(size)
    return NetworkPlan(
        topology=topology,
        size=padded_shape(size, topology.total_stride),
        volume=(fingerprint.shape, fingerprint.spacing_mm),
    )


def _plan_patch(
    plan: Callable[[Shape], Topology], fingerprint: Fingerprint, max_voxels: int
) -> NetworkPlan:
    """Return the network and the patch that, padded to its strides, keeps to the budget.

    The budget is exceeded only for a network that no smaller patch suits.
    """
    size = fitting_size(fingerprint.shape, fingerprint.spacing_mm, max_voxels)
    topology = plan(size)
    patch = padded_shape(size, topology.total_stride)
    budget = max_voxels
    while math.prod(patch) > max_voxels:
        budget = math.floor(0.97 * budget)
        size = fitting_size(fingerprint.shape, fingerprint.spacing_mm, budget)
        try:
            topology = plan(size)
        except ConfigError:  # fewer voxels than the levels of the settings need
            break
        patch = padded_shape(size, topology.total_stride)
    return NetworkPlan(
        topology=topology, size=patch, volume=(fingerprint.shape, fingerprint.spacing_mm)
    )


def _times(numbers: tuple[float, ...]) -> str:
    return "x".join(f"{number:g}" for number in numbers)
