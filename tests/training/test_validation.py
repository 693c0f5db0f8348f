"""Validation with a network whose answers are known."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.rank_threads import in_threads
from unet3d.config import load_config
from unet3d.distributed.group import Group
from unet3d.distributed.interruption import InterruptionRequest
from unet3d.distributed.ranks import Ranks
from unet3d.training.validation import Validation, Validator

NAMES = ("background", "liver", "tumour", "absent")


class Case:
    """A case whose image is what the network will answer."""

    def __init__(self, name: str, answer: np.ndarray, label: np.ndarray) -> None:
        self.name = name
        self.answer, self.truth = answer, label

    def image(self) -> np.ndarray:
        return self.answer[None].astype(np.float32)

    def label(self) -> np.ndarray:
        return self.truth


class Reader:
    """An executor that reads the labels from the image."""

    input_device = output_device = torch.device("cpu")
    slots = ()

    def __init__(self) -> None:
        self.module = torch.nn.Conv3d(1, 1, 1)

    def predict(self, image: Tensor) -> Tensor:
        classes = F.one_hot(image[:, 0].round().long(), len(NAMES))
        return classes.movedim(-1, 1).float()


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    generator = np.random.default_rng(0)
    made = []
    for number in range(5):
        answer, label = generator.integers(0, 3, (2, 6, 8, 10 + 2 * number))
        if number == 2:
            answer[answer == 2] = label[label == 2] = 0  # no tumour
        made.append(Case(f"case_{number}", answer, label))
    return made


def validator(cases: list[Case], group: Group) -> Validator:
    experiment: Any = SimpleNamespace(
        config=load_config(None, ["inference.window=4,4,4"]),
        preprocessing=SimpleNamespace(label_names=NAMES),
        topology=SimpleNamespace(total_stride=(2, 2, 2), num_classes=len(NAMES)),
        patch_size=(4, 4, 4),
        validation=tuple(cases),
    )
    executor: Any = Reader()
    return Validator(experiment, executor, group)


def expected(cases: list[Case]) -> dict[str, float | None]:
    means: dict[str, float | None] = {"absent": None}
    for value, name in ((1, "liver"), (2, "tumour")):
        scores = []
        for case in cases:
            answer, label = case.answer == value, case.truth == value
            if label.any():
                scores.append(2 * (answer & label).sum() / (answer.sum() + label.sum()))
        means[name] = float(np.mean(scores))
    return means


def assert_right(found: Validation, cases: list[Case]) -> None:
    wanted = expected(cases)
    assert found.stop == 0
    assert set(found.dice) == set(NAMES[1:])
    for name, value in wanted.items():
        assert found.dice[name] == (None if value is None else pytest.approx(value, rel=1e-6))
    known = [value for value in wanted.values() if value is not None]
    assert found.mean_dice == pytest.approx(sum(known) / 2, rel=1e-6)


def test_the_dice_of_each_label_is_the_mean_over_the_cases(cases: list[Case]) -> None:
    found = validator(cases, Group(Ranks())).validate(1, 10, InterruptionRequest())
    assert_right(found, cases)


def test_every_case_and_window_is_told_of(cases: list[Case]) -> None:
    told: list[tuple[int, int, int, int]] = []
    found = validator(cases, Group(Ranks())).validate(
        1, 10, InterruptionRequest(), lambda *numbers: told.append(numbers)
    )
    assert found.seconds > 0
    assert [numbers[:2] for numbers in told if numbers[2] == 0] == [(n, 5) for n in range(6)]
    assert told[-1] == (5, 5, 0, 1)
    parts = [case + window / of_case for case, _, window, of_case in told]
    assert parts == sorted(parts) and parts[0] == 0 and parts[-1] == 5
    for number in range(5):
        windows = [window for case, _, window, _ in told if case == number]
        (num_windows,) = {of_case for case, _, _, of_case in told if case == number}
        assert windows[0] == 0 and windows[-1] == num_windows > 1


def both_ranks(cases: list[Case], requests: list[InterruptionRequest]) -> list[Validation]:
    return in_threads(
        2,
        lambda group: validator(cases, group).validate(1, 10, requests[group.ranks.rank]),
    )


def test_ranks_divide_the_cases_and_agree(cases: list[Case]) -> None:
    first, second = both_ranks(cases, [InterruptionRequest(), InterruptionRequest()])
    assert first == second
    assert_right(first, cases)


def test_a_signal_to_one_rank_stops_all(cases: list[Case]) -> None:
    told = InterruptionRequest()
    told.signal_number = 15
    found = both_ranks(cases, [InterruptionRequest(), told])
    assert [one.stop for one in found] == [15, 15]
