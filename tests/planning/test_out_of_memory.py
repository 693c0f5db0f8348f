"""Messages when a GPU runs out of memory, or is predicted to."""

import re
from dataclasses import replace

import pytest
import torch

from tests.steps import CPU, GPUS, WIDE, make_step, predicted
from unet3d.errors import DoesNotFitError
from unet3d.memory import host
from unet3d.planning.memory_estimate import Step
from unet3d.planning.out_of_memory import (
    explain_out_of_memory,
    refuse_beyond_host,
    warn_if_too_large,
)

pytestmark = pytest.mark.usefixtures("launched")

OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.25 GiB. GPU 1 has a total capacity of 79.18 GiB of "
    "which 1.06 GiB is free. Including non-PyTorch memory, this process has 78.11 GiB in use."
)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * 1024**3, 80 * 1024**3))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)


def peaks_of(advice: str) -> list[float]:
    return [float(text.split()[0]) for text in advice.split("predicted peak ")[1].split(", ")]


def explained(step: Step, gpu: int = 0) -> str:
    """Return the message when a GPU has no memory for a step."""
    error = torch.OutOfMemoryError(OUT_OF_MEMORY.replace("GPU 1", f"GPU {gpu}"))
    message = explain_out_of_memory(error, step)
    assert "\n" not in message
    return message


@pytest.mark.usefixtures("two_gpus")
def test_out_of_memory_names_the_slot_and_what_would_fit():
    step = make_step(GPUS[:2], (192, 192, 192), 4, 1, "bfloat16", WIDE)
    message = explained(step, gpu=1)
    assert message.startswith("cuda:1 ran out of memory: 2.25 GiB asked, 1.06 GiB free; it holds ")
    assert "slot 1 (decoder.1.skip to head)" in message
    _, *advice = message.split("what would fit: ")[1].split("--")
    assert advice[0].startswith("micro-batches 4 (predicted peak ")
    assert max(peaks_of(advice[0])) < 10
    assert advice[1] == "parallel spatial "
    assert advice[2].startswith("devices 0,1 (predicted peak ")
    assert advice[3].startswith("set patches.size=")
    x, y, z = map(int, advice[3].split("=")[1].split(" ")[0].split(","))
    assert x == y == z < 192
    assert all(voxels % 4 == 0 for voxels in (x, y, z))


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("offload", ["none", "skips"])
@pytest.mark.nightly
def test_out_of_memory_on_one_gpu_thinks_of_the_other_and_of_the_host(offload):
    given = {"recompute": "off", "offload": offload}
    message = explained(make_step(GPUS[:1], (256, 256, 256), 1, 1, "bfloat16", WIDE, **given))
    assert "--parallel spatial --devices 0,1 (predicted peak " in message
    assert "--parallel model" not in message
    assert "--set memory.recompute=level (predicted peak " in message
    assert ("--set memory.offload=none --set memory.recompute" in message) == (offload == "skips")
    assert ("--set memory.offload=skips (predicted peak " in message) == (offload == "none")
    assert "--micro-batches" not in message  # a single sample has no micro-batches


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.nightly
def test_out_of_memory_of_a_shard_names_the_number_that_would_fit():
    step = make_step(GPUS[:1], (640, 512, 512), 1, 1, "bfloat16", WIDE, num_shards=2, shard=1)
    message = explained(replace(step, layout=replace(step.layout, devices=GPUS[1:2])), gpu=1)
    assert "with slab 1 of 2 of patches of 640x512x512 voxels" in message
    found = re.search(r"--parallel spatial over (\d+) GPUs like cuda:0 \(predicted peak", message)
    count = int(found[1])

    def peak(num_shards):
        sized = replace(step, layout=replace(step.layout, num_shards=num_shards, shard=0))
        return predicted(sized).needed_bytes()[GPUS[0]]

    assert count > 2 and peak(count) <= 20 * 1024**3 < peak(count - 1)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("change", [{"norm": "batch"}, {}], ids=str)
@pytest.mark.nightly
def test_stages_are_advised_where_a_volume_cannot_be_divided(change):
    size = (192, 192, 192) if change else (1, 2048, 2048)
    model = WIDE.model_copy(update={"channels": (32, 64), **change})
    message = explained(make_step(GPUS[:1], size, 2, 1, "bfloat16", model, recompute="off"))
    assert "--parallel model --devices 0,1" in message
    assert "--parallel spatial" not in message


@pytest.mark.usefixtures("two_gpus")
def test_a_training_that_will_not_fit_is_warned_of(caplog):
    fitting = predicted(make_step(GPUS[:2], precision="bfloat16"))
    warn_if_too_large(fitting)
    assert not caplog.records
    much = replace(fitting.memory[1], peak_bytes=20 * 1024**3)
    warn_if_too_large(replace(fitting, memory=fitting.memory | {1: much}))
    (record,) = caplog.records
    assert record.getMessage().startswith("cuda:1: predicted need 21.0 GiB, available 20.0 GiB")


def test_a_training_that_the_host_cannot_hold_is_refused(monkeypatch):
    step = make_step((CPU,), (64, 64, 64), 2, 1, "float32", WIDE)
    prediction = predicted(step)
    (needed,) = prediction.needed_bytes().values()
    monkeypatch.setattr(host, "available_bytes", lambda: needed)
    refuse_beyond_host(prediction)
    monkeypatch.setattr(host, "available_bytes", lambda: needed - 1)
    with pytest.raises(DoesNotFitError, match="training on the CPU takes .* of memory") as caught:
        refuse_beyond_host(prediction)
    _, *advice = str(caught.value).split("what would fit: ")[1].split("--")
    assert advice[0].startswith("micro-batches 2 (predicted peak ")
    assert all(peak < needed / 2**30 for peak in peaks_of(advice[0]))


def test_memory_of_the_host_that_runs_out_is_explained():
    error = MemoryError("Unable to allocate 3 GiB")
    message = explain_out_of_memory(error, make_step((CPU,), (32, 32, 32), 1, 1, "float32", WIDE))
    assert message.startswith("cpu ran out of memory")
    assert "slot 0" in message and "what would fit: " in message
