import pytest
import torch

from unet3d.config import Config, ParallelSettings
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError, DeviceError
from unet3d.parallel import Layout, Machine, ParallelDims

CPU = torch.device("cpu")
GPUS = [torch.device("cuda", index) for index in range(4)]
THREADS = "mode=data data_parallel=true"


def machine(num_gpus):
    """Return a description of a machine; no test here looks for real devices."""
    gpus = ", ".join(f"cuda:{index} (Model {index})" for index in range(num_gpus))
    return Machine(num_gpus=num_gpus, description=f"cpu and {gpus or 'no CUDA GPU'}")


def resolve(num_gpus, ranks=None, **settings):
    return ParallelDims.resolve(ParallelSettings(**settings), machine(num_gpus), ranks)


def spatial(devices, replicas=1, ranks=None):
    return resolve(4, ranks, mode="spatial", devices=devices, replicas=replicas)


def rank_of(rank, world_size, local_rank, local_world_size):
    return Ranks(
        rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size
    )


def refusal(num_gpus, ranks, error=DeviceError, **settings):
    with pytest.raises(error) as caught:
        resolve(num_gpus, ranks, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("num_gpus", "mode", "names", "devices"),
    [
        (2, "none", "cpu", (CPU,)),
        (2, "none", "1", (GPUS[1],)),
        (2, "none", "cuda", (GPUS[0],)),
        (2, "model", "0, cuda:1,cpu", (GPUS[0], GPUS[1], CPU)),
        (2, "model", "1,1", (GPUS[1], GPUS[1])),
        # The default depends on the machine.
        (0, "none", None, (CPU,)),
        (3, "none", None, (GPUS[0],)),
        (0, "model", None, (CPU, CPU)),
        (3, "model", None, (GPUS[0], GPUS[1])),
    ],
)
def test_names_become_devices(num_gpus, mode, names, devices):
    assert resolve(num_gpus, mode=mode, devices=names).devices == devices


def test_an_unknown_name_is_refused():
    for name in ("gpu0", "cuda:", "cuda:x", "-1", "CPU", "cpu:0", "1.5"):
        message = refusal(2, None, mode="none", devices=name)
        assert message == f"device {name!r} is unknown; write 0, cuda:0 or cpu"


def test_what_does_not_suit_the_machine_or_the_mode_says_what_there_is():
    assert refusal(2, None, mode="none", devices="2") == (
        "device '2' does not exist; this machine has cpu and cuda:0 (Model 0), cuda:1 (Model 1)"
    )
    assert refusal(0, None, mode="model", devices="cpu,0") == (
        "device '0' does not exist; this machine has cpu and no CUDA GPU"
    )
    assert refusal(2, None, mode="none", devices="0,1") == (
        "there are the devices 0,1, but parallel mode none uses one; use --parallel auto, or name "
        "one device"
    )
    # With one GPU the second device cannot be guessed.
    message = refusal(1, None, mode="model")
    assert "cuda:0 (Model 0)" in message and "--devices 0,cpu" in message
    message = refusal(1, None, mode="spatial")
    assert "cuda:0 (Model 0)" in message and "use --parallel none" in message


def test_the_machine_in_words(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Model {index}")
    assert Machine.here() == Machine(num_gpus=1, description="cpu and cuda:0 (Model 0)")


@pytest.mark.parametrize(
    ("settings", "replicas"),
    [
        ({"mode": "none"}, ((GPUS[0],),)),
        ({"mode": "data"}, ((GPUS[0],), (GPUS[1],), (GPUS[2],), (GPUS[3],))),
        ({"mode": "data", "devices": "3,1"}, ((GPUS[3],), (GPUS[1],))),
        ({"mode": "model", "replicas": 2}, (tuple(GPUS[:2]), tuple(GPUS[2:]))),
        ({"mode": "model", "replicas": 2, "devices": "0,0,1,1"}, ((GPUS[0],) * 2, (GPUS[1],) * 2)),
    ],
    ids=str,
)
def test_devices_are_divided_over_the_replicas(settings, replicas):
    assert resolve(4, **settings).replicas == replicas


@pytest.mark.parametrize(
    ("num_gpus", "settings", "ranks", "devices"),
    [
        (4, {"mode": "data"}, rank_of(5, 8, 1, 4), (GPUS[1],)),
        (4, {"mode": "data", "devices": "2,3"}, rank_of(3, 4, 1, 2), (GPUS[3],)),
        (4, {"mode": "model"}, rank_of(1, 2, 1, 2), (GPUS[2], GPUS[3])),
        (4, {"mode": "model"}, rank_of(1, 2, 0, 1), tuple(GPUS)),
        (4, {"mode": "model", "replicas": 2}, rank_of(0, 2, 0, 2), (GPUS[0], GPUS[1])),
        (0, {"mode": "data"}, rank_of(1, 2, 1, 2), (CPU,)),
        (0, {"mode": "model"}, rank_of(1, 2, 1, 2), (CPU, CPU)),
    ],
    ids=str,
)
def test_a_rank_drives_its_share_of_the_machine(num_gpus, settings, ranks, devices):
    assert resolve(num_gpus, ranks, **settings).devices == devices


UNSUITABLE_DEVICES = [
    ("mode=model devices=0", None, "one for each stage, not 0; name two (one device may"),
    ("mode=model replicas=2 devices=0,1,2", None, "divided equally among 2 replicas"),
    ("mode=model replicas=2 devices=0,1", None, "give each of 2 replicas one device"),
    ("mode=model replicas=2 devices=0,1,0,1", None, "put two replicas on one GPU"),
    ("mode=data devices=0,cpu", None, "cuda:0 and cpu cannot exchange gradients"),
    # Ranks without devices of their own.
    ("mode=data", rank_of(0, 5, 0, 5), "'4' does not exist"),
    (
        "mode=data devices=0,1,2",
        rank_of(0, 2, 0, 2),
        "divided equally among 2 ranks of this machine",
    ),
    ("mode=data devices=0,1", rank_of(0, 2, 0, 1), "needs exactly one"),
    ("mode=model devices=0,1", rank_of(0, 2, 0, 2), "at least two"),
    # nn.DataParallel needs different GPUs.
    (f"{THREADS} devices=0,cpu", None, "needs GPUs, each named once, not cuda:0,cpu"),
    (f"{THREADS} devices=0,0", None, "needs GPUs, each named once, not cuda:0,cuda:0"),
    ("mode=data data_parallel=2 devices=0,1", None, "data_parallel is cuda:2, which is none of"),
    # Devices that cannot share a volume.
    ("mode=spatial devices=0", None, "one for each slab, not 0; name two (cpu may be"),
    ("mode=spatial devices=0,0", None, "put two slabs on one GPU, which NCCL refuses"),
    ("mode=spatial devices=0,cpu", None, "cuda:0,cpu are of different kinds, which cannot share"),
    ("mode=spatial devices=0,1 replicas=2", None, "one device, but parallel mode spatial needs"),
    ("mode=spatial devices=0,1,2,3", rank_of(0, 2, 0, 2), "needs exactly one"),
]
CONTRADICTIONS = [
    ("replicas=2", None, "parallel.replicas is 2, but there is one device, 0;"),
    ("mode=model replicas=3", rank_of(0, 2, 0, 2), "2 ranks were started"),
    (THREADS, rank_of(0, 2, 0, 2), "leave it out under torchrun"),
    (
        "mode=spatial replicas=2",
        rank_of(0, 3, 0, 3),
        "3 ranks were started, which cannot be divided into 2 groups",
    ),
    ("mode=spatial replicas=2", rank_of(0, 2, 0, 2), "start 4 ranks or a multiple"),
]


@pytest.mark.parametrize(
    ("error", "settings", "ranks", "reason"),
    [
        *((DeviceError, *row) for row in UNSUITABLE_DEVICES),
        *((ConfigError, *row) for row in CONTRADICTIONS),
    ],
    ids=str,
)
def test_what_does_not_suit_the_mode_or_the_ranks_is_refused_in_one_line(
    error, settings, ranks, reason
):
    named = dict(setting.split("=") for setting in settings.split())
    named = {name: value == "true" or value for name, value in named.items()}
    replicas = int(named.pop("replicas", 1))
    assert reason in refusal(4, ranks, error, replicas=replicas, **named)


def test_threads_are_one_process():
    options = {"data_parallel": "1", "devices": "0,1,3"}
    dims = resolve(4, mode="data", **options)
    assert (dims.num_processes, dims.num_replicas, dims.devices) == (1, 3, (*GPUS[:2], GPUS[3]))
    assert (dims.world_size, dims.num_stages) == (1, 1)
    assert dims.gather_device == GPUS[1] and not dims.predicts_memory


def test_replicas_may_be_idle_and_say_so():
    dims = resolve(0, mode="data", devices="cpu,cpu,cpu")
    assert (dims.num_processes, dims.num_replicas) == (3, 3)
    assert (dims.share_of(7), dims.check_batch(3)) == (3, None)
    assert "a batch of 2 leaves 1 of 3 replicas without work" in (dims.check_batch(2) or "")


@pytest.mark.parametrize(
    ("num_gpus", "devices", "num_replicas", "replicas"),
    [
        (4, None, 1, (tuple(GPUS),)),
        (4, None, 2, (tuple(GPUS[:2]), tuple(GPUS[2:]))),
        (4, "3,1", 1, ((GPUS[3], GPUS[1]),)),
        (0, None, 3, ((CPU, CPU),) * 3),
        (0, "cpu,cpu,cpu", 1, ((CPU,) * 3,)),
    ],
)
def test_each_shard_has_a_process_and_a_device(num_gpus, devices, num_replicas, replicas):
    dims = resolve(num_gpus, mode="spatial", devices=devices, replicas=num_replicas)
    assert dims.mode == "spatial" and dims.replicas == replicas
    assert (dims.num_replicas, dims.num_shards) == (num_replicas, len(replicas[0]))
    assert dims.num_processes == num_replicas * dims.num_shards == len(dims.all_devices)
    assert dims.devices == replicas[0][:1] and dims.num_stages == 1
    assert dims.share_of(3) == -(-3 // num_replicas)


@pytest.mark.parametrize(
    ("ranks", "devices", "num_replicas", "own", "group"),
    [
        # Two groups of two on one machine; one group over two machines; and groups of three on
        # machines with two GPUs.
        (rank_of(3, 4, 3, 4), None, 2, GPUS[3], (1, 1)),
        (rank_of(4, 8, 0, 4), None, 1, GPUS[0], (0, 4)),
        (rank_of(3, 6, 1, 2), None, 2, GPUS[1], (1, 0)),
        (rank_of(1, 2, 1, 2), "cpu,cpu", 1, CPU, (0, 1)),
    ],
    ids=str,
)
def test_a_rank_has_one_slab_of_one_replica(ranks, devices, num_replicas, own, group):
    dims = spatial(devices, num_replicas, ranks)
    assert dims.devices == (own,)
    assert (dims.num_replicas, dims.num_shards) == (num_replicas, ranks.world_size // num_replicas)
    assert (dims.replica_of(ranks.rank), dims.shard_of(ranks.rank)) == group
    assert dims.num_processes == ranks.local_world_size
    layout = Layout.of(Config(), dims, "float32")
    assert (layout.devices, layout.num_replicas) == ((own,), num_replicas)
    assert (layout.num_shards, layout.shard) == (dims.num_shards, group[1])


def test_replicas_that_cross_machines_are_listed_as_far_as_they_are_here():
    assert spatial(None, 2, rank_of(2, 6, 0, 2)).replicas == ((GPUS[0],), (GPUS[1],))
    assert spatial(None, 2, rank_of(0, 6, 0, 2)).replicas == ((GPUS[0], GPUS[1]),)


def test_auto_is_what_the_devices_can_run():
    for devices, replicas, mode in (
        (None, 1, "none"),
        ("1", 1, "none"),
        ("cpu,cpu", 1, "spatial"),
        ("0,1,2,3", 2, "spatial"),
        ("0,cpu", 1, "model"),
        ("1,1", 1, "model"),
    ):
        dims = resolve(4, devices=devices, replicas=replicas)
        assert dims.mode == mode
        assert dims == resolve(4, devices=devices, replicas=replicas, mode=mode)
