import numpy as np
import pytest
import torch
import torch.nn.functional as F

from unet3d.kernels import average_pool, strongest_class, written_regions

LAST = torch.channels_last_3d


@pytest.mark.parametrize("num_classes", [1, 2, 3, 300])
def test_the_strongest_class_is_the_first_of_the_largest(num_classes):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 4, (num_classes, 6, 5, 4), generator=generator).float()
    expected = np.argmax(logits.numpy(), 0)  # the first of equal logits
    np.testing.assert_array_equal(strongest_class(logits).numpy(), expected)


@pytest.mark.parametrize("classes", [(1, 2, 3), (3, 1, 2), (7,), (2, 300)], ids=str)
def test_the_last_region_of_a_voxel_is_written(classes):
    generator = torch.Generator().manual_seed(len(classes))
    logits = torch.randn(len(classes), 5, 6, 7, generator=generator)
    written = written_regions(logits, classes)
    for voxel in torch.cartesian_prod(*(torch.arange(n) for n in (5, 6, 7))).tolist():
        expected = 0
        for values, label in zip(logits, classes, strict=True):
            if values[tuple(voxel)].sigmoid() > 0.5:
                expected = label
        assert written[tuple(voxel)] == expected


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST], ids=str)
@pytest.mark.parametrize("stride", [(2, 2, 2), (1, 2, 2), (3, 1, 2)], ids=str)
@pytest.mark.parametrize("size", [(6, 4, 8), (7, 5, 3)], ids=str)
def test_averages_are_pytorchs(size, stride, layout):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, *size, dtype=torch.float64, generator=generator)
    x = x.contiguous(memory_format=layout).requires_grad_()
    y, expected = average_pool(x, stride), F.avg_pool3d(x, stride, stride)
    assert y.is_contiguous(memory_format=layout)
    torch.testing.assert_close(y, expected)
    dy = torch.randn(y.shape, dtype=torch.float64, generator=generator)
    dy = dy.contiguous(memory_format=layout)
    (dx,), (expected_dx,) = (torch.autograd.grad(value, x, dy) for value in (y, expected))
    torch.testing.assert_close(dx, expected_dx)
    divides = all(n % step == 0 for n, step in zip(size, stride, strict=True))
    assert dx.is_contiguous(memory_format=layout) or not divides


def test_the_type_is_kept_under_autocast():
    x = torch.randn(1, 4, 4, 4, 4).bfloat16().contiguous(memory_format=LAST)
    with torch.autocast("cpu", torch.bfloat16):
        assert average_pool(x, (2, 2, 2)).dtype == torch.bfloat16
