"""Which mode a prediction takes, and what needs ranks that are not there."""

from dataclasses import replace
from typing import Any

import pytest

from tests.networks import random_checkpoint
from tests.rank_threads import place
from unet3d.config import InferenceSettings, ParallelSettings
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError, DeviceError
from unet3d.inference.networks import Networks
from unet3d.inference.placing import choose_mode
from unet3d.inference.predictor import Predictor
from unet3d.runs.checkpoint import Checkpoint

CHECKPOINT = random_checkpoint(patch_size=(4, 16, 16))
"""Of windows with four planes, and a stride of two."""


def mode_of(
    *devices: str,
    checkpoint: Checkpoint = CHECKPOINT,
    window: Any = "auto",
    ranks: Ranks | None = None,
    **settings: Any,
) -> str:
    parallel = ParallelSettings(devices=devices or None, **settings)
    networks = Networks.of(checkpoint)
    chosen = choose_mode(parallel, networks, [window], ranks or Ranks())
    assert chosen == parallel.model_copy(update={"mode": chosen.mode})
    return chosen.mode


def test_devices_of_one_kind_take_slabs_where_windows_have_planes_for_them() -> None:
    assert mode_of("cpu") == "none"
    assert mode_of(*["cpu"] * 4) == "spatial"
    assert mode_of(*["cpu"] * 5) == "model"
    assert mode_of(*["cpu"] * 5, window=(5, 8, 8)) == "spatial"  # of which six are computed
    assert mode_of(*["cpu"] * 7, window="whole") == "spatial"  # whose planes nobody knows yet
    whole = replace(CHECKPOINT, patch_size=None)
    assert mode_of(*["cpu"] * 7, checkpoint=whole) == "spatial"
    assert mode_of(*["cpu"] * 7, checkpoint=whole, window=(6, 6, 6)) == "model"


def test_batch_normalisation_takes_stages() -> None:
    batch = replace(CHECKPOINT, topology=replace(CHECKPOINT.topology, norm="batch"))
    assert mode_of("cpu", "cpu", checkpoint=batch) == "model"


@pytest.mark.parametrize("mode", ["none", "model", "spatial"])
def test_a_mode_that_is_named_stays(mode: Any) -> None:
    assert mode_of("cpu", "cpu", mode=mode) == mode


def test_several_ranks_have_a_slab_each() -> None:
    assert mode_of("cpu", "cpu", ranks=place(1, 2)) == "spatial"
    assert mode_of(ranks=place(0, 2), mode="spatial") == "spatial"
    for mode in ("none", "model"):
        with pytest.raises(ConfigError, match=f"2 ranks were started, but --parallel {mode} pred"):
            mode_of(ranks=place(0, 2), mode=mode)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(DeviceError, match="99"):
        mode_of("99", "cpu")


def test_slabs_in_one_process_are_refused() -> None:
    settings = ParallelSettings(mode="spatial", devices=("cpu", "cpu"))
    with pytest.raises(ConfigError, match="spatial over 2 devices needs a process for each"):
        Predictor(Networks.of(CHECKPOINT), settings, [InferenceSettings()])
