import numpy as np
import pytest
import torch

from unet3d.kernels import strongest_class


@pytest.mark.parametrize("num_classes", [1, 2, 3, 300])
def test_the_strongest_class_is_the_first_of_the_largest(num_classes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 4, (num_classes, 6, 5, 4), generator=generator).float()
    expected = np.argmax(logits.numpy(), 0)  # the first of equal ones
    np.testing.assert_array_equal(strongest_class(logits).numpy(), expected)
