"""The validation cases as the final network predicts them, from file to file, with their scores.

What is in ``validation/`` of a run's folder is what ``unet3d predict`` would write for the images
of the validation cases: on their own grids, by the same code, with the network where it was
trained, computed in what ``inference.precision`` says. From them is decided which components to
keep (:mod:`unet3d.training.component_choice`), and the others are removed. ``cases.json`` holds the
scores that ``unet3d evaluate`` would find, the worst case first; that one and the best one are
drawn.

Replicas divide the cases; the shards of a replica compute each of its cases together, and the first
of them writes. Only the ranks on the first one's machine write, because the run's folder may be on
a disk of that machine. The folder is written under another name, and gets its own when it is whole:
whoever stops in the middle leaves nothing, and begins again with ``--resume``.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unet3d.atomic import unfinished_folder
from unet3d.datasets.dataset import Case
from unet3d.datasets.labels import Label, ScoredLabels, label_of, values_of
from unet3d.distributed.group import Group
from unet3d.images.labels import read_label, write_label
from unet3d.images.memory_limits import explaining_memory
from unet3d.inference.evaluation import CaseScores, Evaluation, read_pair
from unet3d.inference.label_scores import TOLERANCE_MM, LabelScore, score_maps
from unet3d.inference.networks import Networks
from unet3d.inference.placing import TrainedNetwork, wanted_precision
from unet3d.inference.postprocessing import keep_largest, rules_in_words
from unet3d.inference.predictor import Predictor
from unet3d.inference.scan_search import SUFFIX
from unet3d.inference.scans import Scan, read_scan, write_segmentation
from unet3d.interruption import InterruptionRequest
from unet3d.parallel import Executor, ParallelDims, image_dtype, resolve_precision
from unet3d.planning.experiment import Experiment
from unet3d.runs.checkpoint import Checkpoint
from unet3d.runs.run_folder import RunFolder, writing
from unet3d.training.case_pictures import draw_extremes
from unet3d.training.component_choice import Choice, OwnCase, choose_components
from unet3d.training.final_result import FinalResult, cases_record

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, int, int], object]
"""Is told how far a rank is: cases done and in all, windows of the next case done and in all."""

Scores = dict[int, dict[Label, LabelScore]]
"""By the place of a case among the validation cases."""


class FinalValidation:
    """Predicts and scores the validation cases of one run."""

    def __init__(
        self,
        *,
        experiment: Experiment,
        executor: Executor,
        folder: RunFolder,
        dims: ParallelDims,
        group: Group,
    ) -> None:
        """Prepare nothing but the ranks' connections; all of them call it.

        Args:
            experiment: The cases, and the settings of prediction.
            executor: The placed network.
            folder: The run's files.
            dims: Replicas and shards.
            group: The ranks: shard after shard, replica after replica.

        Raises:
            DeviceError: The network cannot be computed here in what inference.precision says.
        """
        config = experiment.config
        wanted = wanted_precision(
            config.inference.precision,
            image_dtype(executor.module),
            config.training.precision,
            dims.all_devices,
        )
        self._precision = resolve_precision(
            wanted, dims.devices, group.exchange, "inference.precision"
        )
        self._experiment = experiment
        self._executor = executor
        self._folder = folder
        self._group = group
        self._num_shards = dims.num_shards
        self._replica, self._shard = divmod(group.ranks.rank, dims.num_shards)
        self._num_replicas = dims.num_replicas
        self._shards: dist.ProcessGroup | None = None
        if dims.num_shards > 1:
            self._shards = group.new_group(torch.device("cpu"), dims.num_shards)
        self._scored = ScoredLabels.of(experiment.preprocessing)
        values, names = experiment.preprocessing.label_values, experiment.preprocessing.label_names
        self._names = dict(list(zip(values, names, strict=True))[1:])

    def run(
        self,
        checkpoint: Checkpoint,
        num_steps: int,
        interruption: InterruptionRequest,
        progress: Progress = lambda *_: None,
    ) -> FinalResult:
        """Write the folder, and return the scores; all ranks call it.

        Args:
            checkpoint: The final network.
            num_steps: Steps done since the beginning.
            interruption: Ends it before the next case of this rank.
            progress: Is told about the share of this rank's replica.

        Raises:
            VolumeError: A case cannot be read, predicted or written.
            ConfigError: The run's folder cannot be written to.
            DoesNotFitError: A device has too little memory.
            RankError: Another rank died or hangs.
        """
        cases = self._experiment.validation_files
        if not cases:
            return FinalResult(evaluation=None)
        began = time.monotonic()
        logger.info(
            "predicting %d validation case(s) with the final network in %s",
            len(cases),
            self._precision,
        )
        share = self._share(len(cases))
        with self._unfinished() as folder:
            note = partial(self._group.note, num_steps)
            self._predict(share, checkpoint, folder, interruption, progress, note)
            stop = max(self._group.exchange(interruption.signal_number or 0))
            if stop:
                return FinalResult(evaluation=None, stop=stop)
            choices, stop = self._choose_components(share, folder, interruption, note)
            if stop:
                return FinalResult(evaluation=None, stop=stop)
            own = self._score(share, folder, interruption, note)
            answers = self._group.exchange([interruption.signal_number or 0, _to_plain(own)])
            stop = max(number for number, _ in answers)
            if stop:
                return FinalResult(evaluation=None, stop=stop)
            found: Scores = {}
            for _, plain in answers:
                found |= _from_plain(plain)
            evaluation = self._evaluation(found)
            if self._group.is_first:
                note("the pictures of the validation")
                with writing(self._folder.validation):
                    draw_extremes(folder, evaluation, cases)
                    record = cases_record(
                        self._experiment, self._folder.latest.name, evaluation, choices
                    )
                    self._folder.publish_validation(folder, record)
        seconds = time.monotonic() - began
        return FinalResult(evaluation=evaluation, choices=choices, seconds=seconds)

    def _share(self, num_cases: int) -> range:
        """Return the places of the cases that this rank's replica predicts."""
        ranks_of_first = self._group.exchange(self._group.ranks.local_world_size)[0]
        num_writing = min(self._num_replicas, -(-ranks_of_first // self._num_shards))
        if self._replica >= num_writing:
            return range(0)
        return range(self._replica, num_cases, num_writing)

    @contextmanager
    def _unfinished(self) -> Iterator[Path]:
        """Make the folder that is written to; the first rank deletes it if it is not published."""
        if not self._group.is_first:
            yield Path(self._group.from_first(str))
            return
        path = self._folder.validation
        with writing(path), unfinished_folder(path) as folder:
            yield Path(self._group.from_first(lambda: str(folder)))

    def _predict(
        self,
        share: range,
        checkpoint: Checkpoint,
        folder: Path,
        interruption: InterruptionRequest,
        progress: Progress,
        note: Callable[[str], object],
    ) -> None:
        if not share:
            return
        self._executor.module.eval()
        inference = self._experiment.config.inference
        if self._num_shards > 1 and inference.window == "auto":
            # The first shard cannot look for windows that fit while the others wait for it.
            window = self._experiment.patch_size or "whole"
            inference = inference.model_copy(update={"window": window})
        predictor = Predictor(
            Networks.of(checkpoint),
            self._experiment.config.parallel,
            [inference],
            placed=TrainedNetwork(
                executor=self._executor,
                precision=self._precision,
                is_shared=self._num_shards > 1,
            ),
        )
        for number, index in enumerate(share):
            if self._group.agree(interruption.signal_number or 0, self._shards):
                return
            case = self._experiment.validation_files[index]
            what = f"the prediction of validation case {case.name}"

            def windows_done(done: int, total: int, number: int = number, what: str = what) -> None:
                note(f"{what}, window {done} of {total}")
                progress(number, len(share), done, total)

            note(what)
            with explaining_memory(str(case.images[0])):
                scan = Scan(images=case.images, output=folder / _file_of(case))
                image = read_scan(scan)
                labels = predictor.segment(image, windows_done)
                if self._shard != 0:  # the first shard has the same
                    continue
                write_segmentation(scan, labels, image.geometry, self._names)
        progress(len(share), len(share), 0, 1)

    def _choose_components(
        self,
        share: range,
        folder: Path,
        interruption: InterruptionRequest,
        note: Callable[[str], object],
    ) -> tuple[tuple[Choice, ...], int]:
        """Decide on all predictions, and apply that to this rank's; return it, and the signal."""
        if not self._experiment.config.inference.postprocessing:
            return (), 0
        cases = [self._experiment.validation_files[index] for index in share]
        own = [
            OwnCase(prediction=folder / _file_of(case), label=case.label)
            for case in (cases if self._shard == 0 else ())
        ]
        choices, stop = choose_components(own, self._scored, self._group, interruption, note)
        # Merged labels are scored by all of their values, and predicted by the lowest of them.
        choices = tuple(
            replace(choice, rule=tuple(value for value in choice.rule if value in self._names))
            for choice in choices
        )
        rules = [choice.rule for choice in choices]
        if rules and not stop:
            logger.info("post-processing: %s", rules_in_words(rules, self._names))
            for case in own:
                with explaining_memory(f"cannot post-process {case.prediction}"):
                    prediction = read_label(case.prediction)
                    keep_largest(prediction.array, rules)
                    write_label(
                        case.prediction, prediction.array, prediction.geometry, names=self._names
                    )
        return choices, stop

    def _score(
        self,
        share: range,
        folder: Path,
        interruption: InterruptionRequest,
        note: Callable[[str], object],
    ) -> Scores:
        """Return the scores of this rank's share; none in a shard that is not the first."""
        scores: Scores = {}
        for index in share if self._shard == 0 else ():
            if interruption.signal_number:
                break
            case = self._experiment.validation_files[index]
            note(f"the scores of validation case {case.name}")
            with explaining_memory(f"cannot score {case.name}"):
                prediction, label = read_pair(folder / _file_of(case), case.label)
                scores[index] = score_maps(
                    prediction.array, label.array, label.geometry.affine, self._scored
                )
        return scores

    def _evaluation(self, scores: Scores) -> Evaluation:
        """Return the scores of all cases, the worst case first."""
        cases = [
            CaseScores(
                name=case.name,
                prediction=Path(_file_of(case)),
                label=case.label,
                scores=scores[index],
            )
            for index, case in enumerate(self._experiment.validation_files)
        ]
        evaluation = Evaluation.of(cases, self._scored, TOLERANCE_MM)
        return replace(evaluation, cases=tuple(sorted(evaluation.cases, key=_worst_first)))


def _file_of(case: Case) -> str:
    """Return the name of a case's prediction, below ``validation/``."""
    return f"{case.name}{SUFFIX}"


def _worst_first(case: CaseScores) -> float:
    """Return what cases are sorted by; those without any label come last."""
    return 2.0 if case.mean_dice is None else case.mean_dice


def _to_plain(scores: Scores) -> list[Any]:
    return [
        [index, [[list(values_of(label)), asdict(score)] for label, score in of_case.items()]]
        for index, of_case in scores.items()
    ]


def _from_plain(plain: Sequence[Any]) -> Scores:
    return {
        index: {label_of(values): LabelScore(**score) for values, score in of_case}
        for index, of_case in plain
    }
