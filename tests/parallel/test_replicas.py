"""Replicas: each rank gets the gradients of the whole batch on one device."""

from functools import cache

import pytest
import torch

from tests import warm
from tests.parallel import rank_gradients
from tests.parallel.rank_gradients import BY_DAY, CASES, GPU_CASES, gpu_gradients
from tests.plain_network import (
    assert_close,
    assert_same_in_ranks,
    make_batch,
    make_network,
    make_topology,
    plain_gradients,
)
from unet3d.errors import ConfigError, VolumeError
from unet3d.model import SegmentationLoss, UNet3d
from unet3d.parallel import DataParallelExecutor, Layout, parallelize

GPUS = tuple(torch.device("cuda", index) for index in range(2))


def computed(folder, kind, **variables):
    """Run the ranks, and return the folder with their results."""
    done = warm.run_call(rank_gradients.main, str(folder), kind, timeout=240, **variables)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return a function that runs the ranks of all cases by day or by night, once."""
    return cache(lambda when: computed(tmp_path_factory.mktemp("gradients"), when))


@pytest.fixture(scope="module")
def gpu_answers(tmp_path_factory):
    gpus = ",".join(map(str, range(torch.cuda.device_count())))
    return computed(tmp_path_factory.mktemp("gradients"), "cuda", CUDA_VISIBLE_DEVICES=gpus)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(own), marks=() if case in BY_DAY else pytest.mark.nightly)
        for case, own in enumerate(CASES)
    ],
)
def test_replicas_and_slabs_are_transparent_and_average_what_is_replayed(answers, case):
    num_replicas, num_shards, num_samples, _, _, joins_samples, own = CASES[case]
    options = {name: own[name] for name in own if name not in rank_gradients.WAYS}
    loss = SegmentationLoss(joins_samples=joins_samples, regions=options.pop("regions", ()))
    expected = plain_gradients(make_topology(**options), num_samples, loss, joins_samples)[:2]
    num_ranks = num_replicas * num_shards
    folder = answers("day" if case in BY_DAY else "night")
    found = [torch.load(folder / f"{case}-{rank}.pt") for rank in range(num_ranks)]
    for by_rank in zip(*(steps for steps, _ in found), strict=True):
        assert_same_in_ranks(by_rank, *expected)
    mean = sum(range(num_ranks)) / num_ranks
    for _, replayed in found:
        assert all(torch.equal(value, torch.full_like(value, mean)) for value in replayed)


@pytest.mark.multigpu
@pytest.mark.nightly
@pytest.mark.parametrize("case", range(len(GPU_CASES)), ids=lambda case: str(GPU_CASES[case]))
def test_two_gpus_share_a_volume_or_a_batch(gpu_answers, case):
    """Launched and replayed steps, with Triton's kernels, folded maps and whole levels."""
    autocast = GPU_CASES[case]["autocast"]
    one = Layout(devices=GPUS[:1], autocast=autocast, captures=False)
    joins_samples = "num_replicas" in GPU_CASES[case]
    expected_loss, expected = gpu_gradients(one, joins_samples=joins_samples)
    # TF32 rounds like bfloat16 does in float32, but to three more bits.
    tolerance = 2e-2 if autocast is None else 6e-2
    by_rank = [torch.load(gpu_answers / f"{case}-{rank}.pt") for rank in range(2)]
    for loss, gradients in by_rank:
        assert abs(loss - expected_loss) <= 1e-3 * expected_loss
        found, wanted = (
            torch.cat([value.double().flatten() for value in one.values()])
            for one in (gradients, expected)
        )
        assert (found - wanted).norm() <= tolerance * wanted.norm()
        assert all(torch.equal(value, by_rank[0][1][name]) for name, value in gradients.items())


def two_steps(executor, dtype, loss):
    """Return all gradients joined, after each of two steps on batches of four."""
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
    networks = [make_network(make_topology()).to(dtype) for _ in range(2)]
    threads = DataParallelExecutor(networks[0], GPUS, output, lowered)
    assert (threads.input_device, threads.output_device) == (GPUS[0], output)
    assert not torch.backends.cudnn.benchmark
    one = parallelize(networks[1], Layout(devices=GPUS[:1], autocast=lowered))
    loss = SegmentationLoss(joins_samples=joins_samples)
    found, wanted = two_steps(threads, dtype, loss), two_steps(one, dtype, loss)
    for actual, expected in zip(found, wanted, strict=True):
        if lowered is None:
            assert_close(actual, expected, "gradients")
        similarity = torch.nn.functional.cosine_similarity(actual, expected, dim=0)
        assert 1 - similarity <= 5e-2  # single gradients are noisy, but all point the same way
    image, _ = make_batch(1, dtype)
    logits = threads.predict(image.to(GPUS[0]))
    assert logits.device == output
    expected_logits = one.predict(image.to(GPUS[0]))
    assert (logits.cpu() - expected_logits.cpu()).norm() <= 5e-2 * expected_logits.cpu().norm()


def test_nn_data_parallel_refuses_batch_norm():
    with pytest.raises(ConfigError, match=r"batch normalisation with 2 replicas"):
        DataParallelExecutor(UNet3d(make_topology(norm="batch")), GPUS, None, None)


def test_nn_data_parallel_trains_on_after_a_prediction_that_fails():
    model = make_network(make_topology())
    executor = DataParallelExecutor(model, (torch.device("cpu"),), None, None)
    with pytest.raises(VolumeError, match="7 channels"):
        executor.predict(torch.zeros(1, 7, 16, 16, 8).double())
    assert model.training
