"""The sections of a configuration: every setting, its meaning and the one place of its default."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from unet3d.config.values import (
    AS_TEXT,
    FEW_VOXELS,
    IN_LIST,
    NAMES,
    NUMBER,
    OFF,
    Auto,
    Channels,
    Few,
    FilePath,
    Fold,
    Fraction,
    LabelNames,
    Many,
    Name,
    Normalization,
    Number,
    Offload,
    Recompute,
    Section,
    Shape,
    Spacing,
)
from unet3d.errors import counted
from unet3d.inputs.plain_data import at_most


class Reading(Section):
    """What files of microscopes leave open, or state wrongly. Other formats ignore it."""

    spacing_mm: Spacing | None = None
    """Spacing of the voxels in mm along X, Y, Z, in a pyramid that of its finest level; null: as
    files state. The option --spacing takes it along Z, Y, X."""
    axes: Name | None = None
    """Axes of arrays, one letter each, such as zyx or czyx; null: as files state."""
    time: Number | None = None
    """Point in time, counted from 0; null: the only one."""
    level: Number | None = None
    """Level of pyramids, 0 for the finest; null: the one nearest to near_mm."""
    near_mm: Spacing | None = None
    """Spacing in mm along X, Y, Z to which the nearest level of pyramids is read; null: the finest
    level, and in prediction the one nearest to the network's spacing."""

    def near(self, spacing_mm: Spacing | None) -> Self:
        """Return how a partner on one grid with a volume is read: at the level nearest to it."""
        return self.model_copy(update={"level": None, "near_mm": spacing_mm})


class DataSettings(Section):
    """The cases, and how their spacing and intensities are unified."""

    dataset: FilePath | None = None
    """Folder of the data set, or its dataset.json; null: the phantom data."""
    phantom_shape: Annotated[Shape, FEW_VOXELS] = (64, 64, 64)
    """Number of voxels along X, Y, Z of each of the 20 built-in phantoms; voxels are 1 mm wide."""
    fold: Fold = 0
    """Fold that validates, counted from 0; the others train. none: all cases train, and none
    validates."""
    labels: (
        Annotated[dict[Name, LabelNames], Field(min_length=1), at_most(2**16)] | LabelNames | None
    ) = None
    """Labels to train, by name or by value, such as [liver, tumour]; or labels to merge, such as
    {lesion: [tumour, 3], liver: [1]}. The others become background. null: all labels of the data
    set."""
    num_folds: Annotated[int, Field(ge=2, le=10_000, strict=True)] = 5
    """Number of folds to draw if the data set defines none."""
    spacing_mm: Auto[Literal["median", "native"] | Spacing] = "median"
    """Spacing that cases are resampled to, in mm along X, Y, Z. median: the median of the data set,
    or the 10th percentile across thick slices. Slices are thick if their spacing is more than 3
    times the spacing of the pixels, and each side of a slice has more than 3 times as many pixels
    as there are slices. native: each case keeps its spacing. auto: the spacing of training.init,
    else median."""
    normalization: Normalization = "auto"
    """How intensities are scaled. ct: by the Hounsfield statistics of the data set, within its
    labels. percentiles: likewise by the statistics of all voxels: intensities beyond percentiles
    0.5 and 99.5 of the data set are clipped. z-score: by the mean and standard deviation of each
    case; of nonzero voxels only, if cropping zeros around the image removes a quarter of the volume
    or more. auto: chosen by the name of each channel as in nnU-Net: ct for CT, none for noNorm, a
    range of 0 to 1 for rescale_to_0_1, division by 255 for rgb_to_0_1. For any other name,
    percentiles if all cases are uint8 or uint16 volumes of microscopes (TIFF, OME-Zarr, HDF5, or
    voxels finer than 0.05 mm), else z-score."""
    reading: Reading = Reading()
    cache: FilePath | None = None
    """Folder of prepared cases; null: the user's cache folder, ~/.cache/unet3d."""
    num_workers: Annotated[int, Field(ge=0, le=1024, strict=True)] | Literal["auto"] = "auto"
    """Number of processes that prepare cases, then cut patches, and augment them if there is no
    GPU. 0: the training process does this work. auto: as many as the cores allow, at most 16 to
    prepare cases and 8 to cut patches; with the network on a CPU at most 4 to prepare cases, and
    one per 32 cores to cut patches, so none on most machines."""


MirrorAxis = Literal["x", "y", "z"]


class AugmentationSettings(Section):
    """Random changes of training patches; each probability is per patch.

    The defaults are nnU-Net's. ``patches.augmentation`` chooses among these values, and
    ``patches.augmentation_details`` overrides single values.
    """

    rotation_probability: Fraction = 0.2
    """Probability of a rotation; thick slices are rotated in their plane only."""
    rotation_degrees: Annotated[float, Field(ge=0, le=180), NUMBER] = 30.0
    """Largest angle of a rotation about each axis, in degrees, in both directions."""
    in_plane_rotation_degrees: Annotated[float, Field(ge=0, le=180), NUMBER] = 180.0
    """Largest angle of a rotation in one plane only, for thick slices and single slices."""
    scaling_probability: Fraction = 0.2
    """Probability of a change of size, by a factor of 0.7 to 1.4."""
    noise_probability: Fraction = 0.1
    """Probability of Gaussian noise."""
    blur_probability: Fraction = 0.2
    """Probability of a Gaussian blur; each channel is then blurred with probability 0.5."""
    brightness_probability: Fraction = 0.15
    """Probability that the intensities of each channel are multiplied by a factor."""
    contrast_probability: Fraction = 0.15
    """Probability of a change of contrast: intensities move away from the mean of their channel, or
    towards it."""
    low_resolution_probability: Fraction = 0.25
    """Probability of downsampling and upsampling again; each channel then changes with probability
    0.5. The number of thick slices does not change."""
    inverted_gamma_probability: Fraction = 0.1
    """Probability of a gamma curve over the inverted intensities."""
    gamma_probability: Fraction = 0.3
    """Probability of a gamma curve over the intensities."""
    mirror_axes: Literal["auto"] | Annotated[tuple[MirrorAxis, ...], at_most(3), IN_LIST] = "auto"
    """Axes that are flipped, each with probability 0.5; auto: Y and Z, and X unless the name of a
    label says left or right."""

    @property
    def enabled(self) -> bool:
        """Whether anything is changed at all."""
        return self.mirror_axes != () or any(
            getattr(self, name) > 0 for name in type(self).probabilities()
        )

    @classmethod
    def probabilities(cls) -> tuple[str, ...]:
        """Return the names of the fields that are probabilities."""
        return tuple(name for name in cls.model_fields if name.endswith("_probability"))

    @property
    def known_mirror_axes(self) -> tuple[MirrorAxis, ...]:
        """The axes that are set; for ``auto`` Y and Z, because X depends on the labels."""
        return ("y", "z") if self.mirror_axes == "auto" else self.mirror_axes


AUGMENTATIONS: dict[str, dict[str, Any]] = {
    "none": {**dict.fromkeys(AugmentationSettings.probabilities(), 0.0), "mirror_axes": ()},
    # Without interpolation and filters, which take longest on a CPU.
    "light": {
        f"{name}_probability": 0.0 for name in ("rotation", "scaling", "blur", "low_resolution")
    },
    "nnunet": {},
}
"""For each value of ``patches.augmentation``, the differences from nnU-Net's defaults."""


def _of_augmentation(details: dict[str, Any]) -> dict[str, Any]:
    """Return details of augmentation as plain JSON values; ValidationError if any is invalid."""
    return AugmentationSettings.model_validate(details).model_dump(mode="json", exclude_unset=True)


class PatchSettings(Section):
    """The training patches."""

    size: Annotated[Literal["auto", "whole"] | Shape, FEW_VOXELS] = "auto"
    """Voxels along X, Y, Z; auto: as many as fit into ``patches.memory_gib`` with a batch of two,
    at most the median shape of the data set; whole: the complete case, padded to a size that the
    network can halve."""
    memory_gib: Auto[Annotated[float, Field(ge=0.01, le=1e6), NUMBER]] = 10.0
    """Memory of one GPU, in GiB, that a step may use. If patch and batch are auto, they are planned
    for this memory. If a GPU has less, the plan uses 90 % of the smallest GPU. Patch and batch for
    several GPUs, or for a CPU, are planned as for one GPU. auto: 10, on a CPU 1.1."""
    foreground_fraction: Fraction = 0.33
    """Share of the patches of a batch that are centred on a labelled voxel, at least one patch
    unless 0. The voxel is from a random connected component of a random class."""
    augmentation: Auto[Literal["none", "light", "nnunet"]] = "nnunet"
    """Random changes of each patch. nnunet: all transforms of nnU-Net; light: only mirroring,
    noise, brightness, contrast and gamma; none: no changes; auto: nnunet, on a CPU none."""
    augmentation_details: Annotated[dict[str, Any], AfterValidator(_of_augmentation)] = {}
    """Probabilities, angles and mirror axes that override values of augmentation, by name, such as
    {gamma_probability: 0, mirror_axes: [x]}."""

    @property
    def random_changes(self) -> AugmentationSettings:
        """The random changes to draw for each patch."""
        known = AUGMENTATIONS[self.augmentation]
        return AugmentationSettings.model_validate({**known, **self.augmentation_details})


class ModelSettings(Section):
    """The network."""

    encoder: Literal["plain", "residual"] = "plain"
    """plain: two convolutions a level; residual: residual units, one at full resolution and up to
    six on lower levels."""
    base_channels: Auto[Channels] = 32
    """Channels at level 0; they double at each level, up to 320. auto: 32, on a CPU 8."""
    num_levels: Annotated[int, Field(ge=2, le=8, strict=True)] | Literal["auto"] = "auto"
    """Number of resolutions of the network; auto: as many as possible, from 2 to 6, without halving
    an axis to fewer than 4 voxels."""
    channels: Annotated[tuple[Channels, ...], at_most(1024)] | None = None
    """Channels of each level, instead of base_channels and num_levels; null: these two apply."""
    kernels: Literal["isotropic", "anisotropic"] = "isotropic"
    """isotropic: 3 x 3 x 3 voxels at all levels. anisotropic: one voxel along an axis, such as
    across thick slices, at levels where the spacing of that axis is at least twice the finest
    spacing; three voxels at lower levels."""
    norm: Literal["instance", "group", "batch"] = "instance"
    """How features are normalised: each channel of each sample (instance), groups of channels of
    each sample (group), or each channel over the batch (batch)."""
    deep_supervision: bool = True
    """Whether coarser levels of the decoder have a loss, too."""

    @model_validator(mode="after")
    def _levels_agree(self) -> Self:
        """Refuse channels for a number of levels that a network cannot have."""
        num_levels = 2 if self.channels is None else len(self.channels)
        if not 2 <= num_levels <= 8:
            raise ValueError(f"model.channels names {counted(num_levels, 'level')}; give 2 to 8")
        return self


class TrainingSettings(Section):
    """The optimisation."""

    epochs: Auto[Many] = 250
    """Number of epochs; auto: 250, on a CPU 40."""
    steps_per_epoch: Auto[Many] = 250
    """Steps in an epoch, for any number of cases; cases are drawn with replacement. auto: 250, on a
    CPU 25."""
    batch_size: Few | Literal["auto"] = "auto"
    """Patches in a step, over all replicas; auto: as many as fit into ``patches.memory_gib``, from
    2 to 32 and at most 5 % of the voxels of all cases, but at least one for each micro-batch of
    each replica."""
    micro_batches: Annotated[int, Field(gt=0, le=1024, strict=True)] | Literal["auto"] = "auto"
    """Number of parts of a batch, or of each replica's share of it. They run one after another on
    one device, and as a pipeline over several. auto: the fastest that ``plan --measure`` found,
    else 1."""
    batch_dice: Literal["auto"] | bool = "auto"
    """Whether the Dice of the loss is computed over the batch, so that false positives also count
    in patches without the class. auto: true if a patch has fewer than a quarter of the voxels of
    the median volume. With micro-batches, true needs another forward pass."""
    optimizer: Auto[Literal["sgd", "adamw"]] = "sgd"
    """sgd: stochastic gradient descent with Nesterov momentum 0.99; adamw: AdamW; auto: sgd, on a
    CPU adamw unless the learning rate or the weight decay is set."""
    learning_rate: Auto[Annotated[float, Field(gt=0, le=1e30), NUMBER]] = 0.01
    """Initial learning rate of the polynomial decay (power 0.9); auto: 0.01, or 0.003 for adamw on
    a CPU; with training.init a tenth of it, after a warm-up of at most 250 steps."""
    weight_decay: Annotated[float, Field(ge=0, le=1000), NUMBER] = 1e-3
    """Weight decay: added to the gradients by sgd, decoupled from them by adamw."""
    precision: Literal["auto", "bfloat16", "float16", "float32", "float64"] = "auto"
    """Number type of activations; weights are float32, or float64. auto: bfloat16 if every GPU has
    it in hardware, else float16; without a GPU, bfloat16 if one measurement shows that the CPU
    convolves a quarter faster in it, else float32. In float32, convolutions on a GPU use TF32,
    unless NVIDIA_TF32_OVERRIDE=0 is in the environment."""
    validate_every: Many = 10
    """Epochs between validations; the last epoch is always validated."""
    save_every_seconds: Annotated[float, Field(ge=0, le=1e9), NUMBER] = 60.0
    """Seconds between writes of the latest checkpoint, each at the end of a step; each validation
    also writes a checkpoint."""
    seed: Annotated[int, Field(ge=0, lt=2**64, strict=True)] = 0
    """Seed of every random choice: folds, weights, patches, augmentation."""
    init: FilePath | None = None
    """Checkpoint whose network and weights a new run begins with; null: random weights."""

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches that is set, or 1."""
        return 1 if self.micro_batches == "auto" else self.micro_batches

    @property
    def num_patches(self) -> int:
        """The number of patches in a step; ValueError while it is still to be planned."""
        if self.batch_size == "auto":
            raise ValueError("training.batch_size is auto: it has not been planned yet")
        return self.batch_size


class ParallelSettings(Section):
    """How devices share the network or the volume."""

    mode: Literal["auto", "none", "data", "spatial", "model"] = "auto"
    """none: one device; data: a replica on each device; spatial: a slab of each volume on each
    device; model: some layers of the network on each device; auto: none for one device, else the
    fastest that fits."""
    devices: Annotated[tuple[Name, ...], Field(min_length=1), at_most(1024), NAMES] | None = None
    """Devices, such as 0,1 or cpu,0 or cuda:0. null: GPU 0 for the modes auto and none, all GPUs
    for data and spatial, two GPUs per replica for model; without a GPU, cpu. Under torchrun: the
    devices of each machine, divided among its ranks."""
    replicas: Annotated[int, Field(gt=0, le=1024, strict=True)] = 1
    """Modes model and spatial: number of groups into which the devices are divided in order; each
    group computes its own share of the batch."""
    data_parallel: Annotated[bool, Field(strict=True)] | Annotated[Name, AS_TEXT] = False
    """Mode data: use nn.DataParallel, with a thread for each device instead of a process. It is
    slower, and needs more memory on the device that gathers logits: the first, or the named one."""
    timeout_seconds: Annotated[float, Field(gt=0, le=1e7), NUMBER] = 600.0
    """Seconds without a sign of life after which a rank counts as hanging, and training ends."""
    max_restarts: Annotated[int, Field(ge=0, le=10**6, strict=True)] = 0
    """How often all ranks restart from the latest checkpoint when one of them dies. Under torchrun,
    use torchrun's --max-restarts."""
    cuts: (
        Annotated[tuple[Few, ...], at_most(1024), IN_LIST]
        | Literal["auto", "encoder-decoder", "time"]
    ) = "auto"
    """Mode model: where the network is cut into stages in training. time: into stages with equal
    predicted times; encoder-decoder: with two devices, between encoder and decoder; with more
    devices, into stages of about equal work; auto: the fastest cut that ``plan --measure`` found,
    else encoder-decoder. A list such as 4,12 has the index of the first block of each stage after
    the first."""

    @property
    def cut_blocks(self) -> tuple[int, ...] | None:
        """The blocks at which the network is cut; None: the cut is still to be chosen."""
        return None if isinstance(self.cuts, str) else self.cuts


class MemorySettings(Section):
    """What is kept for the backward pass, and where."""

    recompute: Annotated[Recompute, OFF] = "norm"
    """What backward recomputes instead of keeping it in memory. norm: normalised features; level:
    also the encoder, level by level, which needs the least memory but repeats its forward pass;
    off: nothing."""
    offload: Offload = "none"
    """skips: keep the features of skip connections in host memory while they are not used; a step
    then takes about twice as long on an H200, and recompute=level saves more memory in less time.
    none: everything stays on the GPU."""


class InferenceSettings(Section):
    """Prediction, also in validation."""

    window: Annotated[Literal["auto", "whole"] | Shape, FEW_VOXELS] = "auto"
    """Voxels along X, Y, Z of a window; whole: the whole volume; auto: the training patch, or the
    whole volume for a network trained on whole volumes."""
    overlap: Annotated[float, Field(ge=0, le=0.95), NUMBER] = 0.5
    """Overlap of neighbouring windows, as a share of the window."""
    batch_size: Few | Literal["auto"] = "auto"
    """Windows in one forward pass of each replica; auto: up to 2^20 voxels on a CPU, and up to 2^23
    on a GPU that has the memory, but one window on a GPU that is training."""
    precision: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number type of activations, also in the validation at the end of a training run. auto: the
    precision of training if that was float32 or float16 (float32 instead of float16 without GPUs),
    else chosen like auto in training.precision. Weights in float64 stay float64."""
    tta: bool = False
    """Test-time augmentation: whether logits are averaged over mirror images of each window, with
    all combinations of the axes that were mirrored in training: up to 8 times the work."""
    averaging: Literal["probabilities", "logits"] = "probabilities"
    """What an ensemble averages: class probabilities, or logits, as nnU-Net does for the folds of a
    model. All networks of an ensemble must have the same value."""
    postprocessing: bool = True
    """Whether to keep only the largest connected component where this raises the validation Dice:
    training tests it at its end, for each label and for all labels together, and prediction applies
    the result."""
