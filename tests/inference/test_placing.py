"""What a prediction computes in, and what needs ranks that are not there."""

import pytest

from tests.networks import random_checkpoint
from unet3d.config import ParallelSettings
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError
from unet3d.inference.networks import Networks
from unet3d.inference.placing import PlacedNetworks
from unet3d.inference.predictor import Predictor
from unet3d.parallel import precision

CHECKPOINT = random_checkpoint(patch_size=(4, 16, 16))


def test_slabs_in_one_process_are_refused():
    settings = ParallelSettings(mode="spatial", devices=("cpu", "cpu"))
    with pytest.raises(ConfigError, match="spatial over 2 devices needs a process for each"):
        Predictor(Networks.of(CHECKPOINT), settings)


@pytest.mark.parametrize(
    ("device", "trained", "asked", "computed"),
    [
        ("cpu", "float16", "auto", "float32"),
        ("cpu", "float32", "auto", "float32"),
        ("cpu", "float32", "bfloat16", "bfloat16"),
        ("cpu", "bfloat16", "auto", "bfloat16"),
        ("cpu", "auto", "auto", "bfloat16"),
        ("cpu", "auto", "float32", "float32"),
        pytest.param("cuda:0", "float16", "auto", "float16", marks=pytest.mark.gpu),
        pytest.param("cuda:0", "float32", "auto", "float32", marks=pytest.mark.gpu),
        pytest.param("cuda:0", "auto", "auto", "bfloat16", marks=pytest.mark.gpu),
    ],
)
def test_what_is_computed_in(device, trained, asked, computed, monkeypatch):
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr(precision, "bfloat16_is_faster", lambda: True)
    changes = (f"training.precision={trained}", f"inference.precision={asked}")
    network = random_checkpoint(changes=changes)
    parallel = ParallelSettings(devices=(device,))
    placed = PlacedNetworks(Networks.of(network), parallel, Group(Ranks()))
    assert placed.precision == computed
