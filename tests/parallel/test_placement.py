import pytest
import torch

from unet3d.config import Config, ParallelSettings, load_config
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError, DeviceError, Unet3dError
from unet3d.parallel import Layout, Machine, ParallelDims

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
    assert message == (
        "devices 0,1 but parallel mode none uses one; use --parallel auto, or name one device"
    )
    assert "needs a device for each of two stages or more, got 0;" in refusal(2, "model", "0")


def test_one_gpu_is_too_few_to_guess_a_second() -> None:
    message = refusal(1, "model", None)
    assert "cuda:0 (Model 0)" in message and "--devices 0,cpu" in message
    message = refusal(1, "spatial", None)
    assert "cuda:0 (Model 0)" in message and "use --parallel none" in message


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


def spatial(devices: str | None, replicas: int = 1, ranks: Ranks | None = None) -> ParallelDims:
    settings = ParallelSettings(mode="spatial", devices=devices, replicas=replicas)
    return ParallelDims.resolve(settings, machine(4), ranks)


@pytest.mark.parametrize(
    ("num_gpus", "devices", "num_replicas", "replicas"),
    [
        (4, None, 1, (tuple(GPUS),)),
        (4, None, 2, (tuple(GPUS[:2]), tuple(GPUS[2:]))),
        (4, "3,1", 1, ((GPUS[3], GPUS[1]),)),
        (1, "cpu,cpu", 1, ((CPU, CPU),)),
        (0, None, 1, ((CPU, CPU),)),
        (0, None, 3, ((CPU, CPU),) * 3),
        (0, "cpu,cpu,cpu", 1, ((CPU,) * 3,)),
    ],
)
def test_each_shard_has_a_process_and_a_device(
    num_gpus: int,
    devices: str | None,
    num_replicas: int,
    replicas: tuple[tuple[torch.device, ...], ...],
) -> None:
    settings = ParallelSettings(mode="spatial", devices=devices, replicas=num_replicas)
    dims = ParallelDims.resolve(settings, machine(num_gpus))
    assert dims.mode == "spatial" and dims.replicas == replicas
    assert (dims.num_replicas, dims.num_shards) == (num_replicas, len(replicas[0]))
    assert dims.num_processes == num_replicas * dims.num_shards == len(dims.all_devices)
    assert dims.devices == replicas[0][:1] and dims.num_stages == 1
    assert dims.share_of(3) == -(-3 // num_replicas)


@pytest.mark.parametrize(
    ("ranks", "devices", "num_replicas", "own", "group"),
    [
        # Two groups of two on one machine; one group over two machines; and groups of three on
        # machines of two.
        (Ranks(rank=3, world_size=4, local_rank=3, local_world_size=4), None, 2, GPUS[3], (1, 1)),
        (Ranks(rank=4, world_size=8, local_rank=0, local_world_size=4), None, 1, GPUS[0], (0, 4)),
        (Ranks(rank=3, world_size=6, local_rank=1, local_world_size=2), None, 2, GPUS[1], (1, 0)),
        (Ranks(rank=2, world_size=6, local_rank=0, local_world_size=2), "3,1", 2, GPUS[3], (0, 2)),
        (Ranks(rank=1, world_size=2, local_rank=1, local_world_size=2), "cpu,cpu", 1, CPU, (0, 1)),
    ],
    ids=str,
)
def test_a_rank_has_one_slab_of_one_replica(
    ranks: Ranks,
    devices: str | None,
    num_replicas: int,
    own: torch.device,
    group: tuple[int, int],
) -> None:
    dims = spatial(devices, num_replicas, ranks)
    assert dims.devices == (own,)
    assert (dims.num_replicas, dims.num_shards) == (num_replicas, ranks.world_size // num_replicas)
    assert (dims.replica_of(ranks.rank), dims.shard_of(ranks.rank)) == group
    assert dims.num_processes == ranks.local_world_size
    layout = Layout.of(Config(), dims, "float32")
    assert layout.devices == (own,)
    assert (layout.num_replicas, layout.num_shards) == (num_replicas, dims.num_shards)
    assert layout.shard == group[1]


@pytest.mark.parametrize(
    ("devices", "replicas", "batch_dice", "expected"),
    [
        ("0,1", 1, "true", "auto"),
        ("0,1,2,3", 2, "true", "off"),
        ("0,1,2,3", 2, "false", "auto"),
    ],
)
def test_replicas_that_tell_one_another_sums_launch_their_steps(
    devices: str, replicas: int, batch_dice: str, expected: str
) -> None:
    config = load_config(None, [f"training.batch_dice={batch_dice}"])
    dims = spatial(devices, replicas)
    assert Layout.of(config, dims, "float32").cuda_graphs == expected


def test_replicas_that_cross_machines_are_listed_as_far_as_they_are_here() -> None:
    ranks = Ranks(rank=2, world_size=6, local_rank=0, local_world_size=2)
    assert spatial(None, 2, ranks).replicas == ((GPUS[0],), (GPUS[1],))
    ranks = Ranks(rank=0, world_size=6, local_rank=0, local_world_size=2)
    assert spatial(None, 2, ranks).replicas == ((GPUS[0], GPUS[1]),)


@pytest.mark.parametrize(
    ("devices", "replicas", "reason"),
    [
        ("0", 1, "needs a device for each of two slabs or more, got 0; name two (cpu may be"),
        ("cpu", 1, "needs a device for each of two slabs or more, got cpu;"),
        ("0,0", 1, "put two slabs on one GPU, which NCCL refuses"),
        ("0,cpu", 1, "cuda:0,cpu are of different kinds, which cannot share a volume"),
        ("0,cpu,1,cpu", 2, "are of different kinds"),
        ("0,1,2", 2, "do not divide by 2 replicas"),
        ("0,1", 2, "give each of 2 replicas one, but parallel mode spatial needs"),
        ("0,7", 1, "device '7' does not exist"),
    ],
)
def test_devices_that_cannot_share_a_volume_are_refused(
    devices: str, replicas: int, reason: str
) -> None:
    with pytest.raises(DeviceError) as caught:
        spatial(devices, replicas)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("devices", "replicas", "num_ranks", "reason"),
    [
        (None, 2, 3, "parallel.replicas is 2 but 3 ranks were started"),
        (None, 2, 2, "groups of two slabs or more; start 4 ranks or a multiple"),
        ("0,1,2,3", 1, 2, "needs one"),
        ("0,1", 1, 3, "do not divide by 3 ranks of this machine"),
        ("0,0", 1, 2, "on one GPU"),
    ],
)
def test_ranks_that_cannot_share_a_volume_are_refused(
    devices: str | None, replicas: int, num_ranks: int, reason: str
) -> None:
    ranks = Ranks(rank=0, world_size=num_ranks, local_rank=0, local_world_size=num_ranks)
    with pytest.raises(Unet3dError) as caught:
        spatial(devices, replicas, ranks)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("devices", "replicas", "mode"),
    [
        (None, 1, "none"),
        ("1", 1, "none"),
        ("0,1", 1, "spatial"),
        ("cpu,cpu", 1, "spatial"),
        ("0,1,2,3", 2, "spatial"),
        ("0,cpu", 1, "model"),
        ("1,1", 1, "model"),
        ("0,cpu,1,cpu", 2, "model"),
    ],
)
def test_auto_is_what_the_devices_can_run(devices: str | None, replicas: int, mode: str) -> None:
    settings = ParallelSettings(devices=devices, replicas=replicas)
    dims = ParallelDims.resolve(settings, machine(4))
    explicit = settings.model_copy(update={"mode": mode})
    assert dims == ParallelDims.resolve(explicit, machine(4)) and dims.mode == mode


def test_one_device_has_no_groups() -> None:
    with pytest.raises(ConfigError, match="parallel.replicas is 2, but there is one device, 0;"):
        ParallelDims.resolve(ParallelSettings(replicas=2), machine(4))
