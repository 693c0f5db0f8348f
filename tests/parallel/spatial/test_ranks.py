"""Ranks that share volumes have the gradients of the whole batch on one device, all the same."""

from pathlib import Path

import pytest
import torch

from tests import warm
from tests.parallel.spatial import slab_gradients
from tests.parallel.spatial.slab_gradients import CASES, GPU_CASES, gpu_batch, gpu_topology
from tests.plain_network import assert_same_in_ranks, make_topology, plain_gradients
from unet3d.model import SegmentationLoss, UNet3d, dice_cross_entropy
from unet3d.parallel import Layout, parallelize


def computed(folder: Path, kind: str, **variables: str) -> Path:
    """Run the ranks, and return the folder of what they have computed."""
    done = warm.run_call(slab_gradients.main, str(folder), kind, timeout=240, **variables)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return computed(tmp_path_factory.mktemp("slabs"), "cpu")


@pytest.fixture(scope="module")
def gpu_answers(tmp_path_factory):
    gpus = ",".join(map(str, range(torch.cuda.device_count())))
    return computed(tmp_path_factory.mktemp("slabs"), "cuda", CUDA_VISIBLE_DEVICES=gpus)


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: str(CASES[case]))
def test_replicas_of_slabs_are_transparent(answers, case):
    num_replicas, num_shards, num_samples, _, joins_samples, own = CASES[case]
    options = {**own}
    regions = options.pop("regions", ())
    loss = SegmentationLoss(joins_samples=joins_samples, regions=regions)
    topology = make_topology(**options)
    expected_loss, expected, _ = plain_gradients(topology, num_samples, loss, joins_samples)
    by_rank = [
        torch.load(answers / f"{case}-{rank}.pt") for rank in range(num_replicas * num_shards)
    ]
    assert_same_in_ranks(by_rank, expected_loss, expected)


@pytest.mark.multigpu
@pytest.mark.nightly
@pytest.mark.parametrize("case", range(len(GPU_CASES)), ids=lambda case: str(GPU_CASES[case]))
def test_two_gpus_share_a_volume(gpu_answers, case):
    """Launched and replayed, with Triton's kernels, folded maps and levels that are whole."""
    image, target = gpu_batch()
    torch.manual_seed(1)
    model = UNet3d(gpu_topology())
    autocast = GPU_CASES[case]["autocast"]
    gpu = torch.device("cuda", 0)
    executor = parallelize(model, Layout(devices=(gpu,), autocast=autocast, cuda_graphs="off"))
    expected = executor.forward_backward(image.to(gpu), target.to(gpu), dice_cross_entropy).total
    gradient = torch.cat([p.grad.double().cpu().flatten() for p in model.parameters()])  # type: ignore[union-attr]
    # TF32 rounds like bfloat16 does in float32, but to three more bits.
    tolerance = 2e-2 if autocast is None else 6e-2
    by_rank = [torch.load(gpu_answers / f"{case}-{rank}.pt") for rank in range(2)]
    for loss, gradients in by_rank:
        assert abs(loss - expected.item()) <= 1e-3 * expected.item()
        found = torch.cat([value.double().flatten() for value in gradients.values()])
        assert (found - gradient).norm() <= tolerance * gradient.norm()
        for name, value in gradients.items():
            assert torch.equal(value, by_rank[0][1][name]), name
