"""Sampling on a GPU against a CPU, which other tests compare with SciPy."""

import math

import numpy as np
import pytest
import torch

from tests.gpu_waits import refused_waits
from tests.kernels.affine.boxes import (
    MATRICES,
    SHIFT,
    SIZES,
    TURNED,
    boxes_of,
    case,
    centred,
    sampled,
)
from tests.products import each_value
from unet3d.kernels import sample_affine
from unet3d.kernels.affine import plain


@pytest.mark.gpu
@each_value(
    matrix=list(MATRICES),
    sizes=[*SIZES, ((150, 70, 90), (131, 65, 77))],
    types=[
        (torch.float16, torch.uint8),
        (torch.float32, torch.int64),
        (torch.float64, torch.uint8),
    ],
)
def test_a_gpu_samples_the_same(matrix, sizes, types):

    (box, size), (dtype, label_dtype), turn = sizes, types, MATRICES[matrix]
    classes = 4 if label_dtype == torch.uint8 else 700
    image, label = case(box, 2, classes, dtype, label_dtype)
    offset = centred(turn, box, size) + SHIFT
    expected = sampled(image, label, turn, offset, size)
    for function in (sample_affine, plain.sample):
        found = sampled(image.cuda(), label.cuda(), turn, offset, size, function)
        torch.testing.assert_close(found[0].cpu(), expected[0], rtol=0, atol=1e-5)
        # If two shares differ by rounding only, either class may win.
        assert (found[1].cpu() == expected[1]).double().mean() > 0.9995


@pytest.mark.gpu
def test_a_gpu_compiles_once_and_does_not_wait():
    from unet3d.kernels.affine import kernel

    kernel._sample.device_caches.clear()  # a private name: only Triton's cache shows recompilation
    generator = np.random.default_rng(0)
    torch.cuda.synchronize()
    for channels, box, size in [(1, (1, 16, 32), (16, 16, 16)), (3, (20, 17, 31), (9, 1, 7))]:
        image, label = case(box, channels)
        image, label = image.cuda(), label.cuda()
        images = torch.zeros(2, channels, *size, device="cuda")
        labels = torch.zeros(2, *size, dtype=torch.uint8, device="cuda")
        for matrix in (np.eye(3), TURNED, np.diag(generator.uniform(-1, 1, 3))):
            for number in (1, 2):
                offset = generator.integers(0, 3, 3).astype(float)
                intensity = (0.1 * (number - 1), 1, number, number)
                given = (image, label, matrix, offset, [intensity] * channels)
                boxes = boxes_of([given] * number)
                with refused_waits():
                    sample_affine(boxes, image_out=images[:number], label_out=labels[:number])
    (compiled, *_) = kernel._sample.device_caches[torch.cuda.current_device()]
    assert len(compiled) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("start", [(0, 0, 0), (7, 1, 3)])
def test_a_gpu_samples_many_boxes_at_once_and_adds_the_same_noise(start):
    size, given = (20, 17, 22), []
    boxes = [(13, 11, 17), (20, 30, 25), (5, 9, 8)]
    for number, (box, turn) in enumerate(zip(boxes, MATRICES.values(), strict=False)):
        image, label = case(box, 2, dtype=torch.float16)
        loud = (0.1 * number, 2**32 - 1 - number, 77 + number, 1 + 0.1 * number)
        offset = centred(turn, box, size) + SHIFT
        given.append((image, label, turn, offset, [loud, (0.05, 5, 2**31 + number, 1)]))
    found = []
    for device in ("cpu", "cuda"):
        moved = [(image.to(device), label.to(device), *how) for image, label, *how in given]
        image_out = torch.full((3, 2, *size), math.nan, device=device)
        label_out = torch.full((3, *size), 77, dtype=torch.uint8, device=device)
        sample_affine(boxes_of(moved, start), image_out=image_out, label_out=label_out)
        found.append((image_out.cpu(), label_out.cpu()))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-5)
    assert (found[0][1] == found[1][1]).double().mean() > 0.9995


@pytest.mark.gpu
def test_a_gpu_samples_beyond_what_an_int32_counts():
    box, size = (1300, 1290, 1290), (5, 6, 7)
    label = torch.zeros(box, dtype=torch.uint8, device="cuda")
    image = torch.zeros(1, *box, dtype=torch.float16, device="cuda")
    assert label.numel() > 2**31
    ends = (slice(-9, None),) * 3
    small, labels = case((9, 9, 9))
    image[0][ends], label[ends] = small[0].half().cuda(), labels.cuda()
    offset = centred(TURNED, (9, 9, 9), size)
    expected = sampled(small.half(), labels, TURNED, offset, size)
    found = sampled(image, label, TURNED, offset + np.array(box) - 9, size)
    torch.testing.assert_close(found[0].cpu(), expected[0], rtol=0, atol=1e-5)
    assert torch.equal(found[1].cpu(), expected[1])
