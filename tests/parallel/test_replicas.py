"""Replicas give the gradients of the whole batch on one device, in every rank the same."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.parallel.rank_gradients import CASES, STEPS, WORLD_SIZES
from tests.ranks import environment
from tests.test_transparency import assert_close, make_batch, make_topology, plain_gradients

GPUS = tuple(torch.device("cuda", index) for index in range(3))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what all ranks have computed."""
    folder = tmp_path_factory.mktemp("gradients")
    command = [sys.executable, "-W", "error", "-m", "tests.parallel.rank_gradients", str(folder)]
    done = subprocess.run(
        command, env=environment(), timeout=120, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: str(CASES[case]))
@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
def test_replicas_are_transparent(answers: Path, num_ranks: int, case: int) -> None:
    num_samples, _, _, options = CASES[case]
    image, target = make_batch(num_samples)
    expected_loss, expected, _ = plain_gradients(make_topology(**options), image, target)
    for step in range(STEPS):
        by_rank = [
            torch.load(answers / f"{num_ranks}-{case}-{step}-{rank}.pt")
            for rank in range(num_ranks)
        ]
        for loss, gradients in by_rank:
            assert abs(loss - expected_loss.item()) <= 1e-10 * expected_loss.item()
            assert list(gradients) == list(expected)
            for name, value in gradients.items():
                assert torch.equal(value, by_rank[0][1][name]), name
                if expected[name].norm() > 1e-12:
                    assert_close(value, expected[name], f"step {step}, {name}")
