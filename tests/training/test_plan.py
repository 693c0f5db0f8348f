"""Which run is continued, and that all ranks choose the same one."""

from pathlib import Path

import pytest

from tests.rank_threads import in_threads, place
from unet3d.config import Config, load_config, parsed_changes
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError
from unet3d.parallel import ParallelDims
from unet3d.training import plan as planning
from unet3d.training.plan import Plan, choose_run
from unet3d.training.request import Request

ALONE = Group(Ranks())
CHANGES = (
    "data.dataset=some/where",
    "training.learning_rate=3e-05",
    "patches.size=16,16,24",
    "parallel.devices=cpu",
)


def request(changes=CHANGES, **others):
    return Request(changes=parsed_changes(changes), **others)


def begin(run):
    """Create the files of a run after its first epoch."""
    run.folder.create()
    run.folder.write_config(run.plan.config)
    run.folder.latest.touch()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def planned(monkeypatch):
    """Pretend that planning takes two groups of slabs on four devices; return the ranks it got."""
    told = []

    def plan(config, network, ranks):
        told.append(ranks)
        mode, count = ("spatial", 2) if len(config.parallel.devices or ()) == 4 else ("data", 1)
        settings = config.parallel.model_copy(update={"mode": mode, "replicas": count})
        return settings, "parallel: as planned"

    monkeypatch.setattr(planning, "plan_without_data", lambda *_: None)
    monkeypatch.setattr(planning, "choose_mode", plan)
    return told


def test_a_single_rank_takes_the_settings_as_they_are(monkeypatch):
    run = choose_run(request(), ALONE)
    assert run.plan.config.data.dataset == Path("some/where").absolute()
    assert run.plan.config.patches.size == (16, 16, 24)
    assert run.folder.path.parent == Path("runs") and not run.resume
    assert run.folder.path.name.startswith("where-fold0-")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    changes = (*CHANGES, "parallel.devices=cpu,cpu")
    with pytest.raises(ConfigError, match="name its folder with --output"):
        choose_run(request(changes=changes), Group(place(0, 2)))


def test_all_ranks_get_the_run_of_the_first(here):
    def choose(group):
        # The second rank's own request does not count.
        own = (*CHANGES, "parallel.devices=cpu,cpu") if group.is_first else ("training.seed=9",)
        return choose_run(request(changes=own, output=here / str(group.ranks.rank)), group)

    first, second = in_threads(2, choose)
    assert first.plan.config == second.plan.config
    assert first.folder.path == second.folder.path == here / "0"
    assert isinstance(second.plan.config, Config)
    assert second.plan.config.training.learning_rate == 3e-05
    assert second.plan.config.parallel.mode == "data"  # the mode of several ranks, if none is set
    assert second.plan.config.data.dataset == Path("some/where").absolute()


def test_a_run_is_continued_with_its_own_settings_and_what_is_changed(here):
    started = choose_run(request(output=here / "run"), ALONE)
    with pytest.raises(ConfigError, match="no run to resume in"):
        choose_run(request(changes=(), output=here / "run", resume=True), ALONE)
    begin(started)
    changes = ("training.epochs=7",)
    run = choose_run(request(changes=changes, output=here / "run", resume=True), ALONE)
    assert run.resume and run.folder.path == here / "run"
    assert run.plan.config == started.plan.config.with_values({"training.epochs": 7})


def placed(config, ranks):
    dims = ParallelDims.resolve(config.parallel, ranks=ranks)
    return Plan(config=config, dims=dims).placed(ranks)


@pytest.mark.parametrize(
    ("changes", "num_ranks", "mode"),
    [
        ((), 1, "none"),
        (("parallel.mode=auto", "parallel.devices=cpu"), 1, "none"),
        (("parallel.mode=model", "parallel.devices=cpu,cpu"), 1, "model"),
        (("parallel.mode=data",), 2, "data"),
    ],
    ids=str,
)
def test_what_is_not_open_is_not_planned(changes, num_ranks, mode, planned):
    config = load_config(None, changes)
    names = config.parallel.devices or ("cpu",) * num_ranks
    config = config.with_values({"parallel.devices": list(names)})
    chosen = placed(config, place(num_ranks - 1, num_ranks))
    assert chosen.config == config.with_values({"parallel.mode": mode})
    assert not planned


def test_auto_becomes_what_is_planned(planned):
    for mode, num_ranks in (("auto", 1), ("auto", 4), ("none", 4)):  # recorded by one process
        config = load_config(None, [f"parallel.mode={mode}", "parallel.devices=cpu,cpu,cpu,cpu"])
        ranks = place(0, num_ranks)
        chosen = placed(config, ranks)
        spatial = {"parallel.mode": "spatial", "parallel.replicas": 2}
        assert chosen.config == config.with_values(spatial)
        assert (chosen.dims.mode, chosen.dims.num_shards) == ("spatial", 2)
        assert planned.pop() == (ranks if num_ranks > 1 else None)
        assert chosen.notes == ("parallel: as planned",)


MODEL = ("parallel.mode=model", "parallel.devices=cpu,cpu")
DATA = ("parallel.mode=data", "parallel.devices=cpu,cpu")
SPATIAL = ("parallel.mode=spatial", "parallel.devices=cpu,cpu,cpu,cpu", "parallel.replicas=2")


@pytest.mark.parametrize(
    ("started", "changes", "mode"),
    [
        ((), ("parallel.devices=cpu,cpu,cpu,cpu",), "spatial"),
        (DATA, ("parallel.devices=cpu",), "none"),
        ((*MODEL, "parallel.cuts=3"), ("parallel.devices=cpu",), "none"),
        (MODEL, ("parallel.devices=cpu,cpu",), "model"),
        (MODEL, ("parallel.devices=cpu,cpu,cpu",), "data"),
        (MODEL, ("training.epochs=3",), "model"),
        (SPATIAL, ("parallel.mode=data",), "data"),
        (DATA, ("parallel.mode=spatial",), "spatial"),
    ],
    ids=str,
)
def test_a_run_goes_on_in_a_mode_that_suits_the_devices(here, started, changes, mode):
    begin(choose_run(request(changes=(*CHANGES, *started), output=here / "run"), ALONE))
    run = choose_run(request(changes=changes, output=here / "run", resume=True), ALONE)
    assert run.plan.config.parallel.mode == mode


def test_settings_that_are_auto_suit_a_cpu(here, caplog):
    caplog.set_level("INFO", "unet3d")
    started = choose_run(request(changes=("parallel.devices=cpu", "training.epochs=7")), ALONE)
    assert started.plan.config.model.base_channels == 8
    assert started.plan.config.training.epochs == 7
    assert "suit a CPU, such as model.base_channels=8 instead of 32" in caplog.text
    begin(started)
    caplog.clear()
    # A run goes on with the placement with which it began.
    again = choose_run(request(changes=(), output=started.folder.path, resume=True), ALONE)
    assert again.plan.config == started.plan.config
    assert "for a CPU" not in caplog.text


def test_a_file_changes_what_it_names_of_a_run_that_goes_on(here):
    begin(choose_run(request(output=here / "run"), ALONE))
    (here / "more.yaml").write_text("training: {epochs: 9}")
    more = request(config_path=here / "more.yaml", changes=(), output=here / "run", resume=True)
    config = choose_run(more, ALONE).plan.config
    assert (config.training.epochs, config.training.learning_rate) == (9, 3e-05)


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(here, caplog):
    started = choose_run(request(output=here / "run"), ALONE)
    begin(started)
    started.folder.latest.unlink()
    again = choose_run(request(changes=(), output=here / "run", resume=True), ALONE)
    assert not again.resume and again.plan.config == started.plan.config
    warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert warned == [f"{here / 'run'} was stopped before its first checkpoint; it starts over"]


def test_a_checkpoint_without_its_settings_is_not_resumed(here):
    started = choose_run(request(output=here / "run"), ALONE)
    begin(started)
    started.folder.config.unlink()
    with pytest.raises(ConfigError, match="a checkpoint, but no config.yaml .*; .*--init .*run"):
        choose_run(request(changes=(), output=here / "run", resume=True), ALONE)
