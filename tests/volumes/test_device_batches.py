"""Batches that are made on a GPU, beside what it works on."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch

from tests.volumes.known_cases import PLAIN, make_cases, probable
from unet3d.config import PatchSettings
from unet3d.volumes.cache import Cache
from unet3d.volumes.loader import PatchLoader

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


def loader(cases, *, on_gpu, num_workers=0, size=(24, 20, 28), settings=None, **shard):
    return PatchLoader(
        cases=cases,
        settings=settings or PatchSettings(),
        size=size,
        stride=(4, 4, 4),
        batch_size=2,
        num_steps=8,
        seed=1,
        num_workers=num_workers,
        device=GPU,
        augments_on_device=on_gpu,
        **shard,
    )


def clones(batches):
    return [(batch.image.clone(), batch.target.clone()) for batch in batches]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_those_of_the_cpu(tmp_path, num_workers):
    cases = real_cases(tmp_path)
    on_gpu, on_cpu = (
        loader(cases, on_gpu=is_gpu, num_workers=num_workers) for is_gpu in (True, False)
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
    """The host is many batches ahead; the buffers are not overwritten before they are read."""
    cases = real_cases(tmp_path)
    calm = [batch.image.clone() for batch in loader(cases, on_gpu=True).epoch(0)]
    torch.cuda.synchronize()
    busy = torch.randn(4096, 4096, device=GPU)
    read = []
    for batch in loader(cases, on_gpu=True).epoch(0):
        for _ in range(20):  # a step that takes far longer than making the next batches
            busy = torch.tanh(busy @ busy)
        read.append(batch.image + 0)
    torch.cuda.synchronize()
    assert len(read) == len(calm)
    assert all(torch.equal(a, b) for a, b in zip(read, calm, strict=True))


def test_whole_volumes_of_many_shapes_share_the_buffers(tmp_path):
    cases = make_cases(tmp_path, [(7, 8, 5), (12, 4, 6), (9, 9, 9), (16, 16, 12)])
    settings = PatchSettings(augmentation=PLAIN)
    made = loader(cases, on_gpu=True, size=None, settings=settings)
    expected = loader(cases, on_gpu=False, size=None, settings=settings)
    for epoch in range(3):
        for left, right in zip(made.epoch(epoch), expected.epoch(epoch), strict=True):
            assert torch.equal(left.image.cpu(), right.image)
            assert torch.equal(left.target.cpu(), right.target)


def test_only_two_batches_and_one_cut_take_memory(tmp_path):
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
    largest_cut = 96**3 * (2 * 2 + 1)
    user = 2 * voxels * 2 * 4
    workspace = 32 * 2**20  # of cuBLAS, for the stream
    peak = torch.cuda.max_memory_allocated() - before
    assert two_batches < peak < (two_batches + max(largest_cut, user) + workspace + 2**22) * 1.05


def slab_of(shard, count, shape):
    return range(shard * shape[0] // count, (shard + 1) * shape[0] // count)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("size", [(24, 20, 28), None])
def test_slabs_without_messages_are_those_of_the_cpu(tmp_path, size, num_workers):
    cases = real_cases(tmp_path)
    whole = loader(cases, on_gpu=False, size=size).epoch(0)
    shards = [
        loader(cases, on_gpu=True, size=size, num_workers=num_workers, slab=slab).epoch(0)
        for slab in (partial(slab_of, shard, 3) for shard in range(3))
    ]
    for expected, *parts in zip(whole, *shards, strict=True):
        assert {part.planes for part in parts} == {expected.image.shape[2]}
        image = torch.cat([part.image.cpu() for part in parts], dim=2)
        torch.testing.assert_close(image, expected.image, rtol=0, atol=5e-5)
        target = torch.cat([part.target.cpu() for part in parts], dim=1)
        assert (target != expected.target).float().mean() < 1e-4


def test_slabs_gather_their_statistics_between_steps(tmp_path):
    """Two shards on one GPU, in threads that hand each other what they gather."""
    cases = real_cases(tmp_path)
    settings = PatchSettings(augmentation=probable(1))
    whole = clones(loader(cases, on_gpu=True, settings=settings).epoch(0))
    barrier = threading.Barrier(2)
    handed, streams = {}, set()

    def work(shard):
        def gather(numbers):
            streams.add(torch.cuda.current_stream(GPU))
            handed[shard] = numbers
            barrier.wait(timeout=60)
            both = torch.stack([handed[0], handed[1]])
            barrier.wait(timeout=60)
            return both

        slab = partial(slab_of, shard, 2)
        batches = loader(cases, on_gpu=True, settings=settings, slab=slab, gather=gather)
        return clones(batches.epoch(0))

    torch.cuda.synchronize()
    with ThreadPoolExecutor(2) as threads:
        shards = list(threads.map(work, range(2)))
    torch.cuda.synchronize()
    assert streams == {torch.cuda.default_stream(GPU)}
    for (image, target), first, second in zip(whole, *shards, strict=True):
        assert first[0].shape[2] == second[0].shape[2] == 12
        torch.testing.assert_close(torch.cat((first[0], second[0]), 2), image, rtol=0, atol=5e-5)
        differs = torch.cat((first[1], second[1]), 1) != target
        assert differs.float().mean() < 1e-4
