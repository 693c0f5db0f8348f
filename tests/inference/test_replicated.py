"""Windows divided among replicas: their shares, the labels, and memory that runs out."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.images.samples import noise, write_volume
from tests.networks import place, random_checkpoint
from tests.parallel.cpu_graphs import CpuGraphPool
from tests.products import by_night
from unet3d.config import InferenceSettings
from unet3d.errors import DoesNotFitError
from unet3d.images.image import open_image
from unet3d.inference import placing
from unet3d.inference.networks import Networks
from unet3d.inference.window_network import replicated
from unet3d.parallel import graph

CPU = torch.device("cpu")
SHAPE = (20, 12, 16)
"""Size of an image with 24 windows of 8^3 that overlap by half."""


class Replica:
    """Records its inputs, and returns logits in the same memory every time, as CUDA graphs do."""

    input_device = output_device = CPU

    def __init__(self, number, function=torch.neg):
        self.devices = (torch.device("cuda", number),)
        self.given = []
        self._function = function
        self._memory = torch.empty(100)

    def predict(self, image):
        self.given.append(image[:, 0, 0, 0, 0].tolist())
        answer = self._memory[: image.numel()].view(image.shape)
        return answer.copy_(self._function(image))


def images(first, count):
    """Return windows, each filled with its number."""
    return torch.arange(first, first + count).view(-1, 1, 1, 1, 1).expand(-1, 1, 2, 2, 2).float()


@pytest.mark.parametrize(
    ("num_windows", "shares"),
    [
        (1, [[0], None, None]),
        (2, [[0], [1], None]),
        (3, [[0], [1], [2]]),
        (7, [[0, 1, 2], [3, 4], [5, 6]]),
    ],
)
def test_each_replica_has_its_share_and_logits_are_in_order(num_windows, shares):
    replicas = [Replica(number) for number in range(3)]
    image = images(0, num_windows)
    assert torch.equal(replicated(replicas).predict(image), -image)
    assert [replica.given for replica in replicas] == [[one] if one else [] for one in shares]


def test_logits_outlive_the_next_call_of_several_replicas():
    network = replicated([Replica(0), Replica(3)])
    before = network.predict(images(0, 4))
    network.predict(images(9, 4))
    assert torch.equal(before, -images(0, 4))
    assert network.input_device == network.output_device == CPU
    assert [str(device) for device in network.devices] == ["cuda:0", "cuda:3"]


def test_the_device_whose_memory_runs_out_is_named():
    def fail(image):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. And more.")

    network = replicated([Replica(0), Replica(1, fail), Replica(2)])
    with pytest.raises(DoesNotFitError) as caught:
        network.predict(images(0, 3))
    assert str(caught.value) == (
        "windows of 2x2x2 voxels do not fit on cuda:1 (CUDA out of memory); "
        "use a smaller inference.window or more devices"
    )


# From a scan to its labels


@pytest.fixture
def image(tmp_path):
    return open_image([write_volume(tmp_path / "volume.nii", noise(SHAPE))])


def network_of(*changes, **more):
    """Return a network in float64, so that labels do not depend on rounding."""
    changes = ("training.precision=float64", *changes)
    return random_checkpoint(dtype=torch.float64, changes=changes, patch_size=(8, 8, 8), **more)


def placed(replicas, *checkpoints, device="cpu", **more):
    """Return a predictor with this many replicas on the CPU, or on as many GPUs."""
    devices = ["cpu"] * replicas if device == "cpu" else map(str, range(replicas))
    settings = InferenceSettings(**more)
    networks = Networks.of(*checkpoints)
    return place(networks, *devices, mode="data", inference=settings)


def alone(image, *checkpoints, **more):
    """Return the labels of one device, as a copy: the next image overwrites them."""
    predictor = place(Networks.of(*checkpoints), inference=InferenceSettings(**more))
    labels = predictor.segment(image).copy()
    assert len(np.unique(labels)) == 3
    return labels


@pytest.mark.parametrize(
    ("count", "batch_size", "tta"),
    [(1, "auto", False), (2, 5, False), (3, 2, True), (3, 5, False), (5, "auto", False)],
)
def test_any_number_of_replicas_gives_the_labels_of_one(image, count, batch_size, tta):
    """In batches of 5 windows, 4 of the 24 are left for two replicas, 9 for three."""
    checkpoint, shown = network_of("patches.augmentation_details.mirror_axes=x,z"), []
    predictor = placed(count, checkpoint, batch_size=batch_size, tta=tta)
    found = predictor.segment(image, lambda *done: shown.append(done))
    np.testing.assert_array_equal(found, alone(image, checkpoint, tta=tta))
    at_a_time = 24 if batch_size == "auto" else batch_size * count
    done = [number for number, _ in shown]
    assert done[0] == 0 and done[-1] == 24 and {total for _, total in shown} == {24}
    # At the end of a row of windows a batch may be smaller.
    assert all(0 < after - before <= at_a_time for before, after in pairwise(done))


@pytest.mark.parametrize("kinds", [[(4, 8), (6, 8), (4, 8)], *by_night([(4, 8)] * 3)], ids=str)
def test_every_replica_gets_the_weights_of_the_next_network(image, kinds):
    members = [network_of(seed=seed, channels=channels) for seed, channels in enumerate(kinds)]
    expected = alone(image, *members)
    predictor = placed(2, *members, batch_size=3)
    for _ in "ab":  # the second time begins with the last network in place
        np.testing.assert_array_equal(predictor.segment(image), expected)
    for member in members:
        assert (alone(image, member) != expected).mean() > 0.02


@pytest.mark.parametrize(
    ("num_networks", "averaging", "batch_size"),
    [(1, "logits", 3), (3, "probabilities", 2), *by_night((1, "logits", 2), (3, "logits", 3))],
)
def test_a_graph_of_each_replica_serves_all_networks_and_a_smaller_last_batch(
    image, num_networks, averaging, batch_size, monkeypatch
):
    """Three replicas, with three windows each, have two each in the last batch."""
    monkeypatch.setitem(graph.POOLS, "cpu", CpuGraphPool)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(CpuGraphPool, "num_captured", 0)
    given = {"batch_size": batch_size, "averaging": averaging, "tta": True}
    changes = (f"inference.averaging={averaging}", "patches.augmentation_details.mirror_axes=x")
    members = [network_of(*changes, seed=seed) for seed in range(num_networks)]
    expected = alone(image, *members, **given)
    monkeypatch.setattr(placing.PlacedNetworks, "is_replayable", True)
    CpuGraphPool.num_captured = 0
    found = placed(3, *members, **given).segment(image)
    np.testing.assert_array_equal(found, expected)
    assert CpuGraphPool.num_captured == 3


@pytest.mark.multigpu
@pytest.mark.parametrize("num_networks", [1, 2])
def test_two_gpus_replay_what_a_cpu_computes(image, num_networks):
    """Most of the 24 windows are computed by graphs; in float64 logits differ by rounding."""
    members = [network_of(seed=seed) for seed in range(num_networks)]
    predictor = placed(2, *members, device="cuda", batch_size=2)
    expected = alone(image, *members)
    for _ in "ab":
        assert (predictor.segment(image) == expected).mean() > 0.9999
