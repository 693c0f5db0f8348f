import pytest
import torch

from unet3d.errors import DeviceError
from unet3d.parallel.precision import check_precision, default_precision, resolve_precision

CPU = torch.device("cpu")
GPUS = [torch.device("cuda", index) for index in range(2)]


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    num_gpus: int,
    capability: tuple[int, int] = (9, 0),
    cudnn: int | None = 91900,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)


@pytest.mark.parametrize(
    ("capability", "cudnn", "devices", "precision"),
    [
        ((9, 0), 91900, [GPUS[0]], "bfloat16"),
        ((8, 0), 90701, [GPUS[0], CPU], "bfloat16"),
        ((7, 5), 91900, [GPUS[0]], "float16"),
        ((6, 0), 91900, [CPU, GPUS[0]], "float16"),
        ((9, 0), 91002, [GPUS[0]], "float16"),
        ((9, 0), 91002, [CPU, CPU], "float32"),
        ((9, 0), None, [GPUS[0]], "bfloat16"),
    ],
)
def test_the_default_precision_is_the_best_that_is_right(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    cudnn: int | None,
    devices: list[torch.device],
    precision: str,
) -> None:
    pretend(monkeypatch, 1, capability, cudnn)
    assert default_precision(devices) == precision


def test_one_old_gpu_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 2)
    capabilities = {GPUS[0]: (9, 0), GPUS[1]: (7, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert default_precision(GPUS[:1]) == "bfloat16"
    assert default_precision(GPUS[:2]) == "float16"


@pytest.mark.parametrize(
    ("cudnn", "is_wrong"),
    [(90701, False), (90800, True), (91002, True), (91400, True), (91500, False), (None, False)],
)
def test_bfloat16_is_refused_with_a_cudnn_that_gets_it_wrong(
    monkeypatch: pytest.MonkeyPatch, cudnn: int | None, is_wrong: bool
) -> None:
    pretend(monkeypatch, 1, cudnn=cudnn)
    if is_wrong:
        with pytest.raises(DeviceError, match=rf"cuDNN {cudnn} .*163539.*float16"):
            check_precision("bfloat16", [CPU, GPUS[0]])
    else:
        check_precision("bfloat16", [CPU, GPUS[0]])
    check_precision("float16", GPUS[:1])
    check_precision("bfloat16", [CPU])


def test_a_gpu_of_another_machine_is_taken_to_have_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, 0)
    assert resolve_precision("auto", GPUS[:1]) == "bfloat16"
    assert resolve_precision("float32", GPUS[:1]) == "float32"


def test_ranks_that_differ_agree_on_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1)
    assert resolve_precision("auto", GPUS[:1], lambda own: [own, "bfloat16"]) == "bfloat16"
    assert resolve_precision("auto", GPUS[:1], lambda own: [own, "float16"]) == "float16"
    with pytest.raises(DeviceError, match="163539"):
        pretend(monkeypatch, 1, cudnn=91002)
        resolve_precision("bfloat16", GPUS[:1])
