import pytest
import torch

from unet3d.inference.window_network import mirrored_mean


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_sums_are_exact_and_leave_what_the_network_returned(dtype):
    generator = torch.Generator().manual_seed(0)
    returned = []

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
