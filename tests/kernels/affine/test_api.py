"""Sampling of image and labels, against SciPy in float64 and interpolation of each class."""

import numpy as np
import pytest
import torch
from scipy import ndimage
from scipy.spatial.transform import Rotation
from torch.nn import functional

from tests.kernels.affine.boxes import MATRICES, SHIFT, SIZES, TURNED, call, case, centred, sampled
from tests.products import each_value
from unet3d.kernels import sample_affine
from unet3d.kernels.affine import plain

FLIPS = [(1, 1, 1), (-1, 1, 1), (1, -1, -1), (-1, -1, -1)]


def linear(volume, matrix, offset, size):
    """Return SciPy's linear interpolation, with zeros around the volume."""
    return ndimage.affine_transform(volume, matrix, offset, size, order=1, mode="grid-constant")


def shares(label, matrix, offset, size):
    """Return the classes, 0 first, and the share of each class in every voxel."""
    classes = np.union1d([0], label.numpy())
    found = [linear((label.numpy() == k).astype(float), matrix, offset, size) for k in classes]
    found[0] += 1 - np.sum(found, 0)  # the outside counts as 0
    return classes, np.stack(found)


def check(image, label, matrix, offset, size):
    image_out, label_out = sampled(image, label, matrix, offset, size)
    atol = 1e-6 * (1 + float(image.abs().max()))
    for channel, out in zip(image.double().numpy(), image_out.numpy(), strict=True):
        np.testing.assert_allclose(out, linear(channel, matrix, offset, size), rtol=0, atol=atol)
    classes, parts = shares(label, matrix, offset, size)
    strongest = np.sort(np.concatenate([np.zeros((1, *size)), parts]), 0)
    is_clear = strongest[-1] - strongest[-2] > 1e-5
    assert is_clear.mean() > 0.95
    np.testing.assert_array_equal(label_out.numpy()[is_clear], classes[parts.argmax(0)][is_clear])


@each_value(matrix=list(MATRICES), sizes=SIZES)
def test_image_and_labels_are_interpolated(matrix, sizes):
    box, size = sizes
    image, label = case(box, channels=2)
    turn = MATRICES[matrix]
    check(image, label, turn, centred(turn, box, size) + SHIFT, size)


@pytest.mark.parametrize("label_dtype", [torch.uint8, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_every_type_is_sampled(dtype, label_dtype):
    box, size = (20, 23, 21), (17, 16, 19)
    image, label = case(box, 3, 9, dtype, label_dtype)
    check(image, label, TURNED, centred(TURNED, box, size), size)


def test_any_number_of_classes_votes():
    box, size = (24, 22, 21), (20, 21, 22)
    image, label = case(box, 1, 700, label_dtype=torch.int64)
    label += 2**40 * (label > 0)  # beyond the digits of a float or an int32
    assert len(label.unique()) > 400
    check(image, label, TURNED, centred(TURNED, box, size) + SHIFT, size)


def test_positions_of_a_large_volume_are_exact():
    box, size = (170, 33, 150), (150, 5, 131)
    matrix = Rotation.from_euler("y", 17, degrees=True).as_matrix()
    check(*case(box), matrix, centred(matrix, box, size), size)


def test_float64_is_interpolated_as_such():
    box, size = (19, 20, 21), (16, 17, 18)
    image, label = case(box, dtype=torch.float64)
    matrix = np.diag([0.75, 1.25, 0.5])  # positions without rounding
    offset = np.array([1.125, -0.25, 3.5])
    image_out, _ = sampled(image, label, matrix, offset, size)
    expected = linear(image[0].numpy(), matrix, offset, size)
    np.testing.assert_allclose(image_out[0].numpy(), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("matrix", [TURNED, np.eye(3)], ids=["turned", "copied"])
def test_all_around_the_box_is_zero(matrix):
    image, label = case((4, 3, 5))
    found = sampled(image[:, :0], label[:0], matrix, np.zeros(3), (5, 4, 3))
    assert not found[0].any() and not found[1].any()
    for offset in ([1e3, 0.0, 0.0], [0.0, -400.0, 0.0], [7.0, 7.0, 1e12]):
        image_out, label_out = sampled(image + 9, label + 1, matrix, np.array(offset), (9, 8, 7))
        assert not image_out.any() and not label_out.any()


def test_a_step_of_thousands_of_voxels_takes_no_memory_for_them():
    image, label = case((40, 41, 42))
    matrix = np.array([[5e4, -3e3, 20.0], [2e4, 7e3, -5e4], [3e4, -20.0, 1e3]])
    offset, size = np.array([20.3, 19.6, 21.5]), (6, 7, 5)
    image_out, _ = sampled(image, label, matrix, offset, size)
    expected = linear(image[0].double().numpy(), matrix, offset, size)
    assert np.count_nonzero(expected) == 1
    np.testing.assert_allclose(image_out[0].numpy(), expected, rtol=0, atol=1e-3)


def mirrored(box, signs, offset, size):
    """Return the voxels ``sign * o + offset`` of a box, with zeros around it."""
    out = functional.pad(box, [50] * 6)
    for axis, (sign, first, count) in enumerate(zip(signs, offset, size, strict=True)):
        out = out.index_select(axis + 1, sign * torch.arange(count) + first + 50)
    return out


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@each_value(
    first=[(0, 0, 0), (2, -1, 3), (-3, 4, -2), (0, 45, 0)],
    signs=FLIPS,
    dtype=[torch.float16, torch.float64],
)
def test_flips_copy_to_the_bit(first, signs, dtype, device):
    box, size = (37, 40, 41), (33, 45, 39)
    image, label = case(box, 2, dtype=dtype)
    offset = tuple(i if s > 0 else i + n - 1 for i, s, n in zip(first, signs, size, strict=True))
    given = (np.diag(signs).astype(float), np.array(offset, float), size)
    for function in (sample_affine, plain.sample):
        image_out, label_out = sampled(image.to(device), label.to(device), *given, function)
        assert torch.equal(image_out.cpu().to(dtype), mirrored(image, signs, offset, size))
        assert torch.equal(label_out.cpu(), mirrored(label[None], signs, offset, size)[0])


def test_of_equal_shares_the_smallest_class_wins():
    image, _ = case((2, 3, 2))
    label = torch.tensor([5, 2, 9, 2, 5, 9, 9, 5, 2, 5, 2, 9], dtype=torch.uint8).view(2, 3, 2)
    corners = label[:2, :2, :2].flatten().tolist()
    _, label_out = sampled(image, label, TURNED, np.full(3, 0.5), (1, 1, 1))
    tied = [k for k in corners if corners.count(k) == max(map(corners.count, corners))]
    assert len(set(tied)) > 1 and label_out.item() == min(tied)


def test_outputs_may_be_samples_of_a_batch():
    box, size = (70, 20, 22), (66, 17, 19)
    image, label = case(box, 2)
    offset = centred(TURNED, box, size)
    expected = sampled(image, label, TURNED, offset, size)
    images, labels = torch.full((3, 2, *size), 7.0), torch.full((3, *size), 7, dtype=torch.uint8)
    call(sample_affine, image, label, TURNED, offset, images[1], labels[1])
    assert torch.equal(images[1], expected[0]) and torch.equal(labels[1], expected[1])
    for other in (0, 2):
        assert (images[other] == 7).all() and (labels[other] == 7).all()


@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES.keys())
def test_a_part_is_as_in_the_whole(matrix):
    """Bit-identical for any blocks; otherwise labels with almost equal shares would differ."""
    box, size = (150, 40, 45), (131, 33, 38)
    image, label = case(box, 2, num_classes=9)
    offset = centred(matrix, box, size) + SHIFT
    whole = sampled(image, label, matrix, offset, size)
    for start, stop in [((0, 0, 0), (30, 33, 38)), ((30, 3, 0), (131, 30, 38)), ((7, 7, 7),) * 2]:
        shape = tuple(last - first for first, last in zip(start, stop, strict=True))
        outputs = torch.full((2, *shape), 7.0), torch.full(shape, 7, dtype=torch.uint8)
        call(sample_affine, image, label, matrix, offset, *outputs, start=start)
        x, y, z = (slice(first, last) for first, last in zip(start, stop, strict=True))
        assert torch.equal(outputs[0], whole[0][:, x, y, z])
        assert torch.equal(outputs[1], whole[1][x, y, z])
