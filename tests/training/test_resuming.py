"""Which runs may be continued; a refusal changes no file."""

import json
import logging
import shutil
from functools import reduce

import nibabel
import numpy as np
import pytest
import torch

from tests.images.samples import write_json, write_msd
from tests.products import by_night
from tests.trainings import before_steps, contents, losses, run, run_until_power_cut, settings
from unet3d.config import load_config
from unet3d.errors import CheckpointError, ConfigError, Unet3dError
from unet3d.runs.checkpoint import load_checkpoint

TINY = (
    "patches.size=8,8,8",
    "data.num_folds=5",
    "training.steps_per_epoch=2",
    "training.epochs=2",
    "training.validate_every=1",
)


@pytest.fixture(scope="module")
def made(cache, tmp_path_factory):
    """A folder with a data set, and a run with it that was killed in its second epoch."""
    folder = tmp_path_factory.mktemp("resuming")
    write_msd(folder / "data", num_cases=5)
    config = settings(
        cache, *TINY, f"data.dataset={folder / 'data'}", "training.save_every_seconds=0"
    )
    run_until_power_cut(config, folder / "run", num_steps=3)
    return folder


@pytest.fixture
def place(made, tmp_path):
    """A copy of both in another folder."""
    return shutil.copytree(made, tmp_path / "moved")


def resume(place, *changes):
    config = load_config(place / "run/config.yaml", [f"data.dataset={place / 'data'}", *changes])
    run(config, place / "run", resume=True)


def refusal(place, *changes):
    """Return why a run is not continued, after checking that no file has changed."""
    (place / "run" / ".unfinished-draft").write_text("of somebody else")
    leftover = place / "run" / f".unfinished-{'0' * 32}-config.yaml"
    leftover.write_text("of a killed process")
    before = contents(place / "run")
    with pytest.raises(Unet3dError) as refused:
        resume(place, *changes)
    assert contents(place / "run") == before
    (line,) = str(refused.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            ("data.fold=2", "training.seed=1"),
            "fold changed from 0 to 2; training.seed changed from ",
        ),
        (("training.optimizer=adamw",), "training.optimizer changed from sgd to adamw"),
        (("data.num_folds=2",), "in training before, in validation now"),
        (("data.dataset=null",), "new in"),
        (("model.base_channels=8",), "another network"),
        (("training.epochs=1",), "training.epochs is 1, but "),
        *by_night(
            (("data.normalization=none",), "channels changed from [z-score] to [none]"),
            (
                ("data.spacing_mm=2,2,2",),
                "spacing_mm changed from [1.0, 1.0, 1.0] to [2.0, 2.0, 2.0]",
            ),
        ),
    ],
)
def test_settings_that_would_make_it_another_run_are_refused(place, changes, words):
    assert words in refusal(place, *changes)


def test_other_data_are_refused(place):
    """Kinds of changes are tested in ``tests/runs/test_case_split.py``."""
    path = min((place / "data/labelsTr").iterdir())
    image = nibabel.load(path)
    voxels = np.asarray(image.dataobj).copy()
    voxels.flat[0] = 1 - min(1, voxels.flat[0])
    nibabel.save(nibabel.Nifti1Image(voxels, image.affine), path)
    description = json.loads((place / "data/dataset.json").read_text())
    description["labels"]["1"] += " of the left"
    write_json(place / "data/dataset.json", description)
    line = refusal(place)
    assert line.startswith(f"{place / 'run'} cannot be continued: 1 case with changed contents (")
    assert "; label_names changed from [background, " in line and "another --output" in line


def test_what_may_change_is_named_and_takes_effect(place, caplog):
    with caplog.at_level(logging.INFO, logger="unet3d"):
        resume(
            place,
            *("training.learning_rate=0.01", "training.weight_decay=0.0"),
            *("training.batch_size=4", "training.epochs=3", "inference.overlap=0.25"),
            *("training.micro_batches=auto", "parallel.cuts=auto"),  # as in a run over folds
        )
    (line,) = (text for text in caplog.messages if text.startswith("changed since"))
    for words in (
        "weight_decay from 0.001 to 0.0",
        "batch_size from 2 to 4",
        "overlap from 0.5 to 0.2",
    ):
        assert words in line
    assert "epochs" not in line and "auto" not in line
    assert [epoch for epoch, _ in losses(place / "run")] == [1, 2, 3]
    training = load_checkpoint(place / "run/checkpoint-latest.pt").training
    (group,) = training["optimizer"]["param_groups"]
    assert group["weight_decay"] == 0


@pytest.mark.parametrize(
    ("change", "num_steps"),
    [
        ("training.steps_per_epoch=4", 3),
        *by_night(("training.batch_size=3", 1), ("training.steps_per_epoch=1", 0)),
    ],
)
def test_an_epoch_that_has_begun_goes_on_with_what_is_left_of_it(place, change, num_steps):
    taken = []
    with before_steps(taken.append):
        resume(place, change)  # interrupted after 1 of 2 steps
    assert [epoch for epoch, _ in losses(place / "run")] == [1, 2]
    assert len(taken) == num_steps


def test_a_change_that_fails_in_the_first_step_leaves_all_as_it_was(place):
    def fail(number):
        raise ConfigError("no memory for a batch of 8")

    with before_steps(fail):
        assert "no memory" in refusal(place, "training.batch_size=8")


def test_a_finished_run_says_so_and_stays_as_it_is(place, caplog):
    """The data may be in another place, but must be the same."""
    caplog.set_level(logging.INFO, logger="unet3d")
    resume(place)
    assert [epoch for epoch, _ in losses(place / "run")] == [1, 2]
    assert json.loads((place / "run/data.json").read_text())["dataset"] == str(place / "data")
    before = contents(place / "run")
    shutil.copytree(place / "data", place / "same data")
    for name in ("data", "same data"):
        caplog.clear()
        resume(place, f"data.dataset={place / name}")
        assert "is finished: 2 of 2 epochs are done" in caplog.text and "--epochs" in caplog.text
        assert contents(place / "run") == before
    (place / "run/summary.json").write_bytes(b"\0" * 9)
    resume(place)
    assert json.loads((place / "run/summary.json").read_text())["epochs"] == 2
    assert "another network" in refusal(place, "model.base_channels=8")
    assert "cannot be continued: " in refusal(place, "data.dataset=null")


@pytest.mark.parametrize(
    "change",
    [
        {"random": torch.zeros(3, dtype=torch.uint8)},
        {"random": [1]},
        {"optimizer.state": {0: {"momentum_buffer": torch.ones(3)}}},
        {"state": {"epoch": "1"}},
        *by_night({"optimizer": None}, {"optimizer.state": {0: {"momentum_buffer": 3}}}),
        *by_night({"optimizer": {"state": {}, "param_groups": [{"params": [0]}]}}),
        *by_night({"optimizer.state": {0: {"exp_avg": torch.ones(3)}}}),
    ],
    ids=str,
)
def test_what_no_training_has_left_is_one_line(place, change):
    path = place / "run/checkpoint-latest.pt"
    content = torch.load(path, weights_only=True)
    for name, value in change.items():
        *parents, last = name.split(".")
        reduce(dict.get, parents, content["training"])[last] = value
    torch.save(content, path)
    with pytest.raises(
        CheckpointError, match=r"checkpoint-latest\.pt cannot be resumed from: "
    ) as no:
        resume(place, "training.epochs=3")
    assert len(str(no.value).splitlines()) == 1
