import pytest
import torch

from unet3d.config import ParallelSettings
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError, DeviceError, Unet3dError
from unet3d.parallel import Machine, ParallelDims

CPU = torch.device("cpu")
GPUS = [torch.device("cuda", index) for index in range(4)]


def machine(num_gpus: int) -> Machine:
    """Return a machine that need not be this one: nothing here looks for devices."""
    gpus = ", ".join(f"cuda:{index} (Model {index})" for index in range(num_gpus))
    return Machine(num_gpus=num_gpus, description=f"cpu and {gpus or 'no CUDA GPU'}")


def resolve(num_gpus: int, mode: str, devices: str | None) -> tuple[torch.device, ...]:
    settings = ParallelSettings(mode=mode, devices=devices)
    return ParallelDims.resolve(settings, machine(num_gpus)).devices


def refusal(num_gpus: int, mode: str, devices: str | None) -> str:
    with pytest.raises(DeviceError) as caught:
        resolve(num_gpus, mode, devices)
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
def test_names_become_devices(mode: str, names: str, devices: tuple[torch.device, ...]) -> None:
    assert resolve(2, mode, names) == devices


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
    num_gpus: int, mode: str, devices: tuple[torch.device, ...]
) -> None:
    assert resolve(num_gpus, mode, None) == devices


@pytest.mark.parametrize("name", ["gpu0", "cuda:", "cuda:x", "-1", "CPU", "cpu:0", "mps", "1.5"])
def test_an_unknown_name_is_refused(name: str) -> None:
    message = refusal(2, "none", name)
    assert message == f"device {name!r} is unknown; write 0, cuda:0 or cpu"


def test_a_gpu_that_does_not_exist_says_what_there_is() -> None:
    assert refusal(2, "none", "2") == (
        "device '2' does not exist; this machine has cpu and cuda:0 (Model 0), cuda:1 (Model 1)"
    )
    assert "device 'cuda:7' does not exist" in refusal(2, "model", "0,cuda:7")
    assert refusal(0, "model", "cpu,0") == (
        "device '0' does not exist; this machine has cpu and no CUDA GPU"
    )


def test_the_number_of_devices_suits_the_mode() -> None:
    message = refusal(2, "none", "0,1")
    assert "devices 0,1 but parallel mode none uses one; add --parallel model" in message
    assert "needs a device for each of two stages or more, got 0;" in refusal(2, "model", "0")


def test_one_gpu_is_too_few_to_guess_a_second() -> None:
    message = refusal(1, "model", None)
    assert "cuda:0 (Model 0)" in message and "--devices 0,cpu" in message


def test_the_machine_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Model {index}")
    assert Machine.here() == Machine(num_gpus=1, description="cpu and cuda:0 (Model 0)")


def test_a_plan_may_be_for_another_machine() -> None:
    settings = ParallelSettings(mode="model", devices="5,6")
    imagined = Machine(num_gpus=0, is_real=False)
    assert [device.index for device in ParallelDims.resolve(settings, imagined).devices] == [5, 6]


@pytest.mark.parametrize(
    ("settings", "replicas"),
    [
        ({"mode": "none"}, ((GPUS[0],),)),
        ({"mode": "data"}, ((GPUS[0],), (GPUS[1],), (GPUS[2],), (GPUS[3],))),
        ({"mode": "data", "devices": "3,1"}, ((GPUS[3],), (GPUS[1],))),
        ({"mode": "data", "devices": "cpu,cpu"}, ((CPU,), (CPU,))),
        ({"mode": "data", "engine": "dataparallel", "devices": "0,1"}, ((GPUS[0],), (GPUS[1],))),
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
    settings: dict[str, object],
    replicas: tuple[tuple[torch.device, ...], ...],
) -> None:
    assert ParallelDims.resolve(ParallelSettings(**settings), machine(4)).replicas == replicas


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
    settings: dict[str, object], reason: str
) -> None:
    with pytest.raises(DeviceError) as caught:
        ParallelDims.resolve(ParallelSettings(**settings), machine(4))
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
    num_gpus: int,
    settings: dict[str, object],
    ranks: Ranks,
    devices: tuple[torch.device, ...],
) -> None:
    assert (
        ParallelDims.resolve(ParallelSettings(**settings), machine(num_gpus), ranks).devices
        == devices
    )


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
    settings: dict[str, object],
    ranks: Ranks,
    kind: type[Unet3dError],
    reason: str,
) -> None:
    with pytest.raises(kind) as caught:
        ParallelDims.resolve(ParallelSettings(**settings), machine(4), ranks)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def threads(devices: str, output_device: str | None = None) -> ParallelDims:
    settings = ParallelSettings(
        mode="data", engine="dataparallel", devices=devices, output_device=output_device
    )
    return ParallelDims.resolve(settings, machine(4))


@pytest.mark.parametrize(
    ("devices", "output_device", "kind", "reason"),
    [
        ("0,cpu", None, DeviceError, "to GPUs, each named once, not to cuda:0,cpu"),
        ("0,0", None, DeviceError, "to GPUs, each named once, not to cuda:0,cuda:0"),
        ("0,1", "2", DeviceError, "parallel.output_device is cuda:2, which is none of"),
        ("0,1", "7", DeviceError, "device '7' does not exist"),
    ],
)
def test_nn_data_parallel_takes_different_gpus(
    devices: str, output_device: str | None, kind: type[Unet3dError], reason: str
) -> None:
    with pytest.raises(kind) as caught:
        threads(devices, output_device)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_threads_are_one_process_with_a_patch_for_each() -> None:
    dims = threads("0,1,3", "1")
    assert (dims.num_processes, dims.num_replicas, dims.devices) == (1, 3, (*GPUS[:2], GPUS[3]))
    assert dims.gather_device == GPUS[1] and not dims.predicts_memory
    assert dims.check_batch(3) is None
    with pytest.raises(ConfigError, match="a batch of 2 gives 1 of the 3 devices no patch"):
        dims.check_batch(2)


def test_replicas_in_processes_may_be_idle_and_say_so() -> None:
    dims = ParallelDims.resolve(ParallelSettings(mode="data", devices="cpu,cpu,cpu"), machine(0))
    assert (dims.num_processes, dims.num_replicas) == (3, 3)
    assert (dims.share_of(7), dims.check_batch(3)) == (3, None)
    assert "a batch of 2 leaves 1 of 3 replicas without work" in (dims.check_batch(2) or "")
