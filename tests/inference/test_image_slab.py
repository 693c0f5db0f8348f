import threading
from dataclasses import replace

import pytest
import torch

from tests.inference.blending import TOPOLOGY
from unet3d.errors import VolumeError
from unet3d.inference.image_slab import ImageSlab, Planes
from unet3d.inference.windows import Windows

CPU = torch.device("cpu")


class Asked:
    """An image that records which planes are requested; later planes wait for ``may_end``."""

    def __init__(self, image, wrong=None):
        self.image, self.there = image, Planes.of(image)
        self.asked, self.devices, self.threads = [], [], []
        self.may_end, self.wrong = threading.Event(), wrong
        self.may_end.set()
        self.planes = replace(self.there, make=self.make)

    def make(self, axis, begin, end, device):
        self.asked.append((begin, end))
        self.devices.append(device)
        self.threads.append(threading.current_thread().name)
        if begin:
            assert self.may_end.wait(10)
        if begin == self.wrong:
            raise VolumeError("these are infinite")
        return self.there.make(axis, begin, end, device)


@pytest.mark.parametrize("size", [(60, 20, 10), (21, 47, 11), (16, 9, 40), (7, 7, 3)])
@pytest.mark.parametrize(("overlap", "batch_size"), [(0.0, 1), (0.5, 3), (0.8, 50)])
def test_windows_are_those_of_the_padded_image(size, overlap, batch_size):
    image = Asked(torch.randn(2, *size))
    windows = Windows.of(size, TOPOLOGY, (16, 16, 8), overlap, batch_size, [CPU])
    padded = torch.zeros(2, *windows.size)
    padded[(slice(None), *windows.inside)] = image.image
    slab = ImageSlab(image.planes, windows, torch.float64)
    for batch in windows.batches():
        expected = torch.stack([padded[(slice(None), *windows.place(start))] for start in batch])
        found = slab.cut(batch)
        assert found.dtype == torch.float64 and found.is_contiguous()
        assert torch.equal(found.float(), expected)
    # Each plane is requested once, in order.
    assert [begin for begin, _ in image.asked] == [0, *(end for _, end in image.asked[:-1])]
    assert image.asked[-1][1] == size[windows.axis]


def test_planes_are_asked_for_where_windows_are_cut():
    image = Asked(torch.randn(2, 48, 16, 8))
    windows = Windows.of((48, 16, 8), TOPOLOGY, (16, 16, 8), 0.5, 1, [CPU])
    elsewhere = torch.device("meta")
    assert ImageSlab(image.planes, windows, torch.float32, elsewhere).cut([(0, 0, 0)]).is_meta
    assert set(image.devices) == {elsewhere}


def test_the_next_planes_are_made_while_windows_are_computed():
    voxels = torch.randn(2, 64, 16, 8)
    image = Asked(voxels)
    image.may_end.clear()
    windows = Windows.of((64, 16, 8), TOPOLOGY, (16, 16, 8), 0.5, 1, [CPU])
    slab = ImageSlab(image.planes, windows, torch.float32)
    first, *others = windows.batches()
    assert torch.equal(slab.cut(first)[0], voxels[:, :16])  # others are still being made
    image.may_end.set()
    for batch in others:
        slab.cut(batch)
    assert threading.current_thread().name not in image.threads
    assert image.asked == [(0, 16), *((begin, begin + 8) for begin in range(16, 64, 8))]


@pytest.mark.parametrize("wrong", [16, 24, 56])
def test_an_error_of_planes_comes_with_the_windows_that_need_them(wrong):
    voxels = torch.randn(2, 64, 16, 8)
    image = Asked(voxels, wrong)
    windows = Windows.of((64, 16, 8), TOPOLOGY, (16, 16, 8), 0.5, 1, [CPU])
    slab = ImageSlab(image.planes, windows, torch.float32)
    for start, *_ in windows.starts:
        if start + 16 > wrong:
            with pytest.raises(VolumeError, match="these are infinite"):
                slab.cut([(start, 0, 0)])
            break
        assert torch.equal(slab.cut([(start, 0, 0)])[0], voxels[:, start : start + 16])
    # No planes were requested twice, nor any behind the faulty ones.
    assert image.asked[-1] == (wrong, wrong + 8)
    assert len(image.asked) == len(set(image.asked))
