import itertools

import pytest
import torch

from unet3d.config import ModelSettings
from unet3d.inference.mirroring import MirroredNetwork, mirrored_mean
from unet3d.inference.placing import TrainedNetwork
from unet3d.model import UNet3d, plan_topology
from unet3d.parallel import Layout, parallelize


@pytest.mark.parametrize("axes", [(), (2,), (1, 2), (0, 1, 2)], ids=str)
def test_the_mean_over_all_combinations_of_the_axes(axes):
    torch.manual_seed(0)
    settings = ModelSettings(deep_supervision=False, base_channels=4, num_levels=3)
    model = UNet3d(plan_topology(settings, (16, 16, 16), (1.0, 1.0, 1.0), 1, 3)).eval()
    executor = parallelize(model, Layout(devices=(torch.device("cpu"),)))
    image = torch.randn(2, 1, 16, 16, 8)
    combinations = itertools.product(*([False, True] for _ in axes))
    expected = []
    with torch.no_grad():
        for chosen in combinations:
            dims = [2 + axis for axis, is_flipped in zip(axes, chosen, strict=True) if is_flipped]
            expected.append(torch.flip(model(torch.flip(image, dims)), dims))
    assert len(expected) == 2 ** len(axes)
    found = MirroredNetwork(TrainedNetwork(executor=executor, precision="float32"), axes)
    mean = torch.stack(expected).mean(0)
    torch.testing.assert_close(found.predict(image), mean, rtol=1e-4, atol=1e-5)
    assert (found.input_device, found.output_device) == (executor.input_device, mean.device)
    assert found.slots == executor.slots


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_sums_are_exact_and_leave_what_the_network_returned(dtype):
    generator = torch.Generator().manual_seed(0)
    returned: list[torch.Tensor] = []

    def predict(image):
        returned.append(torch.randn(1, 3, *image.shape[2:], generator=generator).to(dtype))
        return returned[-1]

    mean = mirrored_mean(predict, torch.zeros(1, 1, 6, 5, 4), (0, 1, 2))
    first = returned[0].clone()
    flips = [[], [2], [3], [4], [2, 3], [2, 4], [3, 4], [2, 3, 4]]
    expected = sum(one.double().flip(flip) for one, flip in zip(returned, flips, strict=True)) / 8
    assert mean.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(mean.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(returned[0], first)
    mean.zero_()
    assert torch.equal(returned[0], first)
    image = torch.zeros(1, 1, 4, 4, 4)
    assert mirrored_mean(lambda one: one, image, ()) is image
