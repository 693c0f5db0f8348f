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
    Offload,
    Recompute,
    Section,
    Shape,
    Spacing,
)
from unet3d.inputs.plain_data import at_most


class DataSettings(Section):
    """Which cases, and how they are brought to one spacing and one range of intensities."""

    dataset: FilePath | None = None
    """Folder of the data set, or its dataset.json; null: the phantom data."""
    phantom_shape: Annotated[Shape, FEW_VOXELS] = (64, 64, 64)
    """Voxels of 1 mm along X, Y, Z of each of the 20 built-in phantoms."""
    fold: Fold = 0
    """Which fold validates, counted from 0; the others are trained on. none: every case is trained
    on, and none validates."""
    labels: (
        Annotated[dict[Name, LabelNames], Field(min_length=1), at_most(2**16)] | LabelNames | None
    ) = None
    """Which labels are trained, by name or by value, such as [liver, tumour]; or what they are
    merged to, such as {lesion: [tumour, 3], liver: [1]}. The others become background. null: all,
    as the data set has them."""
    num_folds: Annotated[int, Field(ge=2, le=10_000, strict=True)] = 5
    """How many folds are drawn, where the data set defines none."""
    spacing_mm: Auto[Literal["median", "native"] | Spacing] = "median"
    """Spacing that cases are resampled to. auto: that of training.init, else median. median: the
    data set's, but across few thick slices the 10th percentile, where both the spacing there and
    the number of voxels within a slice are more than 3 times the other; native: each case's own; or
    three numbers along X, Y, Z in mm."""
    normalization: Literal["auto", "ct", "z-score", "none"] = "auto"
    """How intensities are scaled. ct: by the data set's Hounsfield statistics; z-score: by the mean
    and deviation of each case, inside of the zeros around it where they are a quarter of the volume
    or more; auto: by the channel's name as in nnU-Net: CT, noNorm,
    rescale_to_0_1 (0 ... 1), rgb_to_0_1 (255 becomes 1), else z-score."""
    cache: FilePath | None = None
    """Folder of the prepared arrays; null: the user's cache folder, ~/.cache/unet3d."""
    num_workers: Annotated[int, Field(ge=0, le=1024, strict=True)] | Literal["auto"] = "auto"
    """Processes that prepare cases, then cut patches, and augment them where no GPU does; 0: in the
    training process; auto: as many as the cores allow, at most 16, to cut for a GPU 8; to cut
    beside a network on a CPU one for 32 cores, so none on most."""


MirrorAxis = Literal["x", "y", "z"]


class AugmentationSettings(Section):
    """Random changes to each training patch; each probability is that of a patch being changed.

    The defaults are nnU-Net's. They are no settings of their own: ``patches.augmentation`` chooses
    among them, and ``patches.augmentation_details`` may name any of them.
    """

    rotation_probability: Fraction = 0.2
    """Probability of a rotation; thick slices stay in their plane."""
    rotation_degrees: Annotated[float, Field(ge=0, le=180), NUMBER] = 30.0
    """Largest angle of a rotation about each axis, in degrees, in both directions."""
    in_plane_rotation_degrees: Annotated[float, Field(ge=0, le=180), NUMBER] = 180.0
    """The same where a patch is rotated in one plane only: that of thick slices, or of a slice."""
    scaling_probability: Fraction = 0.2
    """Probability of a change of size, by a factor of 0.7 to 1.4."""
    noise_probability: Fraction = 0.1
    """Probability of Gaussian noise."""
    blur_probability: Fraction = 0.2
    """Probability of a Gaussian blur; each channel then has it one time in two."""
    brightness_probability: Fraction = 0.15
    """Probability that intensities are multiplied by one factor for each channel."""
    contrast_probability: Fraction = 0.15
    """Probability that intensities move away from the mean of their channel, or towards it."""
    low_resolution_probability: Fraction = 0.25
    """Probability of fewer, larger voxels that are enlarged again; each channel then has them one
    time in two. Thick slices keep their number."""
    inverted_gamma_probability: Fraction = 0.1
    """Probability of a gamma curve over the inverted intensities."""
    gamma_probability: Fraction = 0.3
    """Probability of a gamma curve over the intensities."""
    mirror_axes: Literal["auto"] | Annotated[tuple[MirrorAxis, ...], at_most(3), IN_LIST] = "auto"
    """Axes that may be flipped, each one time in two; auto: Y and Z, and X where no label is told
    by its name to be on the left or on the right."""

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
        """The axes that are set, or Y and Z where the labels decide and are not known."""
        return ("y", "z") if self.mirror_axes == "auto" else self.mirror_axes


AUGMENTATIONS: dict[str, dict[str, Any]] = {
    "none": {**dict.fromkeys(AugmentationSettings.probabilities(), 0.0), "mirror_axes": ()},
    # Without what interpolates a patch, or filters it, which takes a CPU longest.
    "light": {
        f"{name}_probability": 0.0 for name in ("rotation", "scaling", "blur", "low_resolution")
    },
    "nnunet": {},
}
"""Of each value of ``patches.augmentation``, what differs from nnU-Net's."""


def _of_augmentation(details: dict[str, Any]) -> dict[str, Any]:
    """Return details of augmentation as JSON has them, or refuse them."""
    return AugmentationSettings.model_validate(details).model_dump(mode="json", exclude_unset=True)


class PatchSettings(Section):
    """The training crops."""

    size: Annotated[Literal["auto", "whole"] | Shape, FEW_VOXELS] = "auto"
    """Voxels along X, Y, Z; auto: as many as fit into ``patches.memory_gib`` with a batch of two,
    at most the data set's median shape; whole: each case as it is, padded to what the network can
    halve."""
    memory_gib: Auto[Annotated[float, Field(ge=0.01, le=1e6), NUMBER]] = 10.0
    """Memory in GiB that a step may take of one GPU, which patch and batch are planned to where
    they are auto. Where GPUs are trained on that have less, it is what the smallest has, less 10 %;
    a network on several GPUs, or on a CPU, is planned as for one. auto: 10, on a CPU 1.1."""
    foreground_fraction: Fraction = 0.33
    """Share of each batch, at least one patch where it is not 0, that is centred on a labelled
    voxel: of a random class, of a random one of its connected components."""
    augmentation: Auto[Literal["none", "light", "nnunet"]] = "nnunet"
    """Random changes to each patch. nnunet: those of nnU-Net's training; light: of these mirroring,
    noise, brightness, contrast and gamma; none: patches stay as they are; auto: nnunet, on a CPU
    none."""
    augmentation_details: Annotated[dict[str, Any], AfterValidator(_of_augmentation)] = {}
    """Probabilities, angles and mirror axes that differ from these, by name."""

    @property
    def random_changes(self) -> AugmentationSettings:
        """What is drawn for each patch."""
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
    """Resolutions of the network; auto: until an axis would fall below 4 voxels, at most 6."""
    channels: Annotated[tuple[Channels, ...], at_most(1024)] | None = None
    """Channels of each level, instead of the two settings above; null: by those."""
    kernels: Literal["isotropic", "anisotropic"] = "isotropic"
    """isotropic: 3 x 3 x 3 voxels; anisotropic: one voxel along an axis while its spacing is 2 or
    more times the finest, as across thick slices, and three below."""
    norm: Literal["instance", "group", "batch"] = "instance"
    """What intermediate features are normalised over: each channel of each sample (instance),
    groups of channels of each sample, or each channel of the batch."""
    deep_supervision: bool = True
    """Whether coarser levels of the decoder have a loss of their own too."""

    @model_validator(mode="after")
    def _levels_agree(self) -> Self:
        """Refuse channels of another number of levels than is named, or than a network has."""
        num_levels = 2 if self.channels is None else len(self.channels)
        if not 2 <= num_levels <= 8:
            raise ValueError(f"model.channels names {num_levels} level(s); give 2 to 8")
        return self


class TrainingSettings(Section):
    """The optimisation."""

    epochs: Auto[Many] = 250
    """Number of epochs; auto: 250, on a CPU 40."""
    steps_per_epoch: Auto[Many] = 250
    """Steps in an epoch, whatever the number of cases, which are drawn with replacement; auto: 250,
    on a CPU 25."""
    batch_size: Few | Literal["auto"] = "auto"
    """Patches in a step, of all replicas together; auto: as many as fit into
    ``patches.memory_gib``, from 2 to 32 and at most 5 % of the voxels of all cases, and one for
    each micro-batch of each replica."""
    micro_batches: Annotated[int, Field(gt=0, le=1024, strict=True)] | Literal["auto"] = "auto"
    """Portions of a batch, or of each replica's share: one after another on one device, pipelined
    over several; auto: as ``plan --measure`` found best, else 1."""
    batch_dice: Literal["auto"] | bool = "auto"
    """Whether the Dice of the loss is that of the batch as one volume, so that a false positive
    also costs something in a patch without the class. auto: where a patch has fewer than a quarter
    of the voxels of the median volume. With micro-batches it takes a forward pass more."""
    optimizer: Auto[Literal["sgd", "adamw"]] = "sgd"
    """sgd: stochastic gradient descent with Nesterov momentum 0.99; adamw: AdamW; auto: sgd, on a
    CPU adamw unless the learning rate or the weight decay is set."""
    learning_rate: Auto[Annotated[float, Field(gt=0, le=1e30), NUMBER]] = 0.01
    """Initial learning rate of the polynomial decay (power 0.9); auto: 0.01, where a CPU takes
    adamw 0.003, and a tenth of these with training.init, after a rise over 250 steps."""
    weight_decay: Annotated[float, Field(ge=0, le=1000), NUMBER] = 1e-3
    """Weight decay: added to the gradients by sgd, decoupled from them by adamw."""
    precision: Literal["auto", "bfloat16", "float16", "float32", "float64"] = "auto"
    """Number format that activations are computed in; weights stay float32, or float64. auto:
    bfloat16 where every GPU has it in hardware, else float16; without a GPU, bfloat16 where the CPU
    convolves a quarter faster in it, which is measured once, else float32. In float32 a GPU's
    convolutions use TF32, unless NVIDIA_TF32_OVERRIDE=0 is in the environment."""
    validate_every: Many = 10
    """Epochs between validations; the last epoch is always validated."""
    save_every_seconds: Annotated[float, Field(ge=0, le=1e9), NUMBER] = 60.0
    """Largest age of the latest checkpoint, in seconds (and one step); each validation writes one
    too."""
    seed: Annotated[int, Field(ge=0, lt=2**64, strict=True)] = 0
    """Seed of every random choice: folds, weights, patches, augmentation."""
    init: FilePath | None = None
    """Checkpoint whose weights, and network, a new run begins with; null: random weights."""

    @property
    def num_micro_batches(self) -> int:
        """The number that is set, or 1 if none is set."""
        return 1 if self.micro_batches == "auto" else self.micro_batches

    @property
    def num_patches(self) -> int:
        """The number of patches in a step; ValueError while it is still to be planned."""
        if self.batch_size == "auto":
            raise ValueError("training.batch_size is auto: it has not been planned yet")
        return self.batch_size


class ParallelSettings(Section):
    """How the network is spread over devices."""

    mode: Literal["auto", "none", "data", "spatial", "model"] = "auto"
    """none: one device; data: a replica on each device; spatial: each volume in slabs over them;
    model: the layers of one network over them; auto: none on one device, else the fastest that
    fits."""
    devices: Annotated[tuple[Name, ...], Field(min_length=1), at_most(1024), NAMES] | None = None
    """Devices, such as 0,1 or cpu,0 or cuda:0; null: the first GPUs that the mode needs, or cpu.
    Under torchrun: those of each machine, divided over its ranks."""
    replicas: Annotated[int, Field(gt=0, le=1024, strict=True)] = 1
    """Modes model and spatial: groups of devices with a network each, into which the devices are
    divided in their order."""
    data_parallel: Annotated[bool, Field(strict=True)] | Annotated[Name, AS_TEXT] = False
    """Mode data: nn.DataParallel, with a thread for each device instead of a process. It is slower,
    and takes more of the device where logits are gathered: the first, or the one that is named."""
    timeout_seconds: Annotated[float, Field(gt=0, le=1e7), NUMBER] = 600.0
    """Seconds of silence after which a rank counts as hanging, and training ends."""
    max_restarts: Annotated[int, Field(ge=0, le=10**6, strict=True)] = 0
    """How often the ranks are started again, from the latest checkpoint, when one of them dies.
    Under torchrun its own --max-restarts counts."""
    cuts: (
        Annotated[tuple[Few, ...], at_most(1024), IN_LIST]
        | Literal["auto", "encoder-decoder", "time"]
    ) = "auto"
    """Mode model: where the network is cut in training. time: so that the stages take equal time,
    as predicted; encoder-decoder: between the two for two devices, about equal work for more; auto:
    the cut that ``plan --measure`` found best, else encoder-decoder; or the index of the block that
    each further stage begins with, such as 4,12."""

    @property
    def cut_blocks(self) -> tuple[int, ...] | None:
        """The blocks that are named; None: the cut is still to be chosen."""
        return None if isinstance(self.cuts, str) else self.cuts


class MemorySettings(Section):
    """What is kept for backward, and where."""

    recompute: Annotated[Recompute, OFF] = "norm"
    """What backward recomputes instead of keeping it. norm: normalised features; level: also the
    encoder, one level after the other, which takes the least memory and the time of its forward
    pass; off: nothing, all is kept."""
    offload: Offload = "none"
    """skips: GPUs offload what the encoder hands to the decoder to host memory while it is not
    used. A step takes about twice as long on an H200; recompute=level saves more memory in less
    time. none: everything stays on the GPU."""


class InferenceSettings(Section):
    """Prediction, also in validation."""

    window: Annotated[Literal["auto", "whole"] | Shape, FEW_VOXELS] = "auto"
    """Voxels along X, Y, Z of a window; whole: the whole volume; auto: the training patch, or the
    whole volume for a network trained on whole volumes."""
    overlap: Annotated[float, Field(ge=0, le=0.95), NUMBER] = 0.5
    """Share of a window that its neighbour covers again."""
    batch_size: Few | Literal["auto"] = "auto"
    """Windows in one forward pass, of each replica; auto: as many as 2^23 voxels hold on a GPU, if
    it has the memory (one while a training validates), and 2^20 on a CPU."""
    precision: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format that is computed in, also by the validation that ends a training; auto: that of
    the training if it was float32 or float16 (in place of float16 without GPUs float32), else as
    training.precision says of auto. Weights in float64 stay there."""
    tta: bool = False
    """Whether each window is also predicted mirrored, over all combinations of the axes along which
    patches were mirrored in training, and the logits are averaged: up to 8 times the work."""
    averaging: Literal["probabilities", "logits"] = "probabilities"
    """What of several networks is averaged, which must agree on it: the probabilities of each
    class, or logits, as nnU-Net does with the folds of a model."""
    postprocessing: bool = True
    """Whether a training ends with the choice of labels of which only the largest component is kept
    (those where that raises Dice in validation), and predictions keep only these."""
