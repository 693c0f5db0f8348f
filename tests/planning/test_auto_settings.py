"""Settings that are auto: values that suit a CPU, and values for weights to begin with."""

from operator import attrgetter
from pathlib import Path

import pytest

from unet3d.config import Config, load_config
from unet3d.config.configuration import commented_yaml
from unet3d.parallel import Machine, ParallelDims
from unet3d.planning.auto_settings import CPU_DEFAULTS, suited_to
from unet3d.planning.network_plan import plan_without_data

VALUES = {key: value for together, _ in CPU_DEFAULTS for key, value in together.items()}


def suited(path: Path | None, changes: tuple[str, ...], num_gpus: int) -> tuple[Config, str | None]:
    config = load_config(path, changes)
    dims = ParallelDims.resolve(config.parallel, Machine(num_gpus=num_gpus))
    return suited_to(config, dims.all_devices)


def changed(*changes: str, num_gpus: int = 0, path: Path | None = None) -> dict[str, object]:
    """Return how settings differ from the same settings without the values for a CPU."""
    config, _ = suited(path, changes, num_gpus)
    plain = load_config(path, changes)
    keys = tuple(VALUES)
    before = {key: attrgetter(key)(plain) for key in keys}
    assert config.with_values(before) == plain
    after = {key: attrgetter(key)(config) for key in keys}
    return {key: value for key, value in after.items() if value != before[key]}


def test_without_a_gpu_what_is_open_suits_a_cpu():
    assert changed() == changed("training=null") == changed("data.fold=1") == VALUES
    model = ("parallel.mode=model", "parallel.devices=cpu,cpu,cpu,cpu")
    assert changed(*model) == changed(*model, "parallel.replicas=2") == VALUES


def test_with_a_gpu_nothing_changes():
    assert changed(num_gpus=2) == {}
    assert changed("parallel.devices=1", num_gpus=2) == {}
    assert changed("parallel.mode=model", "parallel.devices=cpu,0", num_gpus=2) == {}
    # Training on the CPU of a machine with a GPU gets the same values as without a GPU.
    assert changed("parallel.devices=cpu", num_gpus=2) == VALUES


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("changes", [(), ("training.init=a.pt",), ("training.epochs=3",)])
def test_defaults_that_are_written_down_are_defaults(changes, num_gpus, tmp_path):
    """The output of ``unet3d config``, an empty file and no file at all are the same training."""
    full, empty = tmp_path / "full.yaml", tmp_path / "empty.yaml"
    full.write_text(commented_yaml(Config()))
    empty.touch()
    without, _ = suited(None, changes, num_gpus)
    for path in (full, empty):
        assert suited(path, changes, num_gpus)[0] == without
    # Settings that a run has recorded are kept, whatever they are.
    empty.write_text(without.to_yaml())
    assert suited(empty, (), 0)[0] == without


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ("training.epochs=250", {"training.epochs"}),  # a default counts as set if it was given
        ("training.learning_rate=0.1", {"training.optimizer", "training.learning_rate"}),
        ("training.weight_decay=0.1", {"training.optimizer", "training.learning_rate"}),
        ("model.channels=4,8", {"model.base_channels", "patches.memory_gib"}),
        ("model.base_channels=32", {"model.base_channels", "patches.memory_gib"}),
        ("patches.memory_gib=4", {"model.base_channels", "patches.memory_gib"}),
        ("patches.size=whole", set()),
        ("patches.augmentation_details.gamma_probability=0.5", {"patches.augmentation"}),
        ("training={steps_per_epoch: 9}", {"training.steps_per_epoch"}),
    ],
)
def test_what_the_user_sets_stands_with_all_that_belongs_to_it(change, kept):
    assert changed(change).keys() == VALUES.keys() - kept


@pytest.mark.nightly
def test_two_patches_of_64_voxels_fit_into_what_a_cpu_takes():
    config, _ = suited(None, ("data.phantom_shape=128,128,128",), 0)
    network = plan_without_data(config)
    assert (network.size, network.batch_size) == ((64, 64, 64), 2)


def test_one_line_says_what_was_taken():
    _, line = suited(None, ("training.epochs=3",), 0)
    assert line == "6 settings chosen to suit a CPU, such as model.base_channels=8 instead of 32"
    everything = tuple(f"{key}={value}" for key, value in VALUES.items())
    assert suited(None, everything, 0)[1] is suited(None, (), 1)[1] is None


def test_weights_to_begin_with_bring_their_network_and_take_a_tenth_of_the_rate():
    found = changed("training.init=a.pt")
    expected = VALUES | {"training.learning_rate": 0.0003}
    del expected["model.base_channels"]
    assert found == expected
    assert changed("training.init=a.pt", "training.learning_rate=0.5").keys() == found.keys() - {
        "training.optimizer",
        "training.learning_rate",
    }
