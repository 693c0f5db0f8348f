"""The settings of prediction."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from unet3d.config.section import Section
from unet3d.config.values import MAX_PATCH_VOXELS, NUMBER, Few, Shape, of_few_voxels


class InferenceSettings(Section):
    """Prediction, also in validation."""

    window: Literal["auto", "whole"] | Shape = "auto"
    """Voxels along X, Y, Z of a window; whole: the whole volume; auto: the training patch, or the
    whole volume for a network trained on whole volumes."""
    overlap: Annotated[float, Field(ge=0, le=0.95), NUMBER] = 0.5
    """Share of a window that its neighbour covers again."""
    batch_size: Few | Literal["auto"] = "auto"
    """Windows in one forward pass, of each replica; auto: as many as 2^23 voxels hold on a GPU, if
    it has the memory (one while a training validates), and 2^20 on a CPU."""
    precision: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format that is computed in; auto: that of the training if it was float32 or float16
    (in place of float16 without GPUs float32), else as training.precision says of auto. Weights in
    float64 stay there. In float32 a GPU's convolutions use TF32, unless NVIDIA_TF32_OVERRIDE=0 is
    in the environment. The validation that ends a training computes in it too, those before in
    training.precision."""
    tta: bool = False
    """Whether each window is also predicted mirrored, over all combinations of the axes along which
    patches were mirrored in training, and the logits are averaged: up to 8 times the work."""
    averaging: Literal["probabilities", "logits"] = "probabilities"
    """What of several networks is averaged, which must agree on it: the probabilities of each
    class, or logits, as nnU-Net does with the folds of a model."""
    postprocessing: bool = True
    """Whether a training ends with the choice of labels of which only the largest component is kept
    (those where that raises Dice in validation), and predictions keep only these."""

    @field_validator("window")
    @classmethod
    def _few_voxels(cls, window: str | Shape) -> str | Shape:
        return of_few_voxels("inference.window", window, MAX_PATCH_VOXELS)
