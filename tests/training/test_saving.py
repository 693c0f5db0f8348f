import time
from types import SimpleNamespace

from unet3d.config import load_config
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.runs.run_folder import RunFolder
from unet3d.training.context import RunContext
from unet3d.training.saving import CheckpointSaver
from unet3d.training.state import TrainingState


def saver_of(rank, folder):
    experiment = SimpleNamespace(config=load_config(None, ["training.save_every_seconds=5"]))
    context = RunContext(
        experiment=experiment,
        executor=SimpleNamespace(module=None),
        folder=RunFolder(folder),
        group=Group(Ranks(rank=rank, world_size=2, local_rank=rank, local_world_size=2)),
        dims=None,
        precision="float32",
    )
    return CheckpointSaver(context, None)


def test_only_the_rank_that_writes_knows_when_a_checkpoint_is_due(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    first, second = (saver_of(rank, tmp_path) for rank in range(2))
    assert not first.is_due()
    clock[0] += 5
    assert first.is_due()
    # The clock of a rank that does not write would never be set back: it would ask for a
    # checkpoint after every step.
    second.save(TrainingState())
    assert not second.is_due()
    assert not list(tmp_path.iterdir())
