"""The average of networks against PyTorch's softmax or mean, in float64."""

import pytest
import torch

from unet3d.inference import volume_logits
from unet3d.inference.volume_logits import mean_slabs


def random_logits(*shape):
    generator = torch.Generator().manual_seed(5)
    return [6 * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]


def mean_of(logits, of_regions=False):
    return volume_logits.mean_of(
        [one.clone() for one in logits], "probabilities", of_regions=of_regions
    )


@pytest.mark.parametrize("piece", [1, 100, 10**6])
def test_it_is_the_mean_of_softmax(monkeypatch, piece):
    monkeypatch.setattr(volume_logits, "PIECE_NUMBERS", piece)
    logits = random_logits(4, 7, 5, 6)
    expected = torch.stack([one.softmax(0) for one in logits]).mean(0)
    torch.testing.assert_close(mean_of(logits).exp(), expected, rtol=1e-13, atol=0)
    # Neither the mean of logits nor a vote leads to these classes.
    found = mean_of(logits).argmax(0)
    assert torch.equal(found, expected.argmax(0))
    assert not torch.equal(found, torch.stack(logits).mean(0).argmax(0))
    # Logits beyond the range of float32 stay finite and in order.
    certain = torch.tensor([500.0, 0.0, -500.0]).reshape(3, 1, 1, 1)
    mean = mean_of([certain, -certain])
    assert mean.isfinite().all()
    torch.testing.assert_close(mean.exp().flatten(), torch.tensor([0.5, 0.0, 0.5]))
    assert mean_of([certain, certain], of_regions=True).isfinite().all()


@pytest.mark.parametrize("averaging", ["probabilities", "logits"])
@pytest.mark.parametrize("of_regions", [False, True])
def test_slabs_that_end_elsewhere_have_the_mean_of_the_whole(averaging, of_regions):
    logits = random_logits(3, 7, 7, 7)
    mean = torch.stack(logits).mean(0)
    if averaging == "probabilities":
        mean = torch.stack([one.softmax(0) for one in logits]).mean(0).log()
        if of_regions:
            mean = torch.stack([one.sigmoid() for one in logits]).mean(0).logit()
    for axis in range(3):
        slabs = [
            iter([slab.clone() for slab in torch.split(one, planes, 1 + axis)])
            for one, planes in zip(logits, (2, 7, 3), strict=True)
        ]
        found = torch.cat(list(mean_slabs(slabs, axis, averaging, of_regions=of_regions)), 1 + axis)
        torch.testing.assert_close(found, mean, rtol=1e-12, atol=1e-13)


def test_a_mean_takes_the_wider_type():
    first, second, _ = random_logits(2, 3, 3, 3)
    assert mean_of([first.float(), second]).dtype == torch.float64
    torch.testing.assert_close(mean_of([second]), second.log_softmax(0))
