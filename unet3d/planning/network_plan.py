"""Plans patch, batch and network from a configuration and the shapes of a data set."""

import itertools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch

from unet3d.config import Config, Shape, Spacing
from unet3d.datasets.dataset import load_dataset
from unet3d.datasets.phantom import LABEL_NAMES, NUM_CASES, SPACING_MM
from unet3d.errors import counted
from unet3d.images.files import times
from unet3d.model import Regions, Topology, UNet3d, plan_topology
from unet3d.model.topology import topology_like
from unet3d.model.unet import refuse_beyond_memory
from unet3d.parallel import Layout, ParallelDims
from unet3d.parallel.partition import check_cuts, check_num_stages
from unet3d.parallel.spatial.division import SlabRule
from unet3d.patches.augment.device import DeviceAugmentation
from unet3d.patches.patches import padded_shape
from unet3d.planning.memory_estimate import GIB, Step, predict_memory
from unet3d.planning.step_size import MIN_BATCH, plan_batch, plan_patch
from unet3d.preparation.preprocess import Fingerprint, plan_preprocessing

PREPARED_BYTES = 2
"""Bytes per voxel of a prepared image, if none exists yet: float16."""

REFERENCE = ParallelDims(mode="none", replicas=((torch.device("cuda", 0),),), num_replicas=1)
"""The GPU that patch and batch are planned for; it need not exist."""

BATCH_DICE_SHARE = 0.25
"""Share of the median volume below which a patch often lacks a class; nnU-Net then uses batch Dice,
too (Isensee et al., Nature Methods 18, 2021)."""


@dataclass(frozen=True, kw_only=True)
class NetworkPlan:
    """A network, its patch and its batch."""

    topology: Topology
    sizes: frozenset[Shape]
    """Voxels of a patch along X, Y, Z, multiples of the total stride; or the sizes of all whole
    volumes, padded to such multiples."""
    volume: tuple[Shape, Spacing]
    """Shape and spacing of the median prepared volume, or of the largest if training on whole
    volumes."""
    batch_size: int
    """Patches in a step, of all replicas together."""
    regions: Regions
    """Regions segmented instead of classes; see :class:`~unet3d.model.loss.SegmentationLoss`."""
    limits: str | None = field(default=None, compare=False)
    """One line on what limits patch and batch; None: the settings name both."""

    @property
    def size(self) -> Shape:
        """Voxels of a patch, or of the largest volume."""
        return self.size_in(1)

    def size_in(self, num_patches: int) -> Shape:
        """Return the size of patches in the largest batch of a replica; see :func:`batch_shape`."""
        return batch_shape(self.sizes, num_patches)

    def settled(self, config: Config) -> Config:
        """Return settings with the values that follow from the data."""
        is_whole, joins = config.patches.size == "whole", config.training.batch_dice
        if joins == "auto":
            joins = math.prod(self.size) < BATCH_DICE_SHARE * math.prod(self.volume[0])
        return config.with_values(
            {
                "patches.size": "whole" if is_whole else self.size,
                "training.batch_size": self.batch_size,
                "training.batch_dice": joins,
            }
        )

    def step(self, config: Config, dims: ParallelDims, precision: str) -> Step:
        """Return the step of the replica with the largest share of the batch."""
        layout = Layout.of(config, dims, precision)
        batch_size = dims.share_of(self.batch_size)
        augmentation = DeviceAugmentation.on(
            layout.devices[0],
            config.patches.random_changes,
            (self.volume,),
            PREPARED_BYTES,
            self.topology.in_channels,
            self.topology.num_classes,
        )
        return Step(
            topology=self.topology,
            regions=self.regions,
            layout=layout,
            size=self.size_in(batch_size),
            batch_size=batch_size,
            settings=config.training,
            precision=precision,
            augmentation=augmentation,
        )


def plan_without_data(
    config: Config, num_replicas: int = 1, architecture: Topology | None = None
) -> NetworkPlan:
    """Choose patch, batch and network without preparing a case.

    Only the headers of a data set are read; the first time, voxels are read, too, to find nonzero
    boxes. Without a data set, one channel is assumed, and the spacing of the settings or 1 mm. Then
    the classes are the phantoms', or three with a fixed patch size. ``num_replicas`` share a batch;
    if the batch size is open, there is a patch for each micro-batch of each replica. An
    ``architecture`` of initial weights is used unchanged.
    """
    data, num_channels = config.data, 1
    regions: Regions = ()
    if data.dataset is not None:
        dataset = load_dataset(data.dataset, data.reading)
        without_statistics = data.model_copy(update={"normalization": "none"})
        preprocessing, fingerprint = plan_preprocessing(dataset, without_statistics)
        num_channels, num_outputs = len(dataset.channel_names), preprocessing.num_outputs
        regions = preprocessing.region_classes
    else:
        shape = data.phantom_shape
        fingerprint = Fingerprint(
            spacing_mm=SPACING_MM if isinstance(data.spacing_mm, str) else data.spacing_mm,
            shape=shape,
            shapes=frozenset([shape]),
            num_cases=NUM_CASES,
        )
        num_outputs = len(LABEL_NAMES) if isinstance(config.patches.size, str) else 3
    return plan_fingerprint(
        config, fingerprint, num_channels, num_outputs, num_replicas, regions, architecture
    )


def check_stages(config: Config, network: NetworkPlan, num_stages: int) -> None:
    """Refuse cuts that the network does not have, and more stages than it has blocks."""
    cuts = config.parallel.cut_blocks
    if num_stages == 1 and cuts is None:
        return
    with torch.device("meta"):
        model = UNet3d(network.topology)
    check_num_stages(model, num_stages)
    if cuts is not None:
        check_cuts(cuts, len(model.blocks()), num_stages)


def check_shards(network: NetworkPlan, num_shards: int, windows: Collection[Shape] = ()) -> None:
    """Refuse more shards than the smallest volume, or window of validation, has planes for."""
    rule, stride = (
        SlabRule(topology=network.topology, num_shards=num_shards),
        network.topology.total_stride,
    )
    for size in (*network.sizes, *(padded_shape(window, stride) for window in windows)):
        rule.divide(size)


def plan_notes(config: Config, network: NetworkPlan) -> list[str]:
    """Return lines on the choice of patch and batch, and on changes of their settings."""
    asked, notes = config.patches.size, [] if network.limits is None else [network.limits]
    if not isinstance(asked, str) and asked != network.size:
        stride = times(network.topology.total_stride)
        notes.insert(
            0,
            f"patches.size {times(asked)} is rounded up to {times(network.size)}, multiples of "
            f"{stride} that the network can halve",
        )
    return notes


def batch_shape(sizes: Collection[Shape], num_patches: int) -> Shape:
    """Return the shape of a patch in the largest batch that patches of these sizes can form.

    If sizes differ, as of whole volumes, the patches of a batch are padded to their largest extent
    along each axis.
    """

    def padded(group: Iterable[Shape]) -> Shape:
        x, y, z = (max(of_axis) for of_axis in zip(*group, strict=True))
        return x, y, z

    if num_patches >= 3:  # one may be the largest along X, one along Y, one along Z
        return padded(sizes)
    # Of thousands of volumes, all but a few fit within another one.
    largest: list[Shape] = []
    for size in sorted(set(sizes), key=math.prod, reverse=True):
        if all(padded([size, other]) != other for other in largest):
            largest.append(size)
    groups = itertools.combinations_with_replacement(largest, num_patches)
    return max(map(padded, groups), key=math.prod)


def plan_fingerprint(
    config: Config,
    fingerprint: Fingerprint,
    num_channels: int,
    num_outputs: int,
    num_replicas: int = 1,
    regions: Regions = (),
    architecture: Topology | None = None,
) -> NetworkPlan:
    """Return the network for data with these properties, with ``num_outputs`` logits a voxel.

    ``auto`` is planned for one GPU, in bfloat16 unless the settings name a precision, so a plan
    does not depend on the machine.
    """
    patches, training = config.patches, config.training
    shape, spacing_mm = fingerprint.shape, fingerprint.spacing_mm
    if patches.size == "whole":
        shape = max(fingerprint.shapes, key=math.prod)
    allowed_bytes = int(patches.memory_gib * GIB)

    @cache
    def plan(size: Shape) -> Topology:
        if architecture is not None:
            deep = config.model.deep_supervision
            return topology_like(architecture, size, num_channels, num_outputs, deep)
        return plan_topology(config.model, size, spacing_mm, num_channels, num_outputs)

    made = partial(NetworkPlan, volume=(shape, spacing_mm), regions=regions)

    @cache
    def needed_bytes(topology: Topology, size: Shape, batch_size: int) -> int:
        # The prediction would not notice a lack of host memory: it never touches the weights.
        refuse_beyond_memory(topology)
        precision = "bfloat16" if training.precision == "auto" else training.precision
        network = made(topology=topology, sizes=frozenset([size]), batch_size=batch_size)
        step = network.step(config, REFERENCE, precision)
        # The additional memory of captured graphs changes no patch.
        layout = replace(step.layout, cuts=None, captures=False)
        (needed,) = predict_memory(replace(step, layout=layout)).needed_bytes().values()
        return needed

    def load(topology: Topology, size: Shape, batch_size: int) -> float:
        return needed_bytes(topology, size, batch_size) / allowed_bytes

    patch_limit, batch_limit, least = "as set", "as set", 1
    if patches.size == "auto":
        asked = training.batch_size
        num_patches = max(MIN_BATCH, training.num_micro_batches) if asked == "auto" else asked
        size, patch_limit = plan_patch(
            lambda size: load(plan(size), size, num_patches), plan, shape, spacing_mm
        )
        unpadded, least = frozenset([size]), MIN_BATCH
    elif patches.size == "whole":
        size, unpadded = fingerprint.shape, fingerprint.shapes
    else:
        size, unpadded = patches.size, frozenset([patches.size])
    topology = plan(size)
    sizes = frozenset(padded_shape(one, topology.total_stride) for one in unpadded)
    if training.batch_size == "auto":
        planned, batch_limit = plan_batch(
            lambda count: load(topology, batch_shape(sizes, count), count),
            batch_shape(sizes, 1),
            fingerprint.num_voxels,
            max(least, training.num_micro_batches),
        )
        batch_size = max(planned, num_replicas * training.num_micro_batches)
        if batch_size > planned:
            batch_limit = "a patch for each micro-batch of each replica"
    else:
        planned = batch_size = training.batch_size
    network = made(topology=topology, sizes=sizes, batch_size=batch_size)
    if patches.size != "auto" and training.batch_size != "auto":
        return network
    needed = needed_bytes(topology, batch_shape(sizes, planned), planned)
    of_fewer = f" of {counted(planned, 'patch')}" if planned < batch_size else ""
    limits = (
        f"patches of {times(network.size)} voxels ({patch_limit}), {batch_size} in a batch "
        f"({batch_limit}); predicted memory{of_fewer}: {needed / GIB:.1f} of "
        f"{allowed_bytes / GIB:.4g} GiB (patches.memory_gib)"
    )
    return replace(network, limits=limits)
