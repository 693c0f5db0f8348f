"""Small networks with random weights: their segmentations are noise, but always the same noise."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from unet3d.config import InferenceSettings, ParallelSettings, load_config
from unet3d.datasets.labels import Region
from unet3d.inference.networks import Networks
from unet3d.inference.predictor import Predictor
from unet3d.model import Topology, UNet3d
from unet3d.preparation.normalization import ChannelNormalization
from unet3d.preparation.transform import Preprocessing
from unet3d.runs.checkpoint import Checkpoint, save_checkpoint


def random_checkpoint(
    num_channels: int = 1,
    label_values: tuple[int, ...] = (0, 1, 2),
    spacing_mm: tuple[float, float, float] | None = None,
    patch_size: tuple[int, int, int] | None = (16, 16, 16),
    dtype: torch.dtype = torch.float32,
    changes: tuple[str, ...] = (),
    channels: tuple[int, int] = (4, 8),
    seed: int = 7,
    postprocessing: tuple[tuple[int, ...], ...] = (),
    regions: tuple[Region, ...] = (),
) -> Checkpoint:
    """Return a checkpoint of a network of two levels and a stride of 2."""
    strides: Any = ((1, 1, 1), (2, 2, 2))
    num_classes = len(regions or label_values)
    topology = Topology(
        in_channels=num_channels, num_classes=num_classes, channels=channels, strides=strides
    )
    # Not torch.manual_seed, which also seeds every GPU; and fork_rng would need the GPUs' names.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = UNet3d(topology).to(dtype)
    with torch.no_grad():
        # If all features are alike, no class is favoured, so every class occurs.
        (head,) = model.decoder.heads
        head.weight -= head.weight.mean(dim=1, keepdim=True)
        head.bias.zero_()
    return Checkpoint(
        topology=topology,
        preprocessing=Preprocessing(
            spacing_mm=spacing_mm,
            channels=(ChannelNormalization(kind="z-score"),) * num_channels,
            channel_names=tuple(f"channel {index}" for index in range(num_channels)),
            label_names=tuple(f"label {value}" for value in label_values),
            label_values=label_values,
            regions=regions,
        ),
        patch_size=patch_size,
        config=load_config(None, changes),
        postprocessing=postprocessing,
        model=model.state_dict(),
        training={},
    )


def reseeded(checkpoint: Checkpoint, seed: int) -> Checkpoint:
    """Return a network of the same kind with other weights; biases stay, which favour no class."""
    generator = torch.Generator().manual_seed(seed)
    model = {
        name: value + 0.3 * torch.randn(value.shape, generator=generator, dtype=torch.float64)
        if value.dim() > 1
        else value
        for name, value in checkpoint.model.items()
    }
    return replace(
        checkpoint, model={name: value.to(checkpoint.dtype) for name, value in model.items()}
    )


def write_checkpoint(path: Path, **choices: Any) -> Path:
    """Write the result of :func:`random_checkpoint` to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(random_checkpoint(**choices), path)
    return path


def place(
    checkpoint: Checkpoint | Networks,
    *devices: str,
    inference: InferenceSettings | None = None,
    skips_empty: bool = False,
    **more: Any,
) -> Predictor:
    """Return a predictor of one or several networks, on one device or cut over several."""
    mode = more.pop("mode", "model" if len(devices) > 1 else "none")
    parallel = ParallelSettings(mode=mode, devices=devices or ("cpu",), **more)
    networks = checkpoint if isinstance(checkpoint, Networks) else Networks.of(checkpoint)
    if inference is not None:
        networks = Networks.of(*(set_to(one, inference) for one in networks.described))
    return Predictor(networks, parallel, skips_empty=skips_empty)


def set_to(checkpoint: Checkpoint, inference: InferenceSettings) -> Checkpoint:
    """Return a network that predicts with these settings."""
    return replace(checkpoint, config=checkpoint.config.model_copy(update={"inference": inference}))
