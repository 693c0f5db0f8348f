import io
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu_waits import refused_waits
from tests.patches.known_cases import probable
from tests.shards import run_shards
from unet3d.kernels.affine.noise import add_noise
from unet3d.patches.augment import recipe
from unet3d.patches.augment.cut import Cut, Extent, Placement, Slab, start_of
from unet3d.patches.augment.draw import AugmentationDraw, DrawnChannel
from unet3d.patches.augment.filters import blur_matrices, coarsening_matrices, filtered, with_margin
from unet3d.patches.augment.intensity import Part, change_contrast, change_gamma
from unet3d.patches.augment.recipe import augment, together
from unet3d.patches.patches import CutBatch
from unet3d.preparation.prepared_image import whole_box

ALWAYS = AugmentationDraw(probable(1, mirror_axes=("x", "y", "z")))
SPACING = (1.0, 1.2, 0.8)


def volume(num_channels, shape, seed=0):
    rng = np.random.default_rng(seed)
    image = torch.from_numpy(rng.normal(size=(num_channels, *shape)).astype(np.float16))
    return image, torch.from_numpy(rng.integers(0, 5, shape).astype(np.uint8))


def cut_of(image, label, size, start, seed, part=None):
    rng = np.random.default_rng(seed)
    placement = Placement.centred(ALWAYS.matrix(rng, size, SPACING), start, size)
    channels = ALWAYS.channels(rng, len(image), SPACING)
    part = part or whole_box(size)
    box = placement.box(made := with_margin(part, channels, size), label.shape)
    return Cut(
        image=image[:, *box].contiguous(),
        label=label[box].contiguous(),
        placement=placement.moved(start_of(box)),
        channels=channels,
        extent=Extent(size, part, made),
        name="case",
    )


def made(cuts, shape, slab=None, gather=None):
    image = torch.full((len(cuts), len(cuts[0].image), *shape), torch.nan)
    target = cuts[0].label.new_full((len(cuts), *shape), 77)
    augment(together(cuts, stacks=False), image, target, slab, gather)
    return image, target


def test_a_sample_depends_on_its_cut_alone_and_lies_in_the_middle_of_zeros():
    image, label = volume(2, (30, 28, 26))
    sizes = [(16, 12, 14), (12, 12, 12), (16, 12, 14)]
    cuts = [cut_of(image, label, size, (5, 6, 7), seed) for seed, size in enumerate(sizes)]
    before = [(cut.image.clone(), cut.label.clone()) for cut in cuts]
    state = torch.get_rng_state()
    images, targets = made(cuts, (19, 12, 14))
    assert torch.isfinite(images).all()
    assert not torch.equal(images[0], images[2])
    for cut, own, some, target in zip(cuts, before, images, targets, strict=True):
        assert torch.equal(cut.image, own[0]) and torch.equal(cut.label, own[1])
        firsts = [
            (n - voxels) // 2 for n, voxels in zip((19, 12, 14), cut.extent.size, strict=True)
        ]
        x, y, z = (slice(a, a + voxels) for a, voxels in zip(firsts, cut.extent.size, strict=True))
        alone = made([cut], cut.extent.size)
        assert torch.equal(alone[0][0], some[:, x, y, z])
        assert torch.equal(alone[1][0], target[x, y, z])
        some[:, x, y, z], target[x, y, z] = 0, 0
        assert not some.any() and not target.any()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("size", [(61, 67, 71), (1, 300, 301), (300, 301, 1)], ids=str)
@pytest.mark.nightly
def test_the_number_of_threads_changes_no_bit(size):
    x, y, z = size
    image, label = volume(2, (x + 3, y + 3, z + 3))
    before = torch.get_num_threads()
    try:
        cut = cut_of(image, label, size, (1, 1, 1), 0)
        torch.set_num_threads(1)
        expected = made([cut], size)
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            images, targets = made([cut], size)
            assert torch.get_num_threads() == threads
            assert torch.equal(images, expected[0]) and torch.equal(targets, expected[1])
    finally:
        torch.set_num_threads(before)


def test_a_batch_comes_out_of_another_process_as_it_was_and_in_one_file():
    """With a file per tensor, receiving a batch of small patches took longer than a step."""
    image, label = volume(8, (30, 28, 26))
    cuts = tuple(cut_of(image, label, (16, 12, 14), (5, 6, 7), seed) for seed in range(4))
    small = cut_of(image, label, (12, 12, 12), (5, 6, 7), 4)
    batch = CutBatch(cuts=(*cuts, small), shape=(16, 12, 14), weight=0.5)
    tensors = []

    class Counting(pickle.Pickler):
        def reducer_override(self, obj):
            if isinstance(obj, Tensor) and obj.device.type != "meta":
                tensors.append(obj)
            return NotImplemented

    file = io.BytesIO()
    Counting(file).dump(batch)
    (memory,) = tensors
    assert memory.is_shared()  # so it is not copied again
    received = pickle.loads(file.getvalue())
    expected = batch.augmented()
    found = received.made(torch.full_like(expected.image, 7.0), torch.full_like(expected.target, 7))
    torch.testing.assert_close(found.image, expected.image, rtol=0, atol=2e-5)
    assert torch.equal(found.target, expected.target)
    assert (found.names, found.weight) == (("case",) * 5, 0.5)


@pytest.mark.parametrize("brightness", [0.8, 1.2])
def test_what_was_drawn_is_done_in_its_order(brightness):
    """The expected steps are functions that are tested on their own, against other packages."""
    size, whole = (16, 12, 14), whole_box((16, 12, 14))
    image, label = volume(1, size)
    drawn = DrawnChannel(
        noise_std=0.1,
        noise_seed=(3, 4),
        blur_sigma=(0.6, 0.7, 0.8),
        brightness=brightness,
        contrast=1.2,
        resolution=(0.5, 0.5, 1.0),
        inverted_gamma=1.3,
        gamma=0.8,
    )
    extent = Extent(size, whole, whole)
    cut = replace(cut_of(image, label, size, (0, 0, 0), 0), image=image, label=label, extent=extent)
    still = Placement.centred(None, (0, 0, 0), size)
    cut = replace(cut, placement=still, channels=(drawn,))
    expected = image.float()
    part = Part(extent)
    add_noise(expected[0], 0.1, (0, 0, 0), size, (3, 4))
    expected = filtered(expected, part, blur_matrices([(0.6, 0.7, 0.8)], size)) * brightness
    expected = change_contrast(expected, part, torch.tensor([[1.2]]))
    coarsening = coarsening_matrices([(0.5, 0.5, 1.0)], size)
    expected = filtered(expected, part, coarsening).contiguous()
    expected = change_gamma(expected, part, torch.tensor([[1.3]]), torch.tensor([[-1.0]]))
    expected = change_gamma(expected, part, torch.tensor([[0.8]]), torch.tensor([[1.0]]))
    images, targets = made([cut], size)
    torch.testing.assert_close(images[0], expected, rtol=0, atol=1e-5)
    assert torch.equal(targets[0], label)


@pytest.mark.parametrize(
    ("size", "shape", "bounds"),
    [
        ((40, 20, 22), (40, 20, 22), [0, 1, 39, 40]),
        ((40, 20, 22), (60, 23, 22), [0, 31, 60]),
        # A slab without voxels of a patch is zero, and still takes part in messages about the
        # patch.
        ((20, 20, 22), (60, 20, 24), [0, 10, 30, 50, 60]),
    ],
    ids=str,
)
def test_slabs_that_gather_statistics_are_those_of_the_whole_patch(size, shape, bounds):
    """Each slab is made from its own cut, as ranks make their parts of a large patch."""
    image, label = volume(2, (60, 28, 26))
    count = len(bounds) - 1

    def work(shard, messages):
        def gather(numbers):
            received = numbers.new_empty(count * len(numbers))
            messages.gather(received, numbers)
            return received.view(count, -1)

        slab = Slab(planes=range(*bounds[shard : shard + 2]), num_planes=shape[0])
        own = cut_of(image, label, size, (8, 4, 2), 0, slab.part(size))
        return *made([own], (len(slab.planes), *shape[1:]), slab, gather), messages.log

    whole = made([cut_of(image, label, size, (8, 4, 2), 0)], shape)
    images, targets, logs = zip(*run_shards(count, work), strict=True)
    difference = (torch.cat(images, dim=2) - whole[0]).abs()
    # A power of a number near 0 amplifies rounding, so the darkest voxels differ more.
    assert difference.max() <= 2e-5 and difference.quantile(0.999) <= 2e-6
    assert torch.equal(torch.cat(targets, dim=1), whole[1])
    # Numbers of both channels: one message before contrast, two for each gamma curve.
    assert list(logs) == [[("gather", 2 * 5)] * (1 + 2 + 2)] * count


def test_more_patches_are_no_more_operations(monkeypatch):
    """On a GPU each is a launch, which takes the host longer than a small patch takes the GPU."""
    monkeypatch.setattr(recipe, "sample_affine", lambda boxes, image_out, label_out: None)
    image, label = volume(2, (30, 28, 26))

    class Counted(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.number += 1
            return func(*args, **(kwargs or {}))

    numbers = []
    for count in (2, 9):
        cuts = tuple(cut_of(image, label, (16, 12, 14), (5, 6, 7), seed) for seed in range(count))
        (given,) = together(cuts, stacks=True)
        with Counted() as counted:
            images = torch.ones(count, 2, 16, 12, 14)
            augment([given], images, torch.zeros(count, 16, 12, 14, dtype=torch.uint8))
        numbers.append(counted.number)
    assert numbers[0] == numbers[1] < 150


@pytest.mark.parametrize("shape", [(9, 1, 7), (1, 1, 1), (3, 2, 5)])
def test_tiny_patches_survive_everything(shape):
    image, label = volume(3, (5, 4, 6))
    for given in (image, torch.zeros_like(image)):
        cuts = [cut_of(given, label, shape, (-2, 0, 1), seed) for seed in range(6)]
        images, targets = made(cuts, shape)
        assert torch.isfinite(images).all() and targets.max() <= 4


@pytest.mark.gpu
def test_the_host_does_not_wait_for_a_gpu():
    """Not even once: reading a value would stop the steps that are queued."""
    image, label = volume(2, (80, 80, 80))
    cuts = [cut_of(image, label, (64, 64, 64), (8, 8, 8), seed) for seed in range(4)]
    batch = CutBatch(cuts=tuple(cuts), shape=(64, 64, 64)).pin_memory()
    images = torch.empty(4, 2, 64, 64, 64, device="cuda:0")
    targets = torch.empty(4, 64, 64, 64, dtype=torch.uint8, device="cuda:0")
    batch.made(images, targets)  # compiles the kernels
    torch.cuda.synchronize()
    with refused_waits():
        batch.made(images, targets)
