import numpy as np
import pytest
import torch

from unet3d.kernels import strongest_class, written_regions


@pytest.mark.parametrize("num_classes", [1, 2, 3, 300])
def test_the_strongest_class_is_the_first_of_the_largest(num_classes):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 4, (num_classes, 6, 5, 4), generator=generator).float()
    expected = np.argmax(logits.numpy(), 0)  # the first of equal ones
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
