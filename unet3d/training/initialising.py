"""Beginning a run with the weights of another one, for the same or other labels and channels.

The checkpoint determines the network: a setting that asks for another one is an error. Images get
the spacing that the network was trained at, unless the settings name one. A resumed run has the
network in its own checkpoint, so it does not need the file again. Patches may have another size,
because no weight depends on it.

If labels or channels differ, the heads or the stem start from scratch: the checkpoint has no
weights for them.

Images are prepared as in any training run: in RAS, interpolated and normalised by the settings.
"""

import logging
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from unet3d.config import Config
from unet3d.distributed.group import Group
from unet3d.errors import ConfigError, counted, some
from unet3d.model import Topology, UNet3d
from unet3d.nnunet.loading import load_network, network_from_first
from unet3d.preparation.transform import Preprocessing
from unet3d.runs.checkpoint import Checkpoint
from unet3d.runs.run_folder import RunFolder, folds_in

logger = logging.getLogger(__name__)

STEM = "encoder.levels.0.0."
"""Prefix of the names of the first unit's parameters; this unit reads the image."""

HEADS = "decoder.heads."
"""Prefix of the names of the heads' parameters; each level with a loss has a head."""

BASE = "model.base_channels"
"""The channels of the first level, which determine the other levels unless these are named."""


def network_to_begin_with(
    config: Config, old_run: RunFolder | None = None
) -> tuple[Config, Topology | None]:
    """Return settings that match the network of ``training.init``, if set, and its topology.

    If a run is resumed, the network comes from a checkpoint of the run or its folds, if there is
    one.
    """
    path = config.training.init
    if path is None:
        return config, None
    if old_run is not None:
        runs = (old_run, *folds_in(old_run.path).values())
        path = next((file for run in runs if (file := run.checkpoint()) is not None), path)
    checkpoint = load_network(path, "description")
    topology = checkpoint.topology
    values: dict[str, Any] = {
        "model.encoder": topology.encoder,
        "model.norm": topology.norm,
        "model.kernels": "anisotropic" if topology.kernels else "isotropic",
        "model.num_levels": topology.num_levels,
        "model.channels": topology.channels,
    }
    differences = [
        f"{key} {_words(asked)}, but the checkpoint has {_words(found)}"
        for key, found in {**values, BASE: topology.channels[0]}.items()
        if (asked := attrgetter(key)(config)) != found and _is_asked(config, key)
    ]
    if differences:
        raise ConfigError(
            f"training.init ({config.training.init}) has another network than the settings ask "
            "for: "
            f"{'; '.join(differences)}; leave these settings out"
        )
    if config.is_open("data.spacing_mm"):
        values["data.spacing_mm"] = checkpoint.preprocessing.spacing_mm or "native"
    return config.with_values(values), topology


def _is_asked(config: Config, key: str) -> bool:
    """Return whether a user has set a setting of the network; defaults do not count."""
    if key == BASE:
        return not config.model.channels and not config.is_open(key)
    return config.differs(key)


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def begin_with(
    path: Path,
    model: UNet3d,
    preprocessing: Preprocessing,
    group: Group,
    validation: Mapping[str, str],
) -> None:
    """Copy a checkpoint's weights into a new network, and log new layers; all ranks call it.

    ``validation`` has the digest of each validation case. A warning names the cases that the
    checkpoint was trained on: their scores are too high.
    """
    checkpoint = network_from_first(path, group)
    news = take_weights(model, preprocessing, checkpoint)
    logger.info("training starts from the weights of %s; %s", path, news)
    trained = set() if checkpoint.split is None else {*checkpoint.split.training.values()}
    if seen := sorted(name for name, content in validation.items() if content in trained):
        logger.warning(
            "these weights were trained on %s of this run (%s), so scores will be too high; "
            "choose the folds with splits_final.json",
            counted(len(seen), "validation case"),
            some(seen),
        )


def take_weights(model: UNet3d, preprocessing: Preprocessing, checkpoint: Checkpoint) -> str:
    """Copy the weights of a checkpoint into a new network, as far as they fit.

    Returns in words which layers are new.
    """
    topology, before = model.topology, checkpoint.topology
    old, new = checkpoint.preprocessing, preprocessing
    news: list[str] = []
    left_out: list[str] = []
    if topology.in_channels != before.in_channels:
        left_out.append(STEM)
        names = [some(list(one.channel_names)) for one in (new, old)]
        news.append(f"the stem ({' instead of '.join(names)})")
    if (list(new.scored), topology.num_classes) != (list(old.scored), before.num_classes):
        left_out.append(HEADS)
        names = [some(list(one.scored)) for one in (new, old)]
        news.append(f"the heads ({' instead of '.join(names)})")
    weights = {
        name: value
        for name, value in checkpoint.model.items()
        if not name.startswith(tuple(left_out))
    }
    own = model.state_dict()
    if HEADS not in left_out:
        lacking = _levels_of_heads(own) - _levels_of_heads(weights)
        if lacking:
            news.append(f"the heads of level {', '.join(map(str, sorted(lacking)))}")
    # Heads of levels that no longer have a loss are not copied.
    model.load_state_dict({name: weights.get(name, value) for name, value in own.items()})
    return f"new layers: {' and '.join(news)}" if news else "no layer is new"


def _levels_of_heads(weights: Mapping[str, Tensor]) -> set[int]:
    names = [name.removeprefix(HEADS) for name in weights if name.startswith(HEADS)]
    return {int(name.partition(".")[0]) for name in names}
