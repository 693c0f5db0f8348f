"""Predicted memory, compared with the measured memory of the same steps."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.products import by_night
from tests.steps import CPU, GPUS, LARGE, SMALL, WIDE, make_step, measure, measure_shards, predicted
from unet3d.config import AugmentationSettings, ModelSettings, load_config
from unet3d.errors import DeviceError, VolumeError
from unet3d.kernels.conv.hopper import api as hopper
from unet3d.memory import fake_results
from unet3d.memory.allocations import UNCOUNTED_BYTES, counted_allocations
from unet3d.memory.fake_devices import fake_device
from unet3d.model import UNet3d
from unet3d.parallel import precision
from unet3d.parallel.graph import NUM_WARM_UP_STEPS, release_streams
from unet3d.parallel.spatial import division
from unet3d.patches.augment.device import DeviceAugmentation
from unet3d.planning import memory_estimate
from unet3d.planning.experiment import plan_experiment
from unet3d.planning.memory_estimate import MESSAGE_BYTES, Step, predict_memory, predict_shards
from unet3d.planning.network_plan import plan_without_data


def by_day(options: dict[str, Any], *names: str) -> list[Any]:
    """Return named parameters of a test, of which all but some are for the night."""
    assert options.keys() >= set(names)
    return [
        pytest.param(
            *(own if isinstance(own, tuple) else [own]),
            id=name,
            marks=() if name in names else pytest.mark.nightly,
        )
        for name, own in options.items()
    ]


def peaks(step: Step) -> list[int]:
    return [memory.peak_bytes for memory in predicted(step).memory.values()]


def activations(step: Step) -> list[int]:
    return [memory.activations_bytes for memory in predicted(step).memory.values()]


ELSEWHERE: dict[str, Any] = {"units": (1, 3, 2), "decoder_units": (3, 1), "upsampling_bias": True}
"""Properties that networks have only if a checkpoint says so."""
RESIDUAL = {"encoder": "residual", "deep_supervision": True}
FLAT = {"kernels": "anisotropic"}
BOTH = (CPU, CPU)


def step_of(
    devices: tuple[torch.device, ...], options: dict[str, Any], settings: ModelSettings = SMALL
) -> Step:
    """Return a step; the option ``model`` changes settings, ``topology`` fields of the topology."""
    changes = {"model": {}, "topology": {}, **options}
    changed, fields = changes.pop("model"), changes.pop("topology")
    step = make_step(devices, model=settings.model_copy(update=changed), **changes)
    return replace(step, topology=replace(step.topology, **fields))


def allow_bfloat16(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let any CPU compute in bfloat16: oneDNN emulates it with the same memory."""
    if step.precision == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("without AVX-512, PyTorch's own convolutions compute, and keep other tensors")
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: True)


SLOTS: dict[str, dict[str, Any]] = {
    "none": {"num_slots": 1},
    "batch Dice": {"batch_size": 5, "num_micro_batches": 3, "batch_dice": True},
    "odd batch": {"num_slots": 3, "batch_size": 5, "num_micro_batches": 4},
    "another cut, regions": {"cuts": (3,), "regions": ((1, 2), (2,), (1,))},
    "bfloat16": {"precision": "bfloat16"},
    "adamw, float64": {"num_slots": 1, "optimizer": "adamw", "precision": "float64"},
    "buffers": {"model": {"norm": "batch"}},
    "residual, supervised": {"model": RESIDUAL},
    "trained elsewhere": {"topology": ELSEWHERE},
}


@pytest.mark.parametrize(
    "options",
    by_day(SLOTS, "batch Dice", "odd batch", "bfloat16", "trained elsewhere"),
)
def test_what_is_predicted_is_what_is_measured_to_the_byte(options, monkeypatch):
    changes = {"num_slots": 2, **options}
    step = step_of((CPU,) * changes.pop("num_slots"), changes)
    allow_bfloat16(step, monkeypatch)
    assert predict_memory(step).memory == measure(step)


@pytest.mark.nightly
def test_batch_dice_takes_no_more_memory():
    """The first forward pass of micro-batches keeps nothing, because a second one follows."""
    plain, joined = (
        make_step(
            *(GPUS[:2], (32, 32, 32), 4, 4),
            model=WIDE,
            batch_dice=batch_dice,
            captures=False,
        )
        for batch_dice in (False, True)
    )
    assert activations(joined) == activations(plain)
    for more, peak in zip(peaks(joined), peaks(plain), strict=True):
        # The sums, and the rounding up of small tensors.
        assert more <= peak + 64 * 1024


def test_predicting_needs_no_memory_of_the_size_that_it_predicts():
    step = make_step(BOTH, size=(1024, 1024, 512), model=WIDE)
    assert min(predicted(step).needed_bytes().values()) > 500 * 1024**3


SHARDS: dict[str, dict[str, Any]] = {
    "uneven": {"size": (32, 16, 16), "num_shards": 3},
    "divided low levels": {"size": (48, 16, 16), "num_shards": 3, "min_divided": 8**4},
    "batch Dice": {"batch_size": 3, "num_micro_batches": 2, "batch_dice": True},
    "level": {"recompute": "level"},
    "in groups": {"num_replicas": 2},
    "bfloat16": {"precision": "bfloat16"},
    "group norm": {"model": {"norm": "group"}},
    "flat across X": {"model": FLAT, "spacing_mm": (4, 1, 1)},
    "trained elsewhere": {"topology": ELSEWHERE},
}


@pytest.mark.parametrize("options", by_day(SHARDS, "batch Dice", "bfloat16", "trained elsewhere"))
def test_what_is_predicted_of_every_shard_is_what_is_measured_to_the_byte(options, monkeypatch):
    changes = {"num_shards": 2, "min_divided": division.MIN_DIVIDED_ELEMENTS, **options}
    monkeypatch.setattr(division, "MIN_DIVIDED_ELEMENTS", changes.pop("min_divided"))
    step = step_of((CPU,), changes)
    allow_bfloat16(step, monkeypatch)
    shards = predict_shards(step)
    assert [one.step.layout.shard for one in shards] == list(range(step.layout.num_shards))
    assert [one.memory for one in shards] == measure_shards(step)


@pytest.mark.nightly
def test_shards_of_a_kind_are_predicted_once(monkeypatch):
    asked: list[int] = []

    def predict(step):
        asked.append(step.layout.shard)
        return predict_memory(step)

    monkeypatch.setattr(memory_estimate, "predict_memory", predict)
    predict_shards(make_step((CPU,), (63 * 4, 8, 8), num_shards=16))
    assert len(asked) == 4  # slabs at the ends and between them, of two sizes


@pytest.mark.nightly
def test_a_shard_of_a_gpu_takes_its_share():
    step = make_step(GPUS[:1], (256, 128, 128), 1, precision="bfloat16", model=WIDE)
    (one,) = predicted(step).memory.values()
    least = []
    for num_shards in (2, 4):
        prediction = predicted(replace(step, layout=replace(step.layout, num_shards=num_shards)))
        (shard,) = prediction.memory.values()
        least.append(shard.peak_bytes)
        assert shard.parameters_bytes == one.parameters_bytes
        assert shard.activations_bytes < 1.3 * one.activations_bytes / num_shards
        # NCCL has its own buffers.
        needed = prediction.needed_bytes()[GPUS[0]]
        assert needed == shard.peak_bytes + UNCOUNTED_BYTES + MESSAGE_BYTES
    assert one.peak_bytes > 1.5 * least[0] > 1.5 * 1.4 * least[1]


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(DeviceError, match="16 planes along X, too few for 17 .*; use at most 16"):
        predict_memory(make_step((CPU,), num_shards=17))
    with pytest.raises(VolumeError, match="does not divide"):
        predict_memory(replace(make_step((CPU,)), size=(16, 16, 17)))


GPU = fake_device(GPUS[0])


def test_gpus_convert_the_maps_of_convolutions_in_float32():
    for device, dtype in ((CPU, torch.float32), (GPU, torch.float32), (GPU, torch.bfloat16)):
        with counted_allocations() as recorder:
            x = torch.empty(1, 8, 16, 16, 16, dtype=dtype, device=device)
            weight = torch.empty(4, 8, 3, 3, 3, dtype=dtype, device=device)
            y = torch.nn.functional.conv3d(x, weight, padding=1)
        sizes = [x.nbytes, weight.nbytes, y.nbytes]
        assert recorder.now[device] == sum(-(-size // 512) * 512 for size in sizes)
        copies = x.nbytes + y.nbytes if (device, dtype) == (GPU, torch.float32) else 0
        assert recorder.peak[device] == recorder.now[device] + copies


def test_the_first_product_on_a_gpu_takes_workspaces():
    with counted_allocations() as recorder:
        for device in (CPU, GPU):
            x, bias = torch.empty(128, 128, device=device), torch.empty(128, device=device)
            assert recorder.workspace_bytes[device] == 0
            for _ in range(2):
                torch.nn.functional.linear(x, x, bias)
    assert (recorder.workspace_bytes[CPU], recorder.workspace_bytes[GPU]) == (0, 64 * 1024**2)


def test_gpus_are_predicted_without_gpus():
    step = make_step(GPUS[:2], (128, 128, 128), 2, 2, "bfloat16", WIDE, captures=False)
    prediction = predicted(step)
    assert [slot.device for slot in prediction.slots] == list(GPUS[:2])
    for memory in prediction.memory.values():
        kinds = ("parameters", "gradients", "optimizer", "activations")
        counted = sum(getattr(memory, f"{kind}_bytes") for kind in kinds)
        assert counted < memory.peak_bytes < 2 * counted
    needed = prediction.needed_bytes()
    assert needed[GPUS[0]] == prediction.memory[0].peak_bytes + UNCOUNTED_BYTES


@pytest.mark.parametrize(
    ("norm", "lowest", "highest"), [("group", 1.2, 1.35), *by_night(("batch", 0.5, 0.6))]
)
def test_autocast_is_predicted_as_gpus_do_it(norm, lowest, highest):
    """GPUs' autocast computes a group norm in float32, CPUs' does not.

    So autograd keeps a unit's norm input and output in float32, and the output once more, lowered,
    for the next convolution: 10 bytes instead of 8. A skip is lowered once for each of its two
    readers: 42 bytes instead of 32 for a level's four units. Lowered weights come on top.
    """
    model = WIDE.model_copy(update={"norm": norm})
    step = make_step(GPUS[:1], (128, 128, 128), 1, 1, "bfloat16", model)
    (lowered,) = activations(step)
    (full,) = activations(replace(step, layout=replace(step.layout, autocast=None)))
    assert lowest < lowered / full < highest


@pytest.mark.parametrize("devices", [GPUS[:2], (CPU, GPUS[0])])
def test_every_parameter_and_buffer_is_on_its_device(devices):
    found = predicted(step_of(devices, {"model": {"norm": "batch"}, "precision": "bfloat16"}))
    modules = {block.name: block.module for block in UNet3d(found.step.topology).blocks()}
    for slot in found.slots:
        own = [modules[name] for name in slot.blocks]
        sizes = [value.nbytes for one in own for value in (*one.parameters(), *one.buffers())]
        assert found.memory[slot.index].parameters_bytes == sum(sizes)


@pytest.mark.nightly
def test_the_more_is_made_again_the_less_is_kept():
    steps = [
        make_step(GPUS[:1], (256, 256, 256), 1, 1, "bfloat16", LARGE, recompute=how)
        for how in ("level", "norm", "off")
    ]
    (level,), (norm,), (off,) = map(activations, steps)
    assert level < 0.75 * norm and norm < 0.65 * off
    (level,), (norm,), (off,) = map(peaks, steps)
    assert level < 0.85 * norm and norm < 0.7 * off


@pytest.mark.parametrize(("how", "precision"), [("level", "bfloat16"), ("norm", "float32")])
@pytest.mark.nightly
def test_memory_of_a_gpu_does_not_depend_on_what_this_cpu_convolves_with(
    how, precision, monkeypatch
):
    step = make_step(GPUS[:2], (16, 16, 16), precision=precision, recompute=how)
    found = []
    try:
        for has_onednn in (True, False):  # without AVX-512, oneDNN does not compute in bfloat16
            torch._C._set_mkldnn_enabled(has_onednn)
            # Recalled results are kept for the whole process, and would hide a difference.
            monkeypatch.setattr(fake_results, "_known", {})
            found.append(predict_memory(step).memory)
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert found[0] == found[1]


STILL = DeviceAugmentation(
    settings=AugmentationSettings(),
    cases=(((64, 64, 64), (1.0, 1.0, 1.0)),),
    num_channels=2,
    voxel_bytes=2,
    label_bytes=1,
)


def test_a_slab_is_made_of_what_its_filters_reach():
    step = make_step(GPUS[:1], size=(64, 64, 64), num_shards=2)
    # Blur reaches 4 voxels and coarsening 3, so more voxels are made, in separate memory.
    made = (32 + 4 + 3) * 64**2
    assert replace(step, augmentation=STILL).staging_bytes() == (9 + 2 * 3 * 4) * made


@pytest.mark.parametrize("devices", [GPUS[:1], GPUS[:2]])
def test_augmentation_on_a_gpu_takes_a_second_batch_and_cuts(devices):
    step = make_step(devices, (64, 64, 64), precision="bfloat16", captures=False)
    alone, beside = predict_memory(step), predict_memory(replace(step, augmentation=STILL))
    voxels = 2 * 64**3
    image, target, workspace = voxels * 2 * 4, voxels, 32 * 2**20
    # If the last stage is on another GPU, the first GPU holds both targets in addition.
    targets = target if len(devices) == 1 else 2 * target
    more = beside.memory[0].peak_bytes - alone.memory[0].peak_bytes
    assert more == image + targets + workspace
    staging = 2 * max(5, 2 * 3 * 4) * 64**3  # both patches are made together
    needed = [one.needed_bytes()[devices[0]] for one in (alone, beside)]
    assert needed[1] - needed[0] == more + staging
    if len(devices) == 2:
        assert beside.memory[1] == alone.memory[1]


MEASURED: dict[str, tuple[dict[str, Any], list[int]]] = {
    "captured": ({"size": (128, 128, 128)}, [1897103872]),
    "launched": ({"size": (256, 256, 256), "batch_size": 1}, [6343517184]),
    "accumulated": ({"batch_size": 8, "num_micro_batches": 8}, [3306687488]),
    "two stages": (
        {"batch_size": 8, "num_micro_batches": 8, "num_gpus": 2},
        [4724516864, 4087266816],
    ),
    "two slabs": ({"size": (256, 256, 256), "batch_size": 1, "num_shards": 2}, [3473860096]),
}
"""Steps on two H100, with the peaks of their allocators
(``benchmarks/results/scaling-h100x4-2026-11-28.json``)."""


@pytest.mark.parametrize(("options", "measured"), by_day(MEASURED, "captured", "two slabs"))
def test_what_gpus_took_is_predicted_without_them(options, measured):
    changes = {"num_gpus": 1, "size": (192, 192, 192), "precision": "bfloat16", **options}
    step = step_of(GPUS[: changes.pop("num_gpus")], changes, LARGE)
    one_channel = replace(step.topology, in_channels=1)
    found = peaks(replace(step, topology=one_channel))
    assert found == pytest.approx(measured, rel=0.02)


@pytest.mark.nightly
def test_two_slots_on_one_gpu_share_its_peak():
    apart, shared = (make_step(gpus, precision="bfloat16") for gpus in (GPUS[:2], GPUS[1:2] * 2))
    peak, again = peaks(shared)
    assert peak == again
    assert max(peaks(apart)) < peak < sum(peaks(apart))
    assert predicted(shared).needed_bytes() == {GPUS[1]: peak + UNCOUNTED_BYTES}
    assert activations(shared) == pytest.approx(activations(apart), rel=0.02)


@pytest.mark.parametrize("has_bfloat16", [True, *by_night(False)])
def test_a_cpu_beside_a_gpu_computes_in_what_it_has(has_bfloat16, monkeypatch):
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: has_bfloat16)
    mixed = make_step((CPU, GPUS[0]), precision="bfloat16")
    on_cpu = activations(make_step(BOTH))
    lowered = activations(make_step(BOTH, precision="bfloat16"))
    first, second = activations(mixed)
    assert first == (lowered if has_bfloat16 else on_cpu)[0]
    assert second < on_cpu[1]
    assert list(predicted(mixed).needed_bytes()) == [CPU, GPUS[0]]


def test_the_slots_of_a_cpu_add_up():
    step = make_step(BOTH)
    prediction, total = predicted(step), sum(peaks(step))
    assert prediction.needed_bytes() == {CPU: total}
    assert prediction.load({CPU: total}) == 1
    assert prediction.load({CPU: total // 2}) > 1


@pytest.mark.nightly
def test_the_network_of_a_plan_is_that_of_the_training(tmp_path):
    shape = ["data.phantom_shape=30,40,20", "data.spacing_mm=native"]
    config = load_config(None, [f"data.cache={tmp_path}", "patches.memory_gib=1.2", *shape])
    experiment = plan_experiment(config, 0)
    planned = plan_without_data(config)
    assert (planned.topology, planned.size) == (experiment.topology, experiment.patch_size)
    assert planned.batch_size == experiment.config.training.batch_size


ON_GPU: dict[str, dict[str, Any]] = {
    "float32": {"precision": "float32"},
    "float16": {"precision": "float16"},
    "large": {"size": (192, 192, 192), "batch_size": 1},
    "group norm": {"model": {"norm": "group"}},
    "batch norm": {"model": {"norm": "batch"}},
    "offload": {"offload": "skips"},
    "accumulated level": {"recompute": "level", "num_micro_batches": 2},
    "two": {"num_gpus": 2},
    "two, many in flight": {"num_gpus": 2, "batch_size": 6, "num_micro_batches": 6},
    "two, offload": {"num_gpus": 2, "num_micro_batches": 2, "offload": "skips"},
}


@pytest.fixture
def empty_gpus():
    torch.cuda.init()
    gc.collect()
    release_streams()  # and cuBLAS's workspaces from other tests
    torch.cuda.empty_cache()
    for index in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(index)


@pytest.mark.usefixtures("empty_gpus")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            options, id=name, marks=pytest.mark.multigpu if name[:3] == "two" else pytest.mark.gpu
        )
        for name, options in ON_GPU.items()
    ],
)
def test_gpus_take_what_was_predicted(options):
    changes = {"num_gpus": 1, "size": (128, 128, 128), "precision": "bfloat16", **options}
    gpus = GPUS[: changes.pop("num_gpus")]
    step = step_of(gpus, {**changes, "captures": False}, LARGE)
    estimate = predict_memory(step)
    for index, found in measure(step).items():
        expected = estimate.memory[index]
        assert expected.parameters_bytes == found.parameters_bytes
        assert expected.gradients_bytes == found.gradients_bytes
        assert expected.optimizer_bytes == found.optimizer_bytes
        assert expected.activations_bytes == pytest.approx(found.activations_bytes, rel=0.02)
        # cuDNN's workspace is not counted; for some convolutions of small maps it takes 129 MiB.
        assert expected.peak_bytes == pytest.approx(found.peak_bytes, rel=0.10, abs=150 * 2**20)


@pytest.mark.usefixtures("empty_gpus")
@pytest.mark.parametrize(
    ("num_gpus", "num_micro_batches"),
    [
        pytest.param(1, 1, marks=pytest.mark.gpu),
        pytest.param(1, 4, marks=pytest.mark.gpu),
        pytest.param(2, 4, marks=pytest.mark.multigpu),
    ],
)
def test_captured_steps_take_what_was_predicted(num_gpus, num_micro_batches):
    options = {"batch_size": 4, "num_micro_batches": num_micro_batches, "precision": "bfloat16"}
    step = step_of(GPUS[:num_gpus], {"size": (128, 128, 128), **options}, LARGE)
    predicted = [memory.peak_bytes for memory in predict_memory(step).memory.values()]
    measured = [memory.peak_bytes for memory in measure(step, NUM_WARM_UP_STEPS + 2).values()]
    assert predicted == pytest.approx(measured, rel=0.02)


def test_maps_that_are_never_normalised_take_no_memory(monkeypatch):
    """The only reader of four units is a hand-written convolution: it normalises what it loads."""
    options = {"size": (64, 64, 64), "batch_size": 2, "precision": "bfloat16", "recompute": "off"}
    step, found = make_step(GPUS[:1], model=WIDE, **options), []
    for is_available in (False, True):
        monkeypatch.setattr(hopper, "available", lambda device, here=is_available: here)
        found.append(predict_memory(step).memory[0].activations_bytes)
    maps = 2 * 2 * (2 * 32 * 64**3 + 2 * 64 * 32**3)
    assert maps <= found[0] - found[1] <= 1.05 * maps
