"""Replicas give the gradients of the whole batch on one device, in every rank the same."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.parallel.rank_gradients import CASES, STEPS, WORLD_SIZES
from tests.plain_network import (
    assert_close,
    assert_same_in_ranks,
    make_batch,
    make_topology,
    plain_gradients,
)
from tests.ranks import environment
from unet3d.errors import ConfigError
from unet3d.model import SegmentationLoss, UNet3d
from unet3d.parallel import DataParallelExecutor, Executor, Layout, parallelize
from unet3d.parallel.replicas import use_plain_strides

GPUS = tuple(torch.device("cuda", index) for index in range(2))


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
    num_samples, _, _, joins_samples, own = CASES[case]
    options = {**own}
    regions = options.pop("regions", ())
    loss = SegmentationLoss(joins_samples=joins_samples, regions=regions)
    topology = make_topology(**options)
    expected_loss, expected, _ = plain_gradients(topology, num_samples, loss, joins_samples)
    for step in range(STEPS):
        by_rank = [
            torch.load(answers / f"{num_ranks}-{case}-{step}-{rank}.pt")
            for rank in range(num_ranks)
        ]
        assert_same_in_ranks(by_rank, expected_loss, expected)


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: str(CASES[case]))
@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
def test_what_is_replayed_is_averaged_too(answers: Path, num_ranks: int, case: int) -> None:
    mean = sum(range(num_ranks)) / num_ranks
    for gradient in torch.load(answers / f"{num_ranks}-{case}.pt"):
        assert torch.equal(gradient, torch.full_like(gradient, mean))


def two_steps(executor: Executor, dtype: torch.dtype, loss: SegmentationLoss) -> list[torch.Tensor]:
    """Return all gradients in a row, after each of two steps on batches of four."""
    found = []
    for number in range(2):
        image, target = (value[:4] for value in make_batch(5 + number, dtype))
        target = target.to(executor.output_device)
        executor.forward_backward(image.to(executor.input_device), target, loss)
        gradients = [p.grad.cpu().flatten() for p in executor.module.parameters()]
        found.append(torch.cat(gradients))
        with torch.no_grad():
            for parameter in executor.module.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    return found


@pytest.mark.multigpu
@pytest.mark.parametrize("output", GPUS, ids=str)
@pytest.mark.parametrize("lowered", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("joins_samples", [False, True])
def test_nn_data_parallel_gives_the_gradients_of_one_gpu(
    output: torch.device, lowered: torch.dtype | None, joins_samples: bool
) -> None:
    dtype = torch.float64 if lowered is None else torch.float32
    networks = []
    for _ in range(2):
        torch.manual_seed(1)
        networks.append(UNet3d(make_topology()).to(dtype))
    threads = DataParallelExecutor(networks[0], GPUS, output, lowered)
    assert (threads.input_device, threads.output_device) == (GPUS[0], output)
    assert not torch.backends.cudnn.benchmark
    one = parallelize(
        networks[1], Layout(devices=GPUS[:1], cuts=None, num_micro_batches=1, autocast=lowered)
    )
    loss = SegmentationLoss(joins_samples=joins_samples)
    found, wanted = two_steps(threads, dtype, loss), two_steps(one, dtype, loss)
    for actual, expected in zip(found, wanted, strict=True):
        if lowered is None:
            assert_close(actual, expected, "gradients")
        similarity = torch.nn.functional.cosine_similarity(actual, expected, dim=0)
        assert 1 - similarity <= 5e-2  # each gradient is noisy, but all point the same way
    image, _ = make_batch(1, dtype)
    logits = threads.predict(image.to(GPUS[0]))
    assert logits.device == output
    expected_logits = one.predict(image.to(GPUS[0]))
    assert (logits.cpu() - expected_logits.cpu()).norm() <= 5e-2 * expected_logits.cpu().norm()


def test_kernels_of_one_voxel_have_the_strides_of_their_gradients() -> None:
    head = torch.nn.Conv3d(32, 3, 1).to(memory_format=torch.channels_last_3d)
    before = head.weight.detach().clone()
    head(torch.ones(1, 32, 4, 4, 4)).sum().backward()
    assert head.weight.stride() != head.weight.grad.stride() == (32, 1, 1, 1, 1)
    memory = head.weight.data_ptr()
    use_plain_strides(head)
    assert head.weight.stride() == (32, 1, 1, 1, 1)
    assert head.weight.data_ptr() == memory and torch.equal(head.weight, before)


def test_kernels_of_one_channel_have_plain_strides() -> None:
    """As the gradient has that the first convolution's own kernel computes."""
    stem = torch.nn.Conv3d(1, 32, 3).to(memory_format=torch.channels_last_3d)
    before = stem.weight.detach().clone()
    use_plain_strides(stem)
    assert stem.weight.stride() == (27, 27, 9, 3, 1)
    assert torch.equal(stem.weight, before)


def test_nn_data_parallel_refuses_batch_norm() -> None:
    with pytest.raises(ConfigError, match=r"batch normalisation with 2 replicas"):
        DataParallelExecutor(UNet3d(make_topology(norm="batch")), GPUS, None, None)
