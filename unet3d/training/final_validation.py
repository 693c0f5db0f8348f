"""Segmentations and scores of the validation cases with the final network, from file to file.

The folder ``validation/`` of a run holds what ``unet3d predict`` would write for the images of the
validation cases: segmentations on the images' own grids, by the same code, with the network on its
training devices, in the precision of ``inference.precision``. These segmentations decide which
components to keep (:mod:`unet3d.training.component_choice`); other components are removed.
``cases.json`` holds the scores that ``unet3d evaluate`` would find, the worst case first; the worst
and the best case are drawn.

Only ranks on the machine of the first rank write, because the run's folder may be on a disk of that
machine. The folder gets its final name when it is complete. An interrupted validation leaves
nothing, and ``--resume`` repeats it.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from unet3d import __version__
from unet3d.atomic import unfinished_folder
from unet3d.datasets.dataset import Case
from unet3d.datasets.labels import ScoredLabels, label_of, values_of
from unet3d.errors import counted
from unet3d.images.files import written_suffix
from unet3d.images.image import open_image, open_source
from unet3d.images.labels import on_grid_of, read_label, write_label
from unet3d.images.memory_limits import explaining_memory
from unet3d.images.units import Units, default_tolerance_mm
from unet3d.inference.evaluation import CaseScores, Evaluation
from unet3d.inference.label_scores import (
    LabelScore,
    open_pair,
    overlaps_in,
    read_pair,
    score_labels,
)
from unet3d.inference.networks import Networks
from unet3d.inference.placing import TrainedNetwork, wanted_precision
from unet3d.inference.postprocessing import Rule, keep_largest, rules_in_words
from unet3d.inference.predictor import Predictor
from unet3d.inference.scans import ENDING, Scan, read_scan, write_segmentation
from unet3d.parallel import image_dtype, resolve_precision
from unet3d.planning.experiment import Experiment
from unet3d.reports.figures import write_figure
from unet3d.reports.planes import Structure
from unet3d.reports.preview import Preview, preview_figure
from unet3d.runs.checkpoint import Checkpoint
from unet3d.runs.run_folder import BEST, WORST, writing
from unet3d.training.cases import RunContext, Watcher, WindowsDone, over_cases
from unet3d.training.component_choice import Choice, choose_components

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FinalResult:
    """Results of the final network on the validation cases, the same in all ranks."""

    evaluation: Evaluation
    """The scores, the worst case first."""
    choices: tuple[Choice, ...]
    """The components that predictions with the final network keep."""
    seconds: float
    """Time that it took this rank."""

    def to_dict(self) -> dict[str, Any]:
        """Return the entry ``final`` of the run's summary."""
        found = self.evaluation
        return {
            "mean_dice": found.mean_dice,
            "dice": {found.name_of(label): found.mean(label).dice for label in found.labels},
            "num_cases": len(found.cases),
            "postprocessing": [list(choice.rule) for choice in self.choices],
            "seconds": self.seconds,
        }


class FinalValidation:
    """Predicts and scores the validation cases of one run."""

    def __init__(self, context: RunContext) -> None:
        """Refuse a network that cannot run here in ``inference.precision``."""
        config, dims, group = context.experiment.config, context.dims, context.group
        preparation = context.experiment.preprocessing
        dtype = image_dtype(context.executor.module)
        wanted = wanted_precision(dtype, config, dims.all_devices)
        self._precision = resolve_precision(
            wanted, dims.devices, group.exchange, "inference.precision"
        )
        self._context = context
        values, names = preparation.label_values, preparation.label_names
        self._names = dict(list(zip(values, names, strict=True))[1:])
        num_ranks = group.exchange(group.ranks.local_world_size)[0]
        self._num_writing = min(dims.num_replicas, -(-num_ranks // dims.num_shards))

    def run(self, checkpoint: Checkpoint, watcher: Watcher) -> FinalResult | None:
        """Write the folder, and return the scores; None: no validation cases. A collective call.

        Raises Stopped, and Unet3dError for a case that cannot be read, predicted or written.
        """
        cases = self._context.experiment.validation_files
        if not cases:
            return None
        began = time.monotonic()
        logger.info(
            "segmenting %s with the final network in %s",
            counted(len(cases), "validation case"),
            self._precision,
        )
        with self._unfinished() as folder:
            self._predict(folder, checkpoint, watcher)
            choices = self._choose_components(folder, watcher)
            evaluation = self._evaluation(folder, watcher)
            if self._context.group.is_first:
                self._publish(folder, evaluation, choices)
        seconds = time.monotonic() - began
        return FinalResult(evaluation=evaluation, choices=choices, seconds=seconds)

    @contextmanager
    def _unfinished(self) -> Iterator[Path]:
        """Make a temporary folder, which the first rank deletes unless it is published."""
        group, path = self._context.group, self._context.folder.validation
        if not group.is_first:
            yield Path(group.from_first(str))
            return
        with writing(path), unfinished_folder(path) as folder:
            yield Path(group.from_first(lambda: str(folder)))

    def _predict(self, folder: Path, checkpoint: Checkpoint, watcher: Watcher) -> None:
        executor = self._context.executor
        executor.module.eval()
        trained = TrainedNetwork(
            executor=executor,
            precision=self._precision,
            is_shared=self._context.dims.num_shards > 1,
        )
        predictor = Predictor(Networks.of(checkpoint), trained)

        def predict(case: Case, windows_done: WindowsDone) -> None:
            with explaining_memory(str(case.images[0])):
                place = folder / _file_of(case)
                scan = Scan(images=case.images, output=place, reading=case.reading)
                image = read_scan(scan)
                labels = predictor.segment(image, windows_done)
                if self._context.has_results:  # the replica's other ranks have the same labels
                    write_segmentation(scan, labels, image.geometry, self._names)

        self._over_cases(predict, watcher, "the prediction of the validation", with_slabs=True)

    def _over_cases(self, work: Any, watcher: Watcher, what: str, **options: bool) -> list[Any]:
        cases = self._context.experiment.validation_files
        writing = self._num_writing
        return over_cases(
            self._context, cases, work, watcher, what, num_replicas=writing, **options
        )

    def _choose_components(self, folder: Path, watcher: Watcher) -> tuple[Choice, ...]:
        """Choose the components to keep in all segmentations, and remove the other components."""
        experiment = self._context.experiment
        if not experiment.config.inference.postprocessing:
            return ()

        def over_pairs(work: Any, what: str) -> list[Any]:
            def on_pair(case: Case, _: WindowsDone) -> Any:
                with explaining_memory(f"cannot look for components in {_file_of(case)}"):
                    return work(*read_pair(folder / _file_of(case), case.label, case.reading))

            return self._over_cases(on_pair, watcher, what)

        chosen = choose_components(over_pairs, ScoredLabels.of(experiment.preprocessing))
        # Merged labels are scored with all of their values; segmentations have only the lowest.
        choices = tuple(
            replace(choice, rule=tuple(value for value in choice.rule if value in self._names))
            for choice in chosen
        )
        rules = [choice.rule for choice in choices]
        if rules:
            logger.info("post-processing: %s", rules_in_words(rules, self._names))
            self._over_cases(
                lambda case, _: self._keep_components(folder / _file_of(case), rules),
                watcher,
                "the components of the validation",
            )
        return choices

    def _keep_components(self, path: Path, rules: Sequence[Rule]) -> None:
        with explaining_memory(f"cannot post-process {path}"):
            prediction = read_label(path)
            keep_largest(prediction.array, rules)
            write_label(path, prediction.array, prediction.geometry, names=self._names)

    def _evaluation(self, folder: Path, watcher: Watcher) -> Evaluation:
        """Return the scores of all cases, the worst case first."""
        experiment = self._context.experiment
        scored = ScoredLabels.of(experiment.preprocessing)
        first = experiment.validation_files[0]
        spacing_mm = open_source(first.images[0], first.reading).geometry.spacing_mm
        tolerance_mm = default_tolerance_mm(spacing_mm)

        def score(case: Case, _: WindowsDone) -> list[Any]:
            with explaining_memory(f"cannot score {case.name}"):
                pair = open_pair(folder / _file_of(case), case.label, case.reading)
                scores = score_labels(pair, overlaps_in(pair, scored), scored, tolerance_mm)
            return [[list(values_of(one)), asdict(found)] for one, found in scores.items()]

        found = self._over_cases(score, watcher, "the scores of the validation")
        cases = [
            CaseScores(
                name=case.name,
                prediction=Path(_file_of(case)),
                label=case.label,
                scores={label_of(values): LabelScore(**score) for values, score in scores},
            )
            for case, scores in zip(experiment.validation_files, found, strict=True)
        ]
        units = Units.of(spacing_mm)
        evaluation = Evaluation.of(cases, scored, tolerance_mm=tolerance_mm, units=units)
        return replace(evaluation, cases=tuple(sorted(evaluation.cases, key=_worst_first)))

    def _publish(self, folder: Path, evaluation: Evaluation, choices: Sequence[Choice]) -> None:
        experiment, run = self._context.experiment, self._context.folder
        with writing(run.validation):
            draw_extremes(folder, evaluation, experiment.validation_files)
            record = _cases_record(experiment, run.latest.name, evaluation, choices)
            run.publish_validation(folder, record)


def _cases_record(
    experiment: Experiment, checkpoint: str, evaluation: Evaluation, choices: Sequence[Choice]
) -> dict[str, Any]:
    """Return what ``cases.json`` holds; ``checkpoint`` is the file name of its network."""
    config, split = experiment.config, experiment.split
    found = evaluation.to_dict()
    for entry, case in zip(found["cases"], evaluation.cases, strict=True):
        entry["mean_dice"] = case.mean_dice
    left_out = ("without_prediction", "without_label")
    return {
        "unet3d": __version__,
        "checkpoint": checkpoint,
        "epochs": config.training.epochs,
        "fold": config.data.fold,
        "training": sorted(split.training),
        "validation": sorted(split.validation),
        "postprocessing": [
            {
                "largest_component_of": list(choice.rule),
                "dice_before": choice.dice_before,
                "dice_after": choice.dice_after,
            }
            for choice in choices
        ],
        **{key: value for key, value in found.items() if key not in left_out},
    }


def _file_of(case: Case) -> str:
    """Return the file name of a case's segmentation in ``validation/``."""
    return f"{case.name}{ENDING}{written_suffix(case.images[0])}"


def _worst_first(case: CaseScores) -> float:
    """Return the sort key of a case; cases without any label come last."""
    return 2.0 if case.mean_dice is None else case.mean_dice


def draw_extremes(folder: Path, evaluation: Evaluation, cases: Sequence[Case]) -> None:
    """Draw the cases with the lowest and the highest mean Dice, or the only case."""
    files = {case.name: case for case in cases}
    scored = [case for case in evaluation.cases if case.mean_dice is not None]
    chosen = {}
    if scored:
        which = "The only case" if len(scored) == 1 else f"Worst of {len(scored)} cases"
        chosen[WORST] = which, scored[0]
    if len(scored) > 1:
        chosen[BEST] = f"Best of {len(scored)} cases", scored[-1]
    for name, (which, case) in chosen.items():
        title = f"{which}, mean Dice {case.mean_dice:.3f}: {case.name}"
        with explaining_memory(f"cannot draw {case.name}"):
            preview = _preview(title, folder, files[case.name], case, evaluation)
            write_figure(preview_figure(preview), folder / name)


def _preview(
    title: str, folder: Path, files: Case, case: CaseScores, evaluation: Evaluation
) -> Preview:
    image = open_image(files.images[0], reading=files.reading)
    prediction, label = read_pair(folder / case.prediction, files.label, files.reading)
    if evaluation.scored.ignore is not None:
        prediction.array[label.array == evaluation.scored.ignore] = 0
    return Preview(
        title=title,
        image=image,
        labels=on_grid_of(image.geometry, prediction).array,
        truth=on_grid_of(image.geometry, label).array,
        structures=[
            Structure(name=evaluation.name_of(one), values=values_of(one))
            for one in evaluation.labels
        ],
        dice=[case.scores[one].dice for one in evaluation.labels],
    )
