"""From a configuration and the shapes of a data set to patch size and network."""

import itertools
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import torch

from unet3d.config import AugmentationSettings, Config, Shape, Spacing
from unet3d.errors import ConfigError
from unet3d.model import Regions, Topology, UNet3d, plan_topology
from unet3d.parallel.partition import check_cuts, check_num_stages
from unet3d.parallel.spatial.division import SlabRule
from unet3d.volumes.augment import DeviceAugmentation
from unet3d.volumes.dataset import Dataset, load_dataset
from unet3d.volumes.files import times
from unet3d.volumes.patches import padded_shape
from unet3d.volumes.phantom_anatomy import LABEL_NAMES
from unet3d.volumes.preprocess import Fingerprint, plan_preprocessing
from unet3d.volumes.transform import Preprocessing

PREPARED_BYTES = 2
"""What a voxel of a prepared image takes where none is there to ask: float16."""

BATCH_DICE_SHARE = 0.25
"""Share of the median volume's voxels below which a patch is a part of it that may well lack a
class; nnU-Net then takes its batch Dice too (Isensee et al., Nature Methods 18, 2021)."""


@dataclass(frozen=True, kw_only=True)
class NetworkPlan:
    """A network, and the size that it is trained on."""

    topology: Topology
    """The network."""
    sizes: frozenset[Shape]
    """Voxels of a patch along X, Y, Z, multiples of the total stride; or all sizes that whole
    volumes have, padded to such."""
    volume: tuple[Shape, Spacing]
    """Shape and spacing of a volume, once prepared: of the median one, or the largest where whole
    ones are trained on."""
    regions: Regions = ()
    """What it segments instead of classes; see :class:`~unet3d.model.loss.SegmentationLoss`."""

    @property
    def size(self) -> Shape:
        """Voxels of a patch, or of the largest volume."""
        return self.size_in(1)

    def size_in(self, num_patches: int) -> Shape:
        """Return the size of the patches of the largest batch; see :func:`batch_shape`.

        Args:
            num_patches: Patches in a batch of one replica.
        """
        return batch_shape(self.sizes, num_patches)

    def settled(self, config: Config) -> Config:
        """Return settings with what follows from the sizes written out.

        Args:
            config: ``training.batch_dice`` may be ``auto``.
        """
        if config.training.batch_dice != "auto":
            return config
        joins = math.prod(self.size) < BATCH_DICE_SHARE * math.prod(self.volume[0])
        training = config.training.model_copy(update={"batch_dice": joins})
        return config.model_copy(update={"training": training})

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


def plan_without_data(config: Config) -> NetworkPlan:
    """Choose patch size and network without preparing a case.

    Of a data set headers are read, and unless nothing is cropped, once, where images are not zero.
    Where only a shape is given, there are one channel, three classes, and the spacing of the
    settings, else 1 mm.

    Args:
        config: The configuration as the user wrote it.

    Raises:
        DatasetError: The data set cannot be understood.
        VolumeError: A header or an image cannot be read.
        CacheError: The cache cannot be written.
        ConfigError: The settings do not suit the data.
    """
    data = config.data
    if data.dataset is not None:
        return network_of(load_dataset(data.dataset), config)
    spacing = data.phantom.spacing_mm if isinstance(data.spacing_mm, str) else data.spacing_mm
    shape = data.phantom.shape
    fingerprint = Fingerprint(
        spacing_mm=spacing, shape=shape, shapes=frozenset([shape]), original_spacing_mm=spacing
    )
    num_classes = len(LABEL_NAMES) if isinstance(config.patches.size, str) else 3
    return _plan_network(config, fingerprint, 1, num_classes)


def network_of(
    dataset: Dataset, config: Config, planned: tuple[Preprocessing, Fingerprint] | None = None
) -> NetworkPlan:
    """Return the network for a data set.

    Args:
        dataset: Its channels and labels.
        config: The settings.
        planned: How its images are prepared; None: it is looked at.
    """
    if planned is None:
        # Statistics of intensities are not needed here.
        without = config.data.model_copy(update={"normalization": "none"})
        planned = plan_preprocessing(dataset, without)
    preprocessing, fingerprint = planned
    num_channels, num_outputs = len(dataset.channel_names), preprocessing.num_outputs
    network = _plan_network(config, fingerprint, num_channels, num_outputs)
    return replace(network, regions=preprocessing.region_classes)


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


def check_shards(network: NetworkPlan, num_shards: int) -> None:
    """Refuse more shards than the smallest volume has planes for.

    Args:
        network: Its sizes.
        num_shards: How many devices share each volume.

    Raises:
        DeviceError: A patch or volume has too few planes.
    """
    rule = SlabRule(topology=network.topology, num_shards=num_shards)
    for size in network.sizes:
        rule.divide(size)


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
        f"patches.size {times(asked)} is rounded up to {times(size)}, multiples of "
        f"{times(network.topology.total_stride)} that the network can halve"
    )


def batch_shape(sizes: Collection[Shape], num_patches: int) -> Shape:
    """Return the voxels of each patch in the largest batch, where whole volumes differ in size.

    All patches of a batch are padded to the largest of them, along each axis.

    Args:
        sizes: Sizes that patches have along X, Y, Z.
        num_patches: Patches in a batch.
    """

    def padded(group: Iterable[Shape]) -> Shape:
        x, y, z = (max(of_axis) for of_axis in zip(*group, strict=True))
        return x, y, z

    if num_patches >= 3:  # one may be the largest along X, one along Y, one along Z
        return padded(sizes)
    # Of thousands of volumes few are not within another one.
    largest: list[Shape] = []
    for size in sorted(set(sizes), key=math.prod, reverse=True):
        if all(padded([size, other]) != other for other in largest):
            largest.append(size)
    groups = itertools.combinations_with_replacement(largest, num_patches)
    return max(map(padded, groups), key=math.prod)


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


def _plan_network(
    config: Config, fingerprint: Fingerprint, num_channels: int, num_classes: int
) -> NetworkPlan:
    def plan(size: Shape) -> Topology:
        return plan_topology(config.model, size, fingerprint.spacing_mm, num_channels, num_classes)

    if config.patches.size == "auto":
        return _plan_patch(plan, fingerprint, config.patches.max_voxels)
    if config.patches.size == "whole":
        topology = plan(fingerprint.shape)
        sizes, volume = fingerprint.shapes, max(fingerprint.shapes, key=math.prod)
    else:
        topology = plan(config.patches.size)
        sizes, volume = frozenset([config.patches.size]), fingerprint.shape
    return NetworkPlan(
        topology=topology,
        sizes=frozenset(padded_shape(size, topology.total_stride) for size in sizes),
        volume=(volume, fingerprint.spacing_mm),
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
        topology=topology,
        sizes=frozenset([patch]),
        volume=(fingerprint.shape, fingerprint.spacing_mm),
    )
