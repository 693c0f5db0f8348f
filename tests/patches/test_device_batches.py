"""Batches that are made on a GPU while it computes steps."""

import numpy as np
import pytest
import torch

from tests.patches.known_cases import make_cases, patch_settings, probable
from unet3d.config import PatchSettings
from unet3d.patches.loader import PatchLoader
from unet3d.patches.patches import PatchSampler
from unet3d.preparation.cache import Cache

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)


def real_cases(folder, shape=(40, 44, 36)):
    store = Cache(folder)
    rng = np.random.default_rng(0)
    cases = []
    for number in range(3):
        image = rng.normal(size=(2, *shape)).astype(np.float32)
        label = (image[0] > 0.5).astype(np.uint8)
        store.save_case(f"real{number}", image, label, (1.0, 1.0, 1.0), 2)
        cases.append(store.load_case(f"real{number}", f"case_{number}"))
    return cases


def loader(cases, *, on_gpu, num_workers=0, size=(24, 20, 28), settings=None):
    sampler = PatchSampler(
        cases=cases,
        settings=settings or PatchSettings(),
        size=size,
        stride=(4, 4, 4),
        batch_size=2,
        seed=1,
    )
    return PatchLoader(
        sampler,
        num_steps=8,
        num_workers=num_workers,
        device=GPU,
        augments_on_device=on_gpu,
    )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_those_of_the_cpu(tmp_path, num_workers):
    cases = real_cases(tmp_path)
    half = patch_settings(probable(0.5))  # each change alone, and with others
    on_gpu, on_cpu = (
        loader(cases, on_gpu=is_gpu, num_workers=num_workers, settings=half)
        for is_gpu in (True, False)
    )
    for where in ((0,), (1,), (3, 2)):  # an epoch, and the step at which it is resumed
        for made, expected in zip(on_gpu.epoch(*where), on_cpu.epoch(*where), strict=True):
            assert made.image.device == made.target.device == GPU
            assert made.names == expected.names
            span = float(expected.image.max() - expected.image.min())
            difference = (made.image.cpu() - expected.image).abs().max()
            assert difference <= 1e-5 * max(span, 1.0)
            assert (made.target.cpu() != expected.target).float().mean() < 1e-4


def test_a_batch_stays_as_it_is_while_the_gpu_is_busy_with_it(tmp_path):
    """The host is many batches ahead; buffers are not overwritten before they are read."""
    cases = real_cases(tmp_path)
    calm = [batch.image.clone() for batch in loader(cases, on_gpu=True).epoch(0)]
    torch.cuda.synchronize()
    busy = torch.randn(4096, 4096, device=GPU)
    read = []
    for batch in loader(cases, on_gpu=True).epoch(0):
        for _ in range(20):  # longer than making the next batches takes
            busy = torch.tanh(busy @ busy)
        read.append(batch.image + 0)
    torch.cuda.synchronize()
    assert len(read) == len(calm)
    assert all(torch.equal(a, b) for a, b in zip(read, calm, strict=True))


def test_whole_volumes_of_many_shapes_share_the_buffers(tmp_path):
    cases = make_cases(tmp_path, [(7, 8, 5), (12, 4, 6), (9, 9, 9), (16, 16, 12)])
    settings = patch_settings()
    made = loader(cases, on_gpu=True, size=None, settings=settings)
    expected = loader(cases, on_gpu=False, size=None, settings=settings)
    for epoch in range(3):
        for left, right in zip(made.epoch(epoch), expected.epoch(epoch), strict=True):
            assert torch.equal(left.image.cpu(), right.image)
            assert torch.equal(left.target.cpu(), right.target)


def test_only_two_batches_and_the_cuts_of_one_take_memory(tmp_path):
    cases = real_cases(tmp_path, (96, 96, 96))
    batches = loader(cases, on_gpu=True, size=(64, 64, 64))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for epoch in range(4):
        for batch in batches.epoch(epoch):
            batch.image.add(1)
    torch.cuda.synchronize()
    voxels = 64**3
    two_batches = 2 * 2 * voxels * (2 * 4 + 1)
    largest_cuts = 2 * 96**3 * (2 * 2 + 1)
    filters = 4 * 3 * 4 * voxels
    user = 2 * voxels * 2 * 4
    workspace = 32 * 2**20  # cuBLAS's workspace for the stream
    peak = torch.cuda.max_memory_allocated() - before
    most = two_batches + max(largest_cuts, filters, user) + workspace + 2**22
    assert two_batches < peak < most * 1.05
