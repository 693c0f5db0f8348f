"""The results of a run on its validation cases: equal to those of ``predict``, and their scores."""

import json
import math
import shutil
import signal
from types import SimpleNamespace

import nibabel as nib
import numpy as np
import pytest
import torch

from tests.command_line import run as run_command
from tests.images.samples import write_volume
from tests.rank_threads import in_threads
from tests.reports.records import assert_is_picture
from tests.training.known_answers import Reader, checkpoint, watcher
from tests.trainings import assert_same_weights, run, settings, without_pictures
from unet3d.config import load_config
from unet3d.datasets.dataset import Case
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import DeviceError, VolumeError
from unet3d.images.labels import read_label
from unet3d.inference.evaluation import evaluate
from unet3d.interruption import Interrupted, InterruptionRequest
from unet3d.parallel import ParallelDims, precision
from unet3d.planning.experiment import open_dataset
from unet3d.runs.checkpoint import load_checkpoint
from unet3d.runs.run_folder import RunFolder
from unet3d.training import final_validation
from unet3d.training.cases import RunContext, Stopped
from unet3d.training.component_choice import Choice
from unet3d.training.final_validation import FinalValidation

CPU = torch.device("cpu")


def of_two_folds(cache, *overrides):
    """Return a training that validates several cases, on a grid that is not their own."""
    folds = ("data.num_folds=5", "data.spacing_mm=1.3,1,1", "training.epochs=1")
    return settings(cache, *folds, *overrides)


@pytest.fixture(scope="module")
def finished(cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "finished"
    run(of_two_folds(cache), folder, is_bare=False)
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of the finished run without the scores of its cases, as of an older version."""
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run/validation/cases.json").unlink()
    return tmp_path / "run"


def record_of(folder):
    return json.loads((folder / "validation/cases.json").read_text())


def label_maps(folder):
    found = {path.name: read_label(path).array for path in folder.rglob("*.nii.gz")}
    return {name.removesuffix(".nii.gz").removesuffix("_seg"): one for name, one in found.items()}


def test_the_scores_are_those_of_evaluate_and_the_worst_case_comes_first(finished, cache):
    dataset = open_dataset(of_two_folds(cache))
    expected = evaluate(finished / "validation", dataset.root / "labelsTr").to_dict()
    record = record_of(finished)
    everyone = sorted(case.name for case in dataset.cases)
    assert sorted(record["training"] + record["validation"]) == everyone
    wanted = {case["case"]: case["labels"] for case in expected["cases"]}
    assert {case["case"] for case in record["cases"]} == wanted.keys() == {*record["validation"]}
    names = dict(zip(map(str, dataset.label_values), dataset.label_names, strict=True))
    for case in record["cases"]:
        assert (finished / "validation" / case["prediction"]).is_file()
        for key, score in case["labels"].items():
            assert score == {**wanted[case["case"]][key], "name": names[key]}
        known = [score["dice"] for score in case["labels"].values() if score["dice"] is not None]
        assert case["mean_dice"] == pytest.approx(sum(known) / len(known))
    means = [case["mean_dice"] for case in record["cases"]]
    assert means == sorted(means) and means[0] < means[-1]
    for name in ("worst.png", "best.png"):
        assert_is_picture(finished / "validation" / name)
    assert record["mean_dice"] == pytest.approx(expected["mean_dice"])
    summary = json.loads((finished / "summary.json").read_text())["final"]
    assert summary["mean_dice"] == record["mean_dice"]
    assert summary["num_cases"] == len(means) and summary["seconds"] > 0
    assert summary["dice"] == {mean["name"]: mean["dice"] for mean in record["mean"].values()}


def test_a_finished_run_without_it_is_completed_and_one_with_it_is_left_alone(
    finished, folder, cache
):
    before = record_of(finished)
    (folder / "validation/stale_seg.nii.gz").write_bytes(b"")
    run(of_two_folds(cache), folder, resume=True)
    assert record_of(folder) == before
    assert not (folder / "validation/stale_seg.nii.gz").exists()
    assert_same_weights(folder, finished)

    stamp = (folder / "validation").stat().st_ino
    run(of_two_folds(cache), folder, resume=True)
    assert (folder / "validation").stat().st_ino == stamp

    run(of_two_folds(cache, "training.epochs=2"), folder, resume=True)
    assert record_of(folder)["epochs"] == 2
    assert record_of(folder)["cases"] != before["cases"]


@pytest.mark.parametrize("when", ["write_segmentation", "score_labels"])
@pytest.mark.nightly
def test_an_interruption_leaves_nothing_and_the_run_goes_on(
    finished, folder, cache, when, monkeypatch
):
    work = getattr(final_validation, when)

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGTERM)
        return work(*arguments)

    with monkeypatch.context() as patch, pytest.raises(Interrupted) as caught:
        patch.setattr(final_validation, when, interrupted)
        run(of_two_folds(cache), folder, resume=True)
    assert caught.value.can_resume and caught.value.signal_number == signal.SIGTERM
    names = {path.name for path in folder.iterdir()}
    assert not names & {"summary.json", "validation"}
    assert not [name for name in names if name.startswith(".unfinished")]
    assert_same_weights(folder, finished)
    run(of_two_folds(cache), folder, resume=True)
    assert record_of(folder) == record_of(finished)
    assert (folder / "summary.json").is_file()


def test_what_was_decided_is_in_the_checkpoint_and_in_what_predict_does(
    folder, cache, tmp_path, monkeypatch
):
    def predicted(output, *words):
        assert run_command("predict", *images, "-o", output, *options, *words) == 0
        found = label_maps(output)
        assert found.keys() == set(names)
        return found

    chosen = (Choice(rule=(1,), dice_before=0.25, dice_after=0.5),)
    monkeypatch.setattr(final_validation, "choose_components", lambda *_: chosen)
    run(of_two_folds(cache), folder, resume=True)
    assert load_checkpoint(folder / "checkpoint-latest.pt").postprocessing == ((1,),)
    assert load_checkpoint(folder / "checkpoint-best.pt").postprocessing == ()
    summary = json.loads((folder / "summary.json").read_text())["final"]
    assert summary["postprocessing"] == [[1]]
    cases = {case.name: case for case in open_dataset(of_two_folds(cache)).cases}
    names = record_of(folder)["validation"]
    assert 2 <= len(names) < len(cases)
    images = [cases[name].images[0] for name in names]
    options = ("--checkpoint", folder, "--devices", "cpu")
    kept = predicted(tmp_path / "kept")
    everything = predicted(tmp_path / "all", "--no-postprocessing")
    for name, array in label_maps(folder / "validation").items():
        assert array.any() and np.array_equal(kept[name], array)
        paths = folder / f"validation/{name}_seg.nii.gz", tmp_path / f"kept/{name}.nii.gz"
        ours, theirs = map(nib.load, paths)
        assert np.array_equal(ours.affine, theirs.affine)
    assert any(not np.array_equal(kept[name], everything[name]) for name in kept)

    # If training continues, there are no rules until they are chosen again.
    monkeypatch.setattr(final_validation, "choose_components", lambda *_: ())
    run(of_two_folds(cache, "training.epochs=2"), folder, resume=True)
    assert load_checkpoint(folder / "checkpoint-latest.pt").postprocessing == ()


SHAPES = [(6, 8, 10 + 2 * number) for number in range(5)]


@pytest.fixture
def cases(tmp_path):
    """Five cases whose image holds the network's answer; the answer for case 3 is the best."""
    made = []
    for number, shape in enumerate(SHAPES):
        rng = np.random.default_rng(number)
        label = rng.integers(0, 3, shape).astype(np.uint8)
        wrong = rng.random(shape) < (0.1, 0.3, 0.2, 0.0, 0.4)[number]
        answer = np.where(wrong, (label + 1) % 3, label).astype(np.float32)
        name = f"patient_{number}/map" if number == 1 else f"case_{number}"
        image = write_volume(tmp_path / f"images/{number}.nii.gz", answer)
        target = write_volume(tmp_path / f"labels/{name}.nii.gz", label)
        made.append(Case(name=name, images=(image,), label=target))
    return made


@pytest.fixture
def empty(tmp_path):
    """The folder of a run that has no validation yet."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def validate(cases, folder, *changes, group=None, request=None):
    known, group = checkpoint(), group or Group(Ranks())
    executor = Reader()
    experiment = SimpleNamespace(
        config=load_config(None, ["inference.window=4,4,4", *changes]),
        preprocessing=known.preprocessing,
        patch_size=known.patch_size,
        validation_files=tuple(cases),
        split=SimpleNamespace(training={"other": ""}, validation={case.name: "" for case in cases}),
    )
    context = RunContext(
        experiment=experiment,
        executor=executor,
        folder=RunFolder(folder),
        group=group,
        dims=ParallelDims(mode="data", replicas=((CPU,),) * group.size, num_replicas=group.size),
        precision="float32",
    )
    validation = FinalValidation(context)
    return validation.run(known, watcher(request)), executor


NOT_KEPT = "inference.postprocessing=false"


@pytest.mark.parametrize(("num_ranks", "per_machine", "num_busy"), [(4, 2, 2), (7, 7, 5)])
def test_ranks_of_the_first_machine_divide_the_cases_and_agree(
    cases, empty, num_ranks, per_machine, num_busy
):
    with without_pictures():
        results = in_threads(
            num_ranks, lambda group: validate(cases, empty, NOT_KEPT, group=group), per_machine
        )
    record = record_of(empty)
    worst_first = ["case_4", "patient_1/map", "case_2", "case_0", "case_3"]
    assert [case["case"] for case in record["cases"]] == worst_first
    assert (record["training"], len(record["validation"])) == (["other"], 5)
    best = record["cases"][-1]["labels"]
    assert best["1"]["name"] == "liver" and "3" not in best
    assert (best["2"]["dice"], best["2"]["hd95_mm"], best["2"]["nsd"]) == (1.0, 0.0, 1.0)
    for case, shape in zip(cases, SHAPES, strict=True):
        found = read_label(empty / "validation" / f"{case.name}_seg.nii.gz").array
        answer = nib.load(case.images[0]).get_fdata()
        assert found.shape == shape and np.array_equal(found, answer)
    for result, _ in results:
        assert result.choices == () and record["postprocessing"] == []
        assert result.evaluation.mean_dice == record["mean_dice"]
        assert math.isclose(sum(result.to_dict()["dice"].values()) / 2, record["mean_dice"])
    windows = [executor.num_windows for _, executor in results]
    assert all(windows[:num_busy]) and not any(windows[num_busy:])


def test_cases_are_computed_in_what_is_asked_of_predictions(cases, empty, monkeypatch):
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: True)
    for asked, expected in (("auto", "float32"), ("bfloat16", "bfloat16")):
        changes = (NOT_KEPT, "training.precision=float32", f"inference.precision={asked}")
        with without_pictures():
            _, executor = validate(cases[:1], empty, *changes)
        assert executor.precisions == {expected}
    with pytest.raises(DeviceError, match="^inference.precision=float16 needs a GPU; use inf"):
        validate([], empty, "inference.precision=float16")


def test_small_components_are_removed_where_that_helps(tmp_path, empty):
    """Answers have a speck of label 1 beside the true part; label 2 has two parts, both true.

    A further case has no label at all, and is listed last. A further rank has no case.
    """
    cases, wanted = [], {}
    for number in (3, 0, 1, 2):
        label = np.zeros((10, 9, 12), np.uint8)
        label[1:5, 1:5, 1:5] = 1
        label[7:9, 6:8, 1:4] = label[7:9, 6:8, 9:11] = 2
        answer = label.copy()
        answer[1:3, 6:8, 8 : 9 + number] = 1
        if number == 3:
            label[:] = answer[:] = 0
        name = f"case_{number}"
        image = write_volume(tmp_path / f"{number}.nii", answer.astype(np.float32))
        target = write_volume(tmp_path / f"{name}.nii", label)
        cases.append(Case(name=name, images=(image,), label=target))
        wanted[name] = label
    with without_pictures():
        results = in_threads(5, lambda group: validate(cases, empty, group=group))
    assert {result.evaluation.mean_dice for result, _ in results} == {1.0}
    record = record_of(empty)
    assert record["cases"][-1]["case"] == "case_3" and len(record["cases"]) == 4
    (choice,) = record["postprocessing"]
    specks = [4 * (number + 1) for number in range(3)]
    before = np.mean([2 * 64 / (2 * 64 + speck) for speck in specks])
    assert choice == {
        "largest_component_of": [1],
        "dice_before": pytest.approx(before),
        "dice_after": 1.0,
    }
    assert record["mean"]["1"]["hd95_mm"] == 0.0  # only of the largest component
    for name, array in label_maps(empty / "validation").items():
        assert np.array_equal(array, wanted[name])


def test_a_signal_to_one_rank_stops_all_and_leaves_nothing(cases, empty):
    told = InterruptionRequest()
    told.signal_number = 15
    requests = [InterruptionRequest(), told]

    def stopped(group):
        with pytest.raises(Stopped) as stop:
            validate(cases, empty, group=group, request=requests[group.ranks.rank])
        return stop.value.signal_number

    assert in_threads(2, stopped) == [15, 15]
    assert not list(empty.iterdir())


def test_a_case_that_is_gone_is_named_and_without_any_there_is_nothing(cases, empty):
    result, executor = validate((), empty)
    assert (result, executor.num_windows) == (None, 0)
    assert not list(empty.iterdir())
    cases[2].images[0].unlink()
    with pytest.raises(VolumeError, match=r"images/2\.nii\.gz"):
        validate(cases, empty)
    assert not list(empty.iterdir())
