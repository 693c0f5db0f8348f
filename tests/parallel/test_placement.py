import pytest
import torch

from unet3d.config import ParallelSettings
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError, DeviceError, Unet3dError
from unet3d.parallel import (
    check_data_parallel,
    check_precision,
    default_precision,
    devices_of_rank,
    devices_of_replicas,
    output_device,
    resolve_devices,
)
from unet3d.parallel.placement import describe_devices

CPU = torch.device("cpu")
GPUS = [torch.device("cuda", index) for index in range(4)]


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    num_gpus: int,
    capability: tuple[int, int] = (9, 0),
    cudnn: int | None = 91900,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Model {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)


def resolve(mode: str, devices: str | None) -> tuple[torch.device, ...]:
    return resolve_devices(ParallelSettings(mode=mode, devices=devices))


def refusal(mode: str, devices: str | None) -> str:
    with pytest.raises(DeviceError) as caught:
        resolve(mode, devices)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("mode", "names", "devices"),
    [
        ("none", "cpu", (CPU,)),
        ("none", "1", (GPUS[1],)),
        ("none", "cuda", (GPUS[0],)),
        ("model", "cpu,cpu", (CPU, CPU)),
        ("model", "cpu,0", (CPU, GPUS[0])),
        ("model", "0, cuda:1,cpu", (GPUS[0], GPUS[1], CPU)),
        ("model", "1,1", (GPUS[1], GPUS[1])),
    ],
)
def test_names_become_devices(
    monkeypatch: pytest.MonkeyPatch, mode: str, names: str, devices: tuple[torch.device, ...]
) -> None:
    pretend(monkeypatch, 2)
    assert resolve(mode, names) == devices


@pytest.mark.parametrize(
    ("num_gpus", "mode", "devices"),
    [
        (0, "none", (CPU,)),
        (3, "none", (GPUS[0],)),
        (0, "model", (CPU, CPU)),
        (3, "model", (GPUS[0], GPUS[1])),
    ],
)
def test_defaults_follow_the_machine(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, mode: str, devices: tuple[torch.device, ...]
) -> None:
    pretend(monkeypatch, num_gpus)
    assert resolve(mode, None) == devices


@pytest.mark.parametrize(
    "name", ["gpu0", "cuda:", "cuda:x", "-1", "CPU", "cpu:0", "mps", "", "1.5"]
)
def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pretend(monkeypatch, 2)
    message = refusal("none", name)
    assert message == f"device {name!r} is unknown; write 0, cuda:0 or cpu"


def test_a_gpu_that_does_not_exist_says_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 2)
    assert refusal("none", "2") == (
        "device '2' does not exist; this machine has cpu and cuda:0 (Model 0), cuda:1 (Model 1)"
    )
    assert "device 'cuda:7' does not exist" in refusal("model", "0,cuda:7")
    pretend(monkeypatch, 0)
    assert refusal("model", "cpu,0") == (
        "device '0' does not exist; this machine has cpu and no CUDA GPU"
    )


def test_the_number_of_devices_suits_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 2)
    message = refusal("none", "0,1")
    assert "devices 0,1 but parallel mode none uses one; add --parallel model" in message
    assert "needs a device for each of two stages or more, got 0;" in refusal("model", "0")


def test_one_gpu_is_too_few_to_guess_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1)
    message = refusal("model", None)
    assert "cuda:0 (Model 0)" in message and "--devices 0,cpu" in message


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


def test_the_machine_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1)
    assert describe_devices() == "cpu and cuda:0 (Model 0)"


@pytest.mark.parametrize(
    ("settings", "replicas"),
    [
        ({"mode": "none"}, ((GPUS[0],),)),
        ({"mode": "data"}, ((GPUS[0],), (GPUS[1],), (GPUS[2],), (GPUS[3],))),
        ({"mode": "data", "devices": "3,1"}, ((GPUS[3],), (GPUS[1],))),
        ({"mode": "data", "devices": "cpu,cpu"}, ((CPU,), (CPU,))),
        ({"mode": "data", "engine": "dataparallel", "devices": "0,1"}, (tuple(GPUS[:2]),)),
        ({"mode": "model", "replicas": 2}, (tuple(GPUS[:2]), tuple(GPUS[2:]))),
        (
            {"mode": "model", "replicas": 2, "devices": "0,cpu,1,cpu"},
            ((GPUS[0], CPU), (GPUS[1], CPU)),
        ),
        ({"mode": "model", "replicas": 2, "devices": "0,0,1,1"}, ((GPUS[0],) * 2, (GPUS[1],) * 2)),
    ],
    ids=str,
)
def test_devices_are_divided_over_the_replicas(
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, object],
    replicas: tuple[tuple[torch.device, ...], ...],
) -> None:
    pretend(monkeypatch, 4)
    assert devices_of_replicas(ParallelSettings(**settings)) == replicas


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"mode": "model", "replicas": 2, "devices": "0,1,2"}, "do not divide by 2 replicas"),
        ({"mode": "model", "replicas": 3, "devices": "0,1"}, "do not divide by 3 replicas"),
        ({"mode": "model", "replicas": 2, "devices": "0,1"}, "give each of 2 replicas one, but"),
        ({"mode": "model", "replicas": 2, "devices": "0,1,0,1"}, "put two replicas on one GPU"),
        ({"mode": "data", "devices": "0,0"}, "put two replicas on one GPU"),
        ({"mode": "data", "devices": "0,cpu"}, "cuda:0 and cpu cannot exchange gradients"),
        ({"mode": "data", "devices": "0,7"}, "device '7' does not exist"),
    ],
    ids=str,
)
def test_devices_that_replicas_cannot_share_are_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], reason: str
) -> None:
    pretend(monkeypatch, 4)
    with pytest.raises(DeviceError) as caught:
        devices_of_replicas(ParallelSettings(**settings))
    assert reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("num_gpus", "settings", "ranks", "devices"),
    [
        (
            4,
            {"mode": "data"},
            Ranks(rank=5, world_size=8, local_rank=1, local_world_size=4),
            (GPUS[1],),
        ),
        (
            4,
            {"mode": "data", "devices": "2,3"},
            Ranks(rank=3, world_size=4, local_rank=1, local_world_size=2),
            (GPUS[3],),
        ),
        (
            4,
            {"mode": "model"},
            Ranks(rank=1, world_size=2, local_rank=1, local_world_size=2),
            (GPUS[2], GPUS[3]),
        ),
        (
            4,
            {"mode": "model"},
            Ranks(rank=1, world_size=2, local_rank=0, local_world_size=1),
            tuple(GPUS),
        ),
        (
            4,
            {"mode": "model", "replicas": 2},
            Ranks(rank=0, world_size=2, local_rank=0, local_world_size=2),
            (GPUS[0], GPUS[1]),
        ),
        (
            0,
            {"mode": "data"},
            Ranks(rank=1, world_size=2, local_rank=1, local_world_size=2),
            (CPU,),
        ),
        (
            0,
            {"mode": "model"},
            Ranks(rank=1, world_size=2, local_rank=1, local_world_size=2),
            (CPU, CPU),
        ),
    ],
    ids=str,
)
def test_a_rank_drives_its_share_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
    num_gpus: int,
    settings: dict[str, object],
    ranks: Ranks,
    devices: tuple[torch.device, ...],
) -> None:
    pretend(monkeypatch, num_gpus)
    assert devices_of_rank(ParallelSettings(**settings), ranks) == devices


@pytest.mark.parametrize(
    ("settings", "ranks", "kind", "reason"),
    [
        (
            {"mode": "data"},
            Ranks(rank=0, world_size=5, local_rank=0, local_world_size=5),
            DeviceError,
            "'4' does not exist",
        ),
        (
            {"mode": "data", "devices": "0,1,2"},
            Ranks(rank=0, world_size=2, local_rank=0, local_world_size=2),
            DeviceError,
            "do not divide by 2",
        ),
        (
            {"mode": "data", "devices": "0,1"},
            Ranks(rank=0, world_size=2, local_rank=0, local_world_size=1),
            DeviceError,
            "needs one",
        ),
        (
            {"mode": "model", "devices": "0,1"},
            Ranks(rank=0, world_size=2, local_rank=0, local_world_size=2),
            DeviceError,
            "at least two",
        ),
        (
            {"mode": "model", "replicas": 3},
            Ranks(rank=0, world_size=2, local_rank=0, local_world_size=2),
            ConfigError,
            "2 ranks were started",
        ),
        (
            {"mode": "data", "engine": "dataparallel"},
            Ranks(rank=0, world_size=2, local_rank=0, local_world_size=2),
            ConfigError,
            "parallel.engine=ddp under torchrun",
        ),
    ],
    ids=str,
)
def test_a_rank_without_devices_of_its_own_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, object],
    ranks: Ranks,
    kind: type[Unet3dError],
    reason: str,
) -> None:
    pretend(monkeypatch, 4)
    with pytest.raises(kind) as caught:
        devices_of_rank(ParallelSettings(**settings), ranks)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_the_output_device_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 2)
    assert output_device(ParallelSettings()) is None
    assert output_device(ParallelSettings(output_device=1)) == GPUS[1]
    with pytest.raises(DeviceError, match="device '2' does not exist"):
        output_device(ParallelSettings(output_device="2"))


@pytest.mark.parametrize(
    ("devices", "output", "batch_size", "reason"),
    [
        ((CPU, CPU), None, 2, "parallel.engine=ddp"),
        ((GPUS[0], GPUS[0]), None, 2, "each named once"),
        ((GPUS[0], CPU), None, 2, "not to cuda:0,cpu"),
        (tuple(GPUS[:2]), GPUS[2], 2, "parallel.output_device is cuda:2, which is none of"),
        (tuple(GPUS[:3]), None, 1, "a batch of 1 gives 2 of the 3 devices no patch"),
    ],
    ids=str,
)
def test_nn_data_parallel_is_refused_where_it_cannot_work(
    devices: tuple[torch.device, ...], output: torch.device | None, batch_size: int, reason: str
) -> None:
    with pytest.raises(Unet3dError) as caught:
        check_data_parallel(devices, output, batch_size)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_nn_data_parallel_takes_gpus_with_a_patch_each() -> None:
    check_data_parallel(GPUS[:2], GPUS[1], 2)
    check_data_parallel(GPUS[:2], None)
