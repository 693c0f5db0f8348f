import os
import pickle
import random
import resource
import signal
import sys
import time
import zipfile
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import warm
from tests.runs.refusals import refusal
from unet3d import __version__
from unet3d.atomic import PREFIX
from unet3d.config import ModelSettings, TrainingSettings, load_config
from unet3d.errors import CheckpointError
from unet3d.model import UNet3d, dice_cross_entropy, plan_topology
from unet3d.model.optimizer import Optimization
from unet3d.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from unet3d.volumes.normalization import ChannelNormalization
from unet3d.volumes.transform import Preprocessing

PREPROCESSING = Preprocessing(
    spacing_mm=(1.0, 0.7, 2.5),
    channels=(
        ChannelNormalization(kind="ct", low=-100.0, high=300.0, mean=40.0, std=55.5),
        ChannelNormalization(kind="z-score-all", least_std=1e-8),
    ),
    channel_names=("CT", "PET"),
    label_names=("background", "organ", "lesion"),
    label_values=(0, 1, 5),
)


TRAINED_ELSEWHERE: dict[str, object] = {
    "units": (1, 3),
    "decoder_units": (1,),
    "upsampling_bias": True,
    "norm_eps": 1e-3,
    "negative_slope": 0.0,
}


def make_checkpoint(dtype: torch.dtype = torch.float32, **options: object) -> Checkpoint:
    """Return the checkpoint of a network after one step of training."""
    torch.manual_seed(0)
    fields = {name: options.pop(name) for name in TRAINED_ELSEWHERE if name in options}
    settings = ModelSettings(
        **{"deep_supervision": False, "base_channels": 2, "num_levels": 2, **options}
    )
    topology = replace(plan_topology(settings, (16, 16, 8), (1.0, 1.0, 2.5), 2, 3), **fields)
    model = UNet3d(topology).to(dtype)
    optimization = Optimization(model, TrainingSettings(optimizer="adamw"), "float32")
    image = torch.randn(2, 2, 16, 16, 8, dtype=dtype)
    logits = model(image)
    dice_cross_entropy(logits, torch.randint(0, 3, (2, 16, 16, 8))).total.backward()
    optimization.step(0.01)
    return Checkpoint(
        topology=topology,
        preprocessing=PREPROCESSING,
        patch_size=(16, 16, 8),
        config=load_config(
            None, ["training.epochs=7", "training.optimizer=adamw", "parallel.devices=cpu,cpu"]
        ),
        model=model.state_dict(),
        training={
            "state": {"epoch": 3, "best_dice": 0.1 + 0.2, "last_dice": {"a": None, "b": 0.5}},
            "random": torch.get_rng_state(),
            **optimization.state_dict(),
        },
    )


def assert_same(a: object, b: object) -> None:
    """Compare nested values, tensors bit by bit."""
    assert type(a) is type(b)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        assert a.dtype == b.dtype
        assert a.numpy().tobytes() == b.numpy().tobytes()
    elif isinstance(a, dict) and isinstance(b, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(make_checkpoint(), path)
    return path


def test_what_predictions_keep_is_kept(tmp_path):
    path = tmp_path / "checkpoint.pt"
    checkpoint = make_checkpoint()
    save_checkpoint(replace(checkpoint, postprocessing=((1, 5), (5,))), path)
    assert load_checkpoint(path).postprocessing == ((1, 5), (5,))
    save_checkpoint(checkpoint, path)
    assert load_checkpoint(path).postprocessing == ()
    for wrong in (((0,),), ((1, 3),)):
        save_checkpoint(replace(checkpoint, postprocessing=wrong), path)
        assert f"post-processing is of label {wrong[0][-1]}, which is none" in refusal(path)
    save_checkpoint(replace(checkpoint, postprocessing=((),)), path)
    assert "postprocessing" in refusal(path)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float64, {"norm": "batch", "encoder": "residual", "deep_supervision": True}),
        (torch.float32, TRAINED_ELSEWHERE),
    ],
    ids=str,
)
def test_round_trip_is_bit_exact(tmp_path, dtype, options):
    checkpoint = make_checkpoint(dtype, **options)
    save_checkpoint(checkpoint, tmp_path / "checkpoint.pt")
    loaded = load_checkpoint(tmp_path / "checkpoint.pt")
    assert loaded.topology == checkpoint.topology
    assert loaded.preprocessing == checkpoint.preprocessing
    assert loaded.patch_size == checkpoint.patch_size
    assert loaded.config == checkpoint.config
    assert_same(dict(loaded.model), dict(checkpoint.model))
    assert_same(loaded.training, checkpoint.training)
    model = loaded.build_model()
    assert_same(dict(model.state_dict()), dict(checkpoint.model))
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    assert_same(dict(loaded.model), dict(checkpoint.model))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_what_a_file_may_lack(tmp_path):
    checkpoint = replace(
        make_checkpoint(), patch_size=None, preprocessing=replace(PREPROCESSING, spacing_mm=None)
    )
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(checkpoint, path)
    content = torch.load(path, weights_only=True)
    for channel in content["preprocessing"]["channels"]:
        del channel["least_std"]  # as files of the first versions
    torch.save(content, path)
    loaded = load_checkpoint(path)
    assert loaded.patch_size is None and loaded.preprocessing.spacing_mm is None
    assert [one.least_std for one in loaded.preprocessing.channels] == [0, 0]


def assert_names_no_gpu(path: Path) -> None:
    """Where tensors are put is decided by the reader."""
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        assert b"cuda" not in archive.read(name).replace(b"cuda_graphs", b"")  # a setting's name


def test_the_file_is_safe_to_load_and_free_of_devices(saved):
    content = torch.load(saved, weights_only=True)

    def tensors(value):
        if isinstance(value, Tensor):
            return [value]
        items = value.values() if isinstance(value, dict) else value
        is_group = isinstance(value, dict | list | tuple)
        return [t for item in items for t in tensors(item)] if is_group else []

    found = tensors(content)
    assert len(found) > 3 * len(content["model"])  # the optimizer's two moments, too
    assert {tensor.device.type for tensor in found} == {"cpu"}
    assert content["unet3d"] == __version__
    assert_names_no_gpu(saved)


@pytest.mark.gpu
def test_what_was_trained_on_a_gpu_is_saved_without_it(tmp_path):
    checkpoint = make_checkpoint()
    model = checkpoint.build_model().cuda()
    optimization = Optimization(model, checkpoint.config.training, "float16")
    for value in model.parameters():
        value.grad = torch.ones_like(value)
    optimization.step(0.01)
    training = {"state": {}, "random": torch.get_rng_state(), **optimization.state_dict()}
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(replace(checkpoint, model=model.state_dict(), training=training), path)
    assert_names_no_gpu(path)
    on_cpu = load_checkpoint(path).build_model()
    optimization = Optimization(on_cpu, checkpoint.config.training, "float16")
    optimization.load_state_dict(load_checkpoint(path).training)
    for a, b in zip(on_cpu.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b.cpu())


def kill_writers(path: Path) -> None:
    """Kill forty writers of numbered checkpoints, each at another moment, and read each last one.

    In a process of its own.
    """
    torch.set_num_threads(1)
    checkpoint = make_checkpoint(base_channels=24)

    def save(number: float) -> None:
        model = {name: torch.full_like(value, number) for name, value in checkpoint.model.items()}
        save_checkpoint(replace(checkpoint, model=model, training={}), path)

    save(0)
    began = time.monotonic()
    save(0)
    took = time.monotonic() - began  # disks differ, and are shared
    generator, last = random.Random(5), 0.0
    for _ in range(40):
        process = os.fork()
        number = last
        while process == 0:
            number += 1
            save(number)
        time.sleep(generator.uniform(0.1, 4) * took)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        weights = torch.cat([value.flatten() for value in load_checkpoint(path).model.values()])
        number = weights[0].item()
        if not torch.equal(weights, torch.full_like(weights, number)) or number < last:
            raise AssertionError(f"{weights.unique()} after {last}")
        last = number
    sys.stdout.write(f"{last}")


@pytest.mark.nightly
def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path):
    done = warm.run_call(kill_writers, tmp_path / "checkpoint.pt")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 5  # it did get to write
    leftovers = list(tmp_path.glob(f"{PREFIX}*"))
    assert leftovers  # and it was killed while writing
    assert any(not zipfile.is_zipfile(file) for file in leftovers)


def test_a_full_disk_leaves_the_old_checkpoint_and_says_so(saved):
    before = saved.read_bytes()
    checkpoint = make_checkpoint()
    large = replace(checkpoint, model={"w": torch.zeros(1_000_000)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot write the checkpoint .*File too large"):
            save_checkpoint(large, saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_folders_and_files_that_are_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot write .*: No such file or directory"):
        save_checkpoint(make_checkpoint(), tmp_path / "missing" / "checkpoint.pt")
    assert "No such file or directory" in refusal(tmp_path / "missing.pt")
    assert "Is a directory" in refusal(tmp_path)


def test_files_of_others(tmp_path):
    path = tmp_path / "file.pt"
    foreign = (b"", b"hello", b"\x1f\x8b" + bytes(100), bytes(10_000), pickle.dumps({"a": 1}))
    for content in foreign:
        path.write_bytes(content)
        assert "is not a checkpoint, or is damaged" in refusal(path), content[:9]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "is not a checkpoint, or is damaged" in refusal(path)
    tensor = torch.zeros(3)
    for value in (tensor, [1, 2], {"w": tensor}, {"format": tensor}, 3, OrderedDict(a=1)):
        torch.save(value, path)
        assert "is not a checkpoint of unet3d; train one with unet3d train" in refusal(path), value


def test_a_future_format_names_who_wrote_it(saved):
    content = torch.load(saved, weights_only=True)
    torch.save({**content, "format": 2, "unet3d": "9.9"}, saved)
    message = refusal(saved)
    assert "has checkpoint format 2, written by unet3d 9.9" in message
    assert "reads format 1" in message


def test_contents_of_another_version(saved):
    written = torch.load(saved, weights_only=True)
    changes: list[tuple[dict[str, object], str]] = [
        ({"config": "training: {epoch: 3}"}, "unknown setting training.epoch"),
        ({"config": "training: ["}, "not valid YAML"),
        ({"topology": {"channels": [1, 2]}}, "topology.in_channels is missing; topology.num_"),
        ({"preprocessing": {}}, "preprocessing.spacing_mm is missing"),
        ({"preprocessing": None}, "preprocessing must be a mapping, but is None"),
    ]
    for change, message in changes:
        content = {**written, **change}
        torch.save(content, saved)
        said = refusal(saved)
        assert "is not a usable checkpoint: " in said and message in said
        torch.save({**content, "unet3d": "9.9"}, saved)
        assert "is not a usable checkpoint, by unet3d 9.9: " in refusal(saved)
    torch.save({key: value for key, value in written.items() if key != "model"}, saved)
    assert "model is missing" in refusal(saved)


def test_no_damage_goes_unnoticed(saved):
    """Cut off, bits turned over, runs of zeros: refused, or read exactly as it was written."""
    expected = load_checkpoint(saved)
    whole = saved.read_bytes()
    generator = random.Random(0)
    num_refused = 0
    for attempt in range(60):
        damaged = bytearray(whole)
        at = generator.randrange(len(whole))
        if attempt % 3 == 0:
            del damaged[at:]
        elif attempt % 3 == 1:
            damaged[at] ^= 1 << generator.randrange(8)
        else:
            end = min(at + generator.randrange(1, 500), len(whole))
            damaged[at:end] = bytes(end - at)
        saved.write_bytes(damaged)
        try:
            loaded = load_checkpoint(saved)
        except CheckpointError as error:
            assert "\n" not in str(error)
            num_refused += 1
        else:
            assert_same(dict(loaded.model), dict(expected.model))
            assert_same(loaded.training, expected.training)
            assert loaded.config == expected.config
    assert num_refused > 37


class Evil:
    """Runs a command when it is unpickled by a careless reader."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def test_a_checkpoint_cannot_run_code(saved, tmp_path):
    marker = tmp_path / "it-ran"
    content = torch.load(saved, weights_only=True)
    torch.save({**content, "training": Evil(marker)}, saved)
    assert "holds more than tensors, numbers and strings" in refusal(saved)
    assert not marker.exists()
    torch.load(saved, weights_only=False)  # the trap is a real one
    assert marker.exists()


def test_parameters_of_another_network_are_refused(saved):
    checkpoint = load_checkpoint(saved)
    topology = replace(checkpoint.topology, channels=(2, 6))
    with pytest.raises(CheckpointError, match="the parameters are of another network") as caught:
        replace(checkpoint, topology=topology).build_model()
    assert "\n" not in str(caught.value)
    missing = dict(checkpoint.model)
    del missing["decoder.heads.0.weight"]
    with pytest.raises(CheckpointError, match=r"decoder\.heads\.0\.weight is missing"):
        replace(checkpoint, model=missing).build_model()


def test_saving_takes_no_part_in_the_graph(tmp_path):
    checkpoint = make_checkpoint()
    parameters = {
        name: torch.nn.Parameter(value) * 2 if value.is_floating_point() else value
        for name, value in checkpoint.model.items()
    }
    save_checkpoint(replace(checkpoint, model=parameters), tmp_path / "checkpoint.pt")
    loaded = load_checkpoint(tmp_path / "checkpoint.pt")
    assert {type(value) for value in loaded.model.values()} == {Tensor}
    assert not any(value.requires_grad for value in loaded.model.values())
