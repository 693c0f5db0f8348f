"""Checkpoints of others, damaged or hostile: refused in one line, at little cost."""

import contextlib
import io
import os
import resource
import tempfile
import time
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given

from tests.mutations import damaged, mutated, property_test
from tests.networks import random_checkpoint
from tests.runs.refusals import MAX_SECONDS, refusal, stepped
from unet3d.config import load_config
from unet3d.errors import CheckpointError
from unet3d.inputs.plain_data import is_printable
from unet3d.memory import host
from unet3d.model import Topology, UNet3d
from unet3d.model.optimizer import Optimization
from unet3d.preparation.resample import Interpolation
from unet3d.runs.checkpoint import load_checkpoint
from unet3d.training.saving import TrainingState


def content_of(optimizer="adamw"):
    """Return the content of a checkpoint of format 1, key by key, after a step of training.

    Files have had this layout since the first version, and must stay readable.
    """
    model = random_checkpoint(label_values=(0, 1, 5)).build_model()
    config = load_config(None, [f"training.optimizer={optimizer}"])
    return {
        "format": 1,
        "unet3d": "0.1.0",
        "topology": {
            "in_channels": 1,
            "num_classes": 3,
            "channels": (4, 8),
            "strides": ((1, 1, 1), (2, 2, 2)),
            "encoder": "plain",
            "norm": "instance",
            "deep_supervision": False,
        },
        "preprocessing": {
            "spacing_mm": [1.0, 0.7, 2.5],
            "channels": [{"kind": "ct", "low": -100.0, "high": 300.0, "mean": 40.0, "std": 55.5}],
            "channel_names": ["CT"],
            "label_names": ["background", "organ", "lésion"],
            "label_values": [0, 1, 5],
        },
        "patch_size": (16, 16, 8),
        "config": config.to_yaml(),
        "model": dict(model.state_dict()),
        "training": {
            "state": {
                "epoch": 3,
                "step": 2,
                "loss": {"total": 1.5, "dice": 0.5, "cross_entropy": 1.0},
                "num_samples": 4,
                "seconds": 1.25,
                "total_seconds": 60.0,
                "best_dice": 0.75,
                "best_labels": {"organ": 0.75, "lésion": None},
            },
            "random": torch.get_rng_state(),
            "optimizer": stepped(model, config.training).optimizer.state_dict(),
            "scaler": {},
        },
    }


CONTENT = content_of()
REGION = {"name": "a", "values": [1, 5], "written": 1}


def weight_with(number):
    """Return a weight of the head with one number changed."""
    return torch.tensor([0.0] * 11 + [number]).view(3, 4, 1, 1, 1)


def saved(content, folder):
    path = folder / "checkpoint.pt"
    torch.save(content, path)
    return path


def changed(**changes):
    """Return the content with the values at dotted keys replaced."""
    content = {**CONTENT}
    for dotted, value in changes.items():
        *path, last = dotted.split("__")
        target = content
        for name in path:
            key = int(name) if name.isdigit() else name
            target[key] = type(target[key])(target[key])
            target = target[key]
        target[int(last) if last.isdigit() else last] = value
    return content


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_format_1_is_read(tmp_path, optimizer):
    content = content_of(optimizer)
    loaded = load_checkpoint(saved(content, tmp_path))
    assert loaded.topology.channels == (4, 8)
    known = content["preprocessing"]
    prepared = loaded.preprocessing.to_dict()
    for channel in prepared["channels"]:
        assert channel.pop("least_std") == 0
    assert {key: prepared[key] for key in known} == known
    assert loaded.preprocessing.orientation == "ras"
    assert loaded.preprocessing.interpolation == Interpolation()
    new = prepared.keys() - known.keys() - {"orientation", "interpolation"}
    assert not any(prepared[key] for key in new)
    assert loaded.postprocessing == ()
    assert loaded.preprocessing.label_names[2] == "lésion"
    assert loaded.patch_size == (16, 16, 8)
    assert loaded.config.training.optimizer == optimizer
    assert TrainingState(**loaded.training["state"]).best_dice == 0.75
    for name, value in content["model"].items():
        assert torch.equal(loaded.model[name], value)
        assert torch.equal(loaded.build_model().state_dict()[name], value)
    again = Optimization(loaded.build_model(), loaded.config.training, "float32")
    again.load_state_dict(loaded.training)
    for index, values in content["training"]["optimizer"]["state"].items():
        for key, value in values.items():
            assert torch.equal(again.optimizer.state_dict()["state"][index][key], value)


NAN = float("nan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topology__channels": (10**6, 10**6)}, "topology.channels.0 must be at most 65536, but"),
        ({"topology__channels": (16384, 16384)}, "is 4x1x3x3x3 in float32 instead of 16384x1x3x"),
        ({"topology__channels": (4,) * 10**5}, "channels has 100,000 entries, and may have 16"),
        ({"topology__norm": "batch"}, "running_mean is missing"),
        ({"topology__in_channels": 2}, "has a network of 2 channels and 3 classes, but prepares"),
        ({"preprocessing__spacing_mm": [NAN, 1.0, 1.0]}, "spacing_mm.0 must be a finite number"),
        ({"preprocessing__channels": [{"kind": "zscore"}]}, "kind must be 'ct', 'z-score', 'z-s"),
        ({"preprocessing__channels": [{"kind": "ct", "mean": NAN}]}, "mean must be a finite numb"),
        (
            {"preprocessing__regions": [REGION]},
            "3 classes, but prepares 1 channels and 1 region",
        ),
        ({"preprocessing__ignore_value": 5}, "has labels that contradict"),
        ({"preprocessing__label_values": [0, 1, 10**30]}, "label_values.2 must be less than 9223"),
        (
            {"preprocessing__label_values": [0, 1, 1]},
            "has different numbers of labels and of their na",
        ),
        ({"preprocessing__label_names": ["a", "b", "\x1b[2J"]}, "label_names.2 must hold no con"),
        ({"patch_size": (16, 16, 0)}, "patch_size.2 must be greater than 0, but is 0"),
        ({"patch_size": (65536,) * 3}, "a patch_size of 281,474,976,710,656 voxels, and may have"),
        ({"config": "a: &x [1]\nb: *x"}, "line 2: anchors (&) and aliases (*) are not allowed"),
        ({"config": "training: {epoch: 3}"}, "unknown setting training.epoch"),
        ({"preprocessing": None}, "preprocessing must be a mapping, but is None"),
        ({"model__decoder.heads.0.weight": weight_with(NAN)}, "the weight decoder.heads.0.weight"),
        ({"model": {"a": 1}}, "model.a must be an instance of Tensor, but is 1"),
        ({"training__\x1b[2J": 3}, r"training.\x1b[2J must hold no control char"),
        ({"another": 1}, "another is unknown"),
        ({"\ud800": 1}, "must be a valid string, unable to parse"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, str) else next(iter(value)),
)
def test_a_field_out_of_range_is_named(tmp_path, change, message):
    said = refusal(saved(changed(**change), tmp_path))
    assert message in said
    assert "use another one, or train again" in said


HEAD = "decoder.heads.0.weight"


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(1).expand(10**6, 10**6), "1000000x1000000 in float32 instead of 3x4x1x1x1"),
        (torch.zeros(3, 4, 1, 1, 1, dtype=torch.complex64), "in complex64 instead of"),
        (torch.zeros(3, 4, 1, 1, 1).to_sparse(), "does not hold plain numbers"),
        (torch.zeros(3, 4, 1, 1, 1, device="meta"), "does not hold plain numbers"),
        (torch.zeros(0), "is 0 in float32 instead of"),
    ],
    ids=["expanded", "complex", "sparse", "meta", "empty"],
)
def test_tensors_that_are_not_plain_numbers(tmp_path, tensor, message):
    assert message in refusal(saved(changed(**{f"model__{HEAD}": tensor}), tmp_path))


def test_tensors_that_repeat_their_numbers(tmp_path):
    """A network of 3 GiB in a file of some KiB, whose tensors all have the right shapes."""
    content = changed(topology__channels=(4, 8192), training={})
    with torch.device("meta"):
        network = UNet3d(Topology(**content["topology"]))
    for name, value in network.state_dict().items():
        content["model"] = {**content["model"], name: torch.zeros(1).expand(value.shape)}
    path = saved(content, tmp_path)
    assert path.stat().st_size < 2**16
    assert "its tensors are larger than the file" in refusal(path)


def test_views_and_parameters_are_tensors(tmp_path):
    wanted = CONTENT["model"][HEAD]
    view = torch.stack([wanted, wanted]).transpose(0, 1)[:, 0]
    for tensor in (view, torch.nn.Parameter(wanted)):
        loaded = load_checkpoint(saved(changed(**{f"model__{HEAD}": tensor}), tmp_path))
        assert torch.equal(loaded.model[HEAD], wanted) and not loaded.model[HEAD].requires_grad


def zipped(path, entries, kind=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def unzipped(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_entries_are_stored_as_they_are(tmp_path):
    path = saved({**CONTENT, "model": {"w": torch.zeros(10**6)}}, tmp_path)
    zipped(path, unzipped(path), zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 100_000
    assert "its entries are compressed; torch.save stores them as they are" in refusal(path)
    path = zipped(path, unzipped(saved(CONTENT, tmp_path)))
    assert load_checkpoint(path).patch_size == (16, 16, 8)


def test_a_number_that_has_changed_on_the_disk(tmp_path):
    path = saved(CONTENT, tmp_path)
    content = bytearray(path.read_bytes())
    content[content.index(CONTENT["model"][HEAD].numpy().tobytes()) + 1] ^= 1
    path.write_bytes(content)
    assert "is not a checkpoint that can be used: the checksum of its entry " in refusal(path)


def test_a_description_reads_no_weights(tmp_path):
    described = load_checkpoint(saved(CONTENT, tmp_path), "description")
    assert all(value.is_meta for value in described.model.values())
    assert described.patch_size == (16, 16, 8) and described.training == {}


class Runs:
    def __reduce__(self):
        return os.system, ("touch run",)


def test_nothing_in_a_checkpoint_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content in (Runs(), {**CONTENT, "training": Runs()}):
        said = refusal(saved(content, tmp_path))
        assert "tensors, numbers and strings (posix.system), and so could run code; use" in said
    assert not (tmp_path / "run").exists()


def pickled(folder, *steps):
    """Write an archive whose pickle has these opcodes."""
    pickle = b"\x80\x02" + b"".join(steps) + b"."
    entries = {"data.pkl": pickle, "byteorder": b"little", "data/0": bytes(4), "version": b"3\n"}
    entries = {f"archive/{name}": content for name, content in entries.items()}
    return zipped(folder / "checkpoint.pt", entries)


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000"
    b"X\x03\0\0\0cpuK\x01tQ%s%s%s\x89ccollections\nOrderedDict\n)RtR"
)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            [b"](]q\0", *[b"]q%c(" % (i + 1) + b"h%c" % i * 9 + b"e" for i in range(30)], b"e"],
            "is not a checkpoint of unet3d",
        ),
        ([b"]q\x00h\x00a"], "is not a checkpoint of unet3d"),  # a list that contains itself
        ([b"]r\xff\xff\xff\x7f"], "is not a checkpoint of unet3d"),
        ([b"X\xff\xff\xff\x7fa"], "can be used"),
        ([b"I" + b"9" * 100_000 + b"\n"], "can be used"),
        ([b"cos\nsystem\n(X\x04\0\0\0truetR"], "(os.system), and so could run code"),
        ([b"cnumpy\ndtype\n(X\x01\0\0\0OtR"], "is not a checkpoint of unet3d"),
        ([b"e"], "can be used"),
        ([TENSOR % (b"K\x00", b"K\x01\x85", b"K\x01\x85")], "is not a checkpoint of unet3d; train"),
        ([TENSOR % (b"K\x00", b"K\x02\x85", b"K\x01\x85")], "can be used"),
        ([TENSOR % (b"K\x00", b"N", b"N")], "can be used"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value[0][:16]),
)
def test_pickles_that_ask_for_much_or_make_no_sense(tmp_path, steps, message):
    assert message in refusal(pickled(tmp_path, *steps))


def test_a_file_larger_than_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "available_bytes", lambda: 1000)
    monkeypatch.setattr(host, "SMALL_BYTES", 0)
    said = refusal(saved(CONTENT, tmp_path))
    assert "its content takes" in said and "but this machine has 1000 bytes available" in said


def test_memory_that_runs_out_while_tensors_are_read(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(torch, "load", fail)
    assert "too little memory; use a machine with more" in refusal(saved(CONTENT, tmp_path))


sometimes = partial(property_test, share=1 / 3)


@sometimes
@given(mutated(CONTENT))
def test_mutations_of_the_values(content):
    file = io.BytesIO()
    try:
        torch.save(content, file)
    except (UnicodeEncodeError, OverflowError):
        return
    assert_refused_or_read(file.getvalue())


SMALL = {**CONTENT, "training": {}}
"""Content whose file is mostly archive and pickle, not numbers."""


def small_file():
    file = io.BytesIO()
    torch.save(SMALL, file)
    return file


@sometimes
@given(damaged(small_file().getvalue()))
def test_mutations_of_the_bytes(content):
    """A mutation is noticed, or changes nothing."""
    found = assert_refused_or_read(content)
    if found is not None:
        torch.testing.assert_close(found.model, SMALL["model"], rtol=0, atol=0)
        assert found.patch_size == SMALL["patch_size"] and found.config.to_yaml() == SMALL["config"]


ENTRIES = unzipped(small_file())


@sometimes
@given(damaged(ENTRIES["archive/data.pkl"]))
def test_mutations_of_the_pickle(content):
    file = zipped(io.BytesIO(), {**ENTRIES, "archive/data.pkl": content})
    assert_refused_or_read(file.getvalue())


def assert_refused_or_read(content):
    """Load a file; if it is accepted, its network can be built and training can be resumed."""
    began = time.thread_time()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # includes the tests before
    checkpoint = None
    try:
        with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            file.write(content)
            file.flush()
            checkpoint = load_checkpoint(Path(file.name))
    except CheckpointError as error:
        message = str(error)
        assert is_printable(message), repr(message)
        assert len(message) < 2500, message
    else:
        model = checkpoint.build_model()
        assert all(value.isfinite().all() for value in model.state_dict().values())
        if checkpoint.training:
            with contextlib.suppress(
                ValueError, LookupError, TypeError, AttributeError, RuntimeError
            ):  # resuming explains it
                stepped(model, checkpoint.config.training, training=checkpoint.training)
                TrainingState.from_plain(checkpoint.training["state"])
    assert time.thread_time() - began < MAX_SECONDS
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert grown_kib < 2**20
    return checkpoint
