"""Replicas give the gradients of the whole batch on one device, in every rank the same."""

import pytest
import torch

from tests import warm
from tests.parallel import rank_gradients
from tests.parallel.rank_gradients import CASES
from tests.plain_network import (
    assert_close,
    assert_same_in_ranks,
    make_batch,
    make_topology,
    plain_gradients,
)
from unet3d.errors import ConfigError
from unet3d.model import SegmentationLoss, UNet3d
from unet3d.parallel import DataParallelExecutor, Executor, Layout, parallelize
from unet3d.parallel.replicas import use_plain_strides

GPUS = tuple(torch.device("cuda", index) for index in range(2))


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Folder of what all ranks have computed."""
    folder = tmp_path_factory.mktemp("gradients")
    done = warm.run_call(rank_gradients.main, str(folder))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: str(CASES[case]))
def test_replicas_are_transparent_and_average_what_is_replayed(answers, case):
    num_ranks, num_samples, _, _, joins_samples, own = CASES[case]
    options = {**own}
    loss = SegmentationLoss(joins_samples=joins_samples, regions=options.pop("regions", ()))
    topology = make_topology(**options)
    expected_loss, expected, _ = plain_gradients(topology, num_samples, loss, joins_samples)
    found = [torch.load(answers / f"{case}-{rank}.pt") for rank in range(num_ranks)]
    for by_rank in zip(*(steps for steps, _ in found), strict=True):
        assert_same_in_ranks(by_rank, expected_loss, expected)
    mean = sum(range(num_ranks)) / num_ranks
    for _, replayed in found:
        assert all(torch.equal(value, torch.full_like(value, mean)) for value in replayed)


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
def test_nn_data_parallel_gives_the_gradients_of_one_gpu(output, lowered, joins_samples):
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


def test_kernels_of_one_voxel_or_channel_have_the_strides_of_their_gradients():
    """For one channel those that the first convolution's own kernel gives its gradient."""
    for own, strides in (((32, 3, 1), (32, 1, 1, 1, 1)), ((1, 32, 3), (27, 27, 9, 3, 1))):
        conv = torch.nn.Conv3d(*own).to(memory_format=torch.channels_last_3d)
        before, memory = conv.weight.detach().clone(), conv.weight.data_ptr()
        use_plain_strides(conv)
        assert conv.weight.stride() == strides
        assert torch.equal(conv.weight, before)
        if own[-1] == 1:
            assert conv.weight.data_ptr() == memory
            conv(torch.ones(1, 32, 4, 4, 4)).sum().backward()
            assert conv.weight.grad.stride() == strides


def test_nn_data_parallel_refuses_batch_norm():
    with pytest.raises(ConfigError, match=r"batch normalisation with 2 replicas"):
        DataParallelExecutor(UNet3d(make_topology(norm="batch")), GPUS, None, None)
