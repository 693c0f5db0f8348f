import platform
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.networks import random_checkpoint
from tests.products import each_value
from unet3d.errors import DeviceError
from unet3d.model import Topology, UNet3d, dice_cross_entropy
from unet3d.parallel import Layout, parallelize, precision
from unet3d.parallel.precision import (
    bfloat16_is_faster,
    check_precision,
    cpu_has_bfloat16,
    default_precision,
    lowered_on,
    memory_format,
    precision_on,
    resolve_precision,
)

CPU = torch.device("cpu")
GPUS = [torch.device("cuda", index) for index in range(2)]
LAST, FIRST = torch.channels_last_3d, torch.contiguous_format
CHANNELS = (5, 10)


def pretend(monkeypatch, num_gpus, capability=(9, 0), cudnn=91900, cpu_bfloat16=False):
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: cpu_bfloat16)
    monkeypatch.setattr(precision, "bfloat16_is_faster", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)


def test_the_default_precision_is_the_best_that_is_right(monkeypatch):
    for capability, cudnn, devices, expected in (
        ((9, 0), 91900, [GPUS[0]], "bfloat16"),
        ((8, 0), None, [GPUS[0], CPU], "bfloat16"),
        ((7, 5), 91900, [CPU, GPUS[0]], "float16"),
        ((9, 0), 91002, [GPUS[0]], "float16"),
        ((9, 0), 91002, [CPU, CPU], "float32"),
    ):
        pretend(monkeypatch, 1, capability, cudnn)
        assert default_precision(devices) == expected
    pretend(monkeypatch, 2)  # one older GPU decides for all
    capabilities = {GPUS[0]: (9, 0), GPUS[1]: (7, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert (default_precision(GPUS[:1]), default_precision(GPUS)) == ("bfloat16", "float16")


def test_bfloat16_is_refused_with_a_cudnn_that_gets_it_wrong(monkeypatch):
    for cudnn in (90800, 91002, 91400):
        pretend(monkeypatch, 1, cudnn=cudnn, cpu_bfloat16=True)
        with pytest.raises(DeviceError, match=rf"cuDNN {cudnn} .*163539.*float16"):
            check_precision("bfloat16", [CPU, GPUS[0]])
        check_precision("float16", GPUS[:1])
        check_precision("bfloat16", [CPU])
    for cudnn in (90701, 91500, None):
        pretend(monkeypatch, 1, cudnn=cudnn)
        check_precision("bfloat16", [CPU, GPUS[0]])


def test_ranks_that_differ_agree_on_less(monkeypatch):
    pretend(monkeypatch, 1)
    assert resolve_precision("auto", GPUS[:1], lambda own: [own, "bfloat16"]) == "bfloat16"
    assert resolve_precision("auto", GPUS[:1], lambda own: [own, "float16"]) == "float16"
    pretend(monkeypatch, 1, cudnn=91002)
    with pytest.raises(DeviceError, match="163539"):
        resolve_precision("bfloat16", GPUS[:1])
    # A GPU of another machine is assumed to have bfloat16; a CPU uses it if it has it.
    for has_bfloat16 in (True, False):
        pretend(monkeypatch, 0, cpu_bfloat16=has_bfloat16)
        assert resolve_precision("auto", GPUS[:1]) == "bfloat16"
        assert resolve_precision("float32", GPUS[:1]) == "float32"
        best = "bfloat16" if has_bfloat16 else "float32"
        assert resolve_precision("auto", [CPU, CPU]) == best
        assert resolve_precision("auto", [CPU], lambda own: [own, "float32"]) == "float32"


def test_what_a_cpu_would_emulate_is_refused(monkeypatch):
    pretend(monkeypatch, 0, cpu_bfloat16=False)
    with pytest.raises(DeviceError, match=r"bfloat16 is slower.*use training\.precision=float32"):
        resolve_precision("bfloat16", [CPU])
    with pytest.raises(DeviceError, match="float16 needs a GPU; use training.precision=auto"):
        resolve_precision("float16", [CPU])
    # A CPU beside a GPU computes in float32 instead.
    pretend(monkeypatch, 1, cpu_bfloat16=False)
    assert resolve_precision("bfloat16", [GPUS[0], CPU]) == "bfloat16"


def test_each_device_lowers_to_what_it_has(monkeypatch):
    for device, wanted, cpu_bfloat16, expected in (
        (GPUS[0], "bfloat16", False, "bfloat16"),
        (GPUS[0], "float16", True, "float16"),
        (CPU, "bfloat16", True, "bfloat16"),
        (CPU, "bfloat16", False, "float32"),
        (CPU, "float16", True, "float32"),
        (CPU, "float32", True, "float32"),
        (CPU, "float64", True, "float64"),
    ):
        pretend(monkeypatch, 1, cpu_bfloat16=cpu_bfloat16)
        assert precision_on(device, wanted) == expected
        dtype = lowered_on(device, precision.autocast_dtype(wanted))
        assert (str(dtype) == f"torch.{expected}") == (dtype is not None)


@pytest.mark.parametrize(
    ("flags", "expected"), [("avx512f avx512_bf16", True), ("amx_bf16 amx_tile", True), ("", False)]
)
def test_emulation_is_no_hardware(monkeypatch, flags, expected):
    """PyTorch names the processor's features in private functions only."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: "avx512_bf16" in flags)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: "amx_tile" in flags)
    assert cpu_has_bfloat16.__wrapped__() == expected


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs Linux")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86 processor")
def test_the_hardware_is_what_the_kernel_reports():
    flags = Path("/proc/cpuinfo").read_text().split()
    assert cpu_has_bfloat16() == bool({"avx512_bf16", "amx_bf16"} & set(flags))


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """Fake times of a convolution by type, and a list of the types that were timed."""
    seconds, asked = {torch.float32: 0.0138, torch.bfloat16: 0.0294}, []

    def time(dtype):
        asked.append(dtype)
        return seconds[dtype]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr(precision, "bfloat16_is_faster", bfloat16_is_faster.__wrapped__)
    monkeypatch.setattr(precision, "convolution_seconds", time)
    return seconds, asked


def test_a_cpu_computes_in_what_it_convolves_faster_in(timed, caplog, tmp_path):
    caplog.set_level("DEBUG", "unet3d.parallel")
    seconds, asked = timed
    assert resolve_precision("auto", [CPU]) == "float32"
    (line,) = caplog.messages
    assert line.startswith("this CPU computes in float32") and "13.8" in line and "29.4" in line
    seconds[torch.bfloat16] = 0.001
    assert resolve_precision("auto", [CPU]) == "float32"  # measured once per processor
    assert asked == [torch.float32, torch.bfloat16]
    (record,) = tmp_path.glob("unet3d/processors/*.json")
    record.write_text("{}")  # damaged
    assert resolve_precision("auto", [CPU]) == "bfloat16"
    record.write_text("{}")
    seconds[torch.bfloat16] = 0.8 * seconds[torch.float32]  # too little gain for its rounding
    assert resolve_precision("auto", [CPU]) == "float32"
    # A precision that is set needs no measurement, nor does a CPU without bfloat16.
    assert resolve_precision("bfloat16", [CPU]) == "bfloat16"
    assert len(asked) == 6


def test_a_cpu_is_measured_where_nothing_can_be_kept(timed, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/folder")
    for _ in range(2):
        assert resolve_precision("auto", [CPU]) == "float32"
    assert len(timed[1]) == 4


@pytest.mark.nightly
def test_a_convolution_is_timed_in_both_types_without_drawing_numbers():
    before = torch.get_rng_state()
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            assert 0 < precision.convolution_seconds(dtype) < 60
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("cuts", [(), (3,)])
def test_a_prediction_may_have_another_precision_than_the_training(cuts, monkeypatch):
    pretend(monkeypatch, 0, cpu_bfloat16=True)
    plain, model = (random_checkpoint().build_model().eval() for _ in range(2))
    devices = (CPU,) * (1 + len(cuts))
    executor = parallelize(model, Layout(devices=devices, cuts=cuts, autocast=torch.bfloat16))
    image = torch.randn(1, 1, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = plain(image)
    lowered = executor.predict(image)
    assert lowered.dtype == torch.bfloat16
    assert torch.equal(executor.predict(image, "bfloat16"), lowered)
    found = executor.predict(image, "float32")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
    assert torch.equal(executor.predict(image), lowered)  # as in training


@pytest.mark.parametrize("has_onednn", [True, False])
def test_what_is_lowered_on_a_gpu_or_convolved_by_onednn_has_its_channels_last(
    monkeypatch, has_onednn
):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_onednn)
    lowered = LAST if has_onednn else FIRST
    for dtype, on_gpu, on_cpu in (
        (torch.bfloat16, LAST, lowered),
        (torch.float16, LAST, lowered),
        (torch.float32, FIRST, lowered),
        (torch.float64, FIRST, FIRST),
    ):
        formats = [
            memory_format(device, dtype) for device in (GPUS[0], torch.device("cpu", 0), CPU)
        ]
        assert formats == [on_gpu, on_gpu, on_cpu]


class Formats(TorchDispatchMode):
    """Records channels-first maps, and operations that change a map's memory format."""

    def __init__(self):
        super().__init__()
        self.first: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        given = {value.data_ptr() for value in args if isinstance(value, Tensor)}
        for value in made if isinstance(made, tuple | list) else (made,):
            # Only the image and the logits have other channels. Views of a map have its format.
            is_map = isinstance(value, Tensor) and value.dim() == 5 and value.shape[1] in CHANNELS
            is_first = is_map and not value.is_contiguous(memory_format=LAST)
            if is_first and value.data_ptr() not in given:
                self.first.append(f"{func} {tuple(value.shape)}")
        return made


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
@each_value(
    encoder=["plain", "residual"],
    autocast=[torch.bfloat16, None],
    batch_size=[1, 2],
    recompute=["norm", "off", "level"],
)
def test_no_map_of_a_network_changes_its_format(encoder, autocast, batch_size, recompute):
    topology = Topology(
        in_channels=1,
        num_classes=3,
        channels=(*CHANNELS, CHANNELS[-1]),
        strides=((1, 1, 1), (2, 2, 2), (1, 2, 2)),
        encoder=encoder,
        deep_supervision=True,
    )
    layout = Layout(devices=(CPU, CPU), autocast=autocast, recompute=recompute)
    executor = parallelize(UNet3d(topology), layout)
    image = torch.randn(batch_size, 1, 16, 16, 8)
    target = torch.randint(3, (batch_size, 16, 16, 8))
    with Formats() as formats:
        executor.forward_backward(image, target, dice_cross_entropy)
        executor.module.eval()
        executor.predict(image)
    assert formats.first == []
