"""Models of nnU-Net as checkpoints: their content, and files that are refused in one line."""

import copy
import io
import json
import os
import zipfile
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given

from tests.mutations import damaged, mutated, property_test
from tests.nnunet.models import (
    DATASET,
    PLANS,
    TOPOLOGY,
    TRANSPOSE_FORWARD,
    assert_equal,
    content_of,
    random_weights,
    write_model,
)
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import CheckpointError
from unet3d.inputs.plain_data import is_printable
from unet3d.nnunet.loading import load_network, network_from_first
from unet3d.nnunet.weights import order_of, to_nnunet
from unet3d.runs import tensor_file
from unet3d.runs.checkpoint import save_checkpoint

ALONE = Group(Ranks())

CONTENT = content_of()


def saved(content, folder):
    """Write a checkpoint alone; it has a copy of its model's other files."""
    path = folder / "alone" / "fold_0" / "checkpoint_final.pth"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


def with_args(**changes):
    return {**CONTENT, "init_args": {**CONTENT["init_args"], **changes}}


def with_plan(**changes):
    plans = copy.deepcopy(PLANS)
    plans["configurations"]["3d_fullres"] |= changes
    return with_args(plans=plans)


def refusal(path):
    """Return why a file is refused, after checking: one short printable line."""
    with pytest.raises(CheckpointError) as caught:
        load_network(path)
    message = str(caught.value).replace(str(path), "")
    assert is_printable(message) and len(message) < 900, repr(message)
    return message


def test_a_model_becomes_a_checkpoint(tmp_path):
    model = write_model(tmp_path / "nnUNetTrainer__nnUNetPlans__3d_fullres", 0)
    checkpoint = load_network(model / "fold_0" / "checkpoint_final.pth")
    assert checkpoint.topology == TOPOLOGY
    assert_equal(checkpoint.model, random_weights())
    prepared = checkpoint.preprocessing
    # Network axes 0, 1, 2 are Z, X, Y of a file, by the plan's transpose_forward.
    assert (checkpoint.patch_size, prepared.spacing_mm) == ((32, 48, 16), (1.0, 0.5, 3.0))
    assert checkpoint.mirror_axes == (1, 2)
    assert prepared.orientation == "stored" and prepared.crops_to_nonzero
    ct, other = prepared.channels
    assert (ct.kind, ct.low, ct.high, ct.mean, ct.std) == ("ct", -100.0, 300.0, 40.5, 20.0)
    assert (other.kind, other.least_std) == ("z-score-inside", 1e-8)
    assert prepared.channel_names == ("CT", "MRI")
    assert prepared.label_names == ("background", "organ", "lésion")
    how = prepared.interpolation
    assert (how.order, how.across_slices, how.logits_across_slices, how.clips) == (3, 0, 0, True)
    settings = checkpoint.config.inference
    assert (settings.tta, settings.overlap, settings.averaging) == (True, 0.5, "logits")


@pytest.mark.parametrize("part", ["network", "description"])
def test_files_are_told_apart_by_what_they_hold(tmp_path, part):
    theirs = saved(CONTENT, tmp_path)
    ours = tmp_path / "ours.pth"
    wanted = load_network(theirs)
    save_checkpoint(wanted, ours)
    renamed = theirs.rename(theirs.with_suffix(".pt"))
    for path in (ours, renamed):
        for read in (load_network(path, part), network_from_first(path, ALONE)):
            for name in ("topology", "preprocessing", "config", "patch_size"):
                assert getattr(read, name) == getattr(wanted, name)
    assert_equal(load_network(ours).model, wanted.model)
    again = saved({**CONTENT, "init_args": None}, tmp_path)
    with pytest.raises(CheckpointError, match="init_args must be a mapping"):
        load_network(again.rename(again.with_suffix(".pt")), part)


def test_files_above_a_checkpoint_count_more_than_its_copies(tmp_path):
    model = write_model(tmp_path / "model", 0)
    path = model / "fold_0" / "checkpoint_final.pth"
    labels = {"background": 0, "other organ": 1, "other": 2}
    (model / "dataset.json").write_text(json.dumps({**DATASET, "labels": labels}))
    assert load_network(path).preprocessing.label_names == tuple(labels)
    (model / "plans.json").write_text("{")
    assert "plans.json cannot be read" in refusal(path)


def test_normalisations(tmp_path):
    for scheme, is_masked, kind in (
        ("CTNormalization", True, "ct"),  # nnU-Net does not mask CT images
        ("ZScoreNormalization", True, "z-score-inside"),
        ("ZScoreNormalization", False, "z-score"),
        ("NoNormalization", True, "none"),
        ("RescaleTo01Normalization", False, "rescale"),
        ("RGBTo01Normalization", True, "rgb"),
    ):
        schemes, masks = [scheme, "NoNormalization"], [is_masked, False]
        content = with_plan(normalization_schemes=schemes, use_mask_for_norm=masks)
        read = load_network(saved(content, tmp_path), "description")
        assert [channel.kind for channel in read.preprocessing.channels] == [kind, "none"]
        assert all(value.is_meta for value in read.model.values())
        assert read.topology == TOPOLOGY


def test_regions_and_an_ignore_label(tmp_path):
    labels = {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "enhancing": 3, "ignore": 4}
    dataset = {**DATASET, "labels": labels, "regions_class_order": [1, 2, 3]}
    prepared = load_network(saved(with_args(dataset_json=dataset), tmp_path)).preprocessing
    values = {"whole": (1, 2, 3), "core": (2, 3), "enhancing": (3,)}
    assert {one.name: one.values for one in prepared.regions} == values
    assert [one.written for one in prepared.regions] == [1, 2, 3]
    assert prepared.ignore_value == 4
    # Lists of one value are labels, not regions.
    dataset = {**DATASET, "labels": {"background": 0, "organ": [1], "lésion": [2]}}
    content = with_args(dataset_json=dataset) | {"inference_allowed_mirroring_axes": None}
    read = load_network(saved(content, tmp_path))
    assert not read.preprocessing.regions
    assert read.preprocessing.label_values == (0, 1, 2)
    # Training without mirroring means prediction without it.
    assert read.mirror_axes == () and not read.config.inference.tta


def with_other_key(*names):
    """Return the content with an integer among the keys of a nested dictionary."""
    content = copy.deepcopy(CONTENT)
    place = content
    for name in names:
        place = place[name]
    place[7] = torch.ones(2)
    return content


def with_weight(name, value):
    return {**CONTENT, "network_weights": {**CONTENT["network_weights"], name: value}}


NAN = torch.full((3, 8, 1, 1, 1), float("nan"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {**CONTENT, "network_weights": {"a": 1}},
            "network_weights.a must be an instance of Tensor",
        ),
        (with_other_key("network_weights"), "network_weights.7 must be a valid string"),
        (with_other_key("init_args", "dataset_json", "labels"), "dataset.json cannot be read: "),
        (with_args(plans=None), "there is no plans.json"),
        (with_args(dataset_json={**DATASET, "labels": {"a": 1, "b": 3}}), "not 0, 1, 2"),
        (with_args(dataset_json={**DATASET, "labels": None}), "labels is None"),
        (with_args(dataset_json={**DATASET, "channel_names": {"0": "CT"}}), "names 1 channel,"),
        (
            {**CONTENT, "inference_allowed_mirroring_axes": (0, 7)},
            "mirroring_axes.1 must be at most 2",
        ),
        (with_weight("decoder.seg_layers.1.weight", NAN), "numbers that are not finite"),
        (with_weight("decoder.seg_layers.1.weight", torch.ones(3)), "seg_layers.1.weight is 3"),
        (with_plan(patch_size=[4096] * 3), "patches.size"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, content, message):
    said = refusal(saved(content, tmp_path))
    assert said.startswith(" is not a checkpoint that can be used: ") and message in said


def test_a_trainer_of_others_is_warned_of_once(tmp_path, caplog):
    model = write_model(tmp_path / "a model", 0, 1)
    paths = [model / f"fold_{fold}" / "checkpoint_final.pth" for fold in (0, 1)]
    load_network(paths[0])
    assert not caplog.records
    for path in paths:
        torch.save({**CONTENT, "trainer_name": "nnUNetTrainer\x1bGELU"}, path)
        load_network(path, "description")
        load_network(path)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        r"a model was trained by nnUNetTrainer\x1bGELU, which nnU-Net does not have"
    )


def test_the_memory_asked_for_is_what_is_read(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(tensor_file, "shortage", asked.append)
    load_network(saved(CONTENT, tmp_path))
    own = to_nnunet(random_weights(), TOPOLOGY, order_of(TRANSPOSE_FORWARD))
    num_bytes = sum(weight.nbytes for weight in own.values())
    assert asked == [num_bytes]  # once, though the file has most weights under three names
    load_network(saved(CONTENT, tmp_path), "description")
    assert asked == [num_bytes]


def test_nothing_in_a_model_is_run(tmp_path, monkeypatch):
    class Runs:
        def __reduce__(self):
            return os.system, ("touch run",)

    monkeypatch.chdir(tmp_path)
    said = refusal(saved({**CONTENT, "logging": Runs()}, tmp_path))
    assert "tensors, numbers and strings (posix.system), and so could run code" in said
    assert not (tmp_path / "run").exists()
    path = saved({**CONTENT, "logging": {"dice": np.ones(3)}}, tmp_path)
    assert "multiarray._reconstruct), and so could run code; use another one" in refusal(path)
    path.write_bytes(path.read_bytes()[:5000])
    assert "it is not a file of torch.save, or only a part of one; use another" in refusal(path)


def assert_refused_or_read(content, folder):
    """Load a file; if it is accepted, its network can be built."""
    path = folder / "mutated.pth"
    path.write_bytes(content)
    try:
        read = load_network(path)
    except CheckpointError as error:
        assert is_printable(str(error)) and len(str(error)) < 1200, repr(str(error))
    else:
        read.build_model()


SETTINGS = ("init_args", "trainer_name", "inference_allowed_mirroring_axes")


@partial(property_test, share=0.6)
@given(mutated({"network_weights": {}, **{name: CONTENT[name] for name in SETTINGS}}))
def test_mutations_of_the_values(tmp_path_factory, content):
    file = io.BytesIO()
    if isinstance(content, dict) and content.get("network_weights") == {}:
        content = {**content, "network_weights": CONTENT["network_weights"]}
    try:
        torch.save(content, file)
    except (UnicodeEncodeError, OverflowError):
        return
    assert_refused_or_read(file.getvalue(), tmp_path_factory.getbasetemp())


SMALL = io.BytesIO()  # a checkpoint that is mostly archive and pickle, not weights
torch.save({**CONTENT, "network_weights": {"a": torch.ones(2)}}, SMALL)
with zipfile.ZipFile(SMALL) as small:
    ENTRIES = {name: small.read(name) for name in small.namelist()}


# pickletools decodes escapes in text before our check refuses the pickle.
@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")
@partial(property_test, share=0.4)
@given(damaged(ENTRIES["archive/data.pkl"]))
def test_mutations_of_the_pickle(tmp_path_factory, content):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as new:
        for name, value in {**ENTRIES, "archive/data.pkl": content}.items():
            new.writestr(name, value)
    assert_refused_or_read(file.getvalue(), tmp_path_factory.getbasetemp())
