import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.inference.blending import TOPOLOGY, blended
from tests.mutations import property_test
from unet3d.config import ModelSettings
from unet3d.errors import VolumeError
from unet3d.inference import sliding_window
from unet3d.inference.image_slab import ImageSlab, Planes
from unet3d.inference.sliding_window import NonFiniteLogitsError, logit_slabs
from unet3d.inference.window_network import WindowNetwork
from unet3d.inference.windows import Windows, longest_axis
from unet3d.memory import host
from unet3d.model import UNet3d, plan_topology
from unet3d.parallel import Layout, parallelize

CPU = torch.device("cpu")
WINDOW = (16, 16, 8)
EMPTY = [9.0, -9.0]


def slab_of(image, windows):
    return ImageSlab(Planes.of(image), windows, image.dtype)


def predict_logits(
    executor, image, window, overlap, batch_size, done=lambda *_: None, empty_logits=None
):
    """Return the logits of the whole volume."""
    network = executor if isinstance(executor, Voxelwise) else WindowNetwork.of(executor)
    topology, axis = executor.module.topology, longest_axis(image.shape[1:])
    windows = Windows.of(image.shape[1:], topology, window, overlap, batch_size, [CPU])
    slab, classes = slab_of(image, windows), topology.num_classes
    slabs = logit_slabs([network], slab, windows, classes, done, empty_logits)
    return torch.cat(list(slabs), 1 + axis)


class Voxelwise:
    """An executor that computes each voxel alone, so that logits do not depend on windows."""

    input_device = output_device = CPU
    devices = (CPU,)

    def __init__(self, function=lambda image: image, num_classes=2):
        topology = replace(TOPOLOGY, in_channels=num_classes, num_classes=num_classes)
        self.module = SimpleNamespace(topology=topology)
        self.function = function
        self.batches = []

    def predict(self, image):
        self.batches.append(tuple(image.shape))
        return self.function(image)


def make_image(size, channels=2):
    generator = torch.Generator().manual_seed(math.prod(size))
    return torch.randn(channels, *size, generator=generator)


def test_volumes_are_padded_evenly_with_zeros_and_windows_to_the_strides():
    """The strides are 4, 4, 2; a window ``whole`` is one forward pass."""
    seen = []
    executor = Voxelwise(lambda x: seen.append(x) or x)
    image = make_image((9, 16, 8)) + 10
    predict_logits(executor, image, WINDOW, 0.5, 1)
    (padded,) = seen
    assert torch.equal(padded[0, :, 3:12], image)
    assert not padded[0, :, :3].any() and not padded[0, :, 12:].any()
    image = make_image((21, 18, 11))
    assert torch.equal(predict_logits(executor, image, "whole", 0.5, 4), image)
    assert executor.batches[1:] == [(1, 2, 24, 20, 12)]
    predict_logits(executor, image, (13, 16, 7), 0.5, 1)
    assert {shape[2:] for shape in executor.batches[2:]} == {WINDOW}


@pytest.mark.parametrize("window", ["whole", (4, 4, 4), (3, 1, 2)], ids=str)
def test_a_tiny_volume_is_padded_until_the_lowest_level_can_be_normalised(window):
    settings = ModelSettings(deep_supervision=False, base_channels=4, num_levels=3)
    model = UNet3d(plan_topology(settings, (16, 16, 16), (1.0, 1.0, 1.0), 1, 3)).eval()
    executor = parallelize(model, Layout(devices=(CPU,)))
    for size in ((1, 1, 1), (4, 4, 4), (3, 2, 4)):
        logits = predict_logits(executor, make_image(size, 1), window, 0.5, 1)
        assert logits.shape == (3, *size)
        assert logits.isfinite().all()


@pytest.mark.parametrize("window", ["whole", WINDOW], ids=str)
def test_logits_are_added_up_in_float32_at_least(window):
    """If the network computes in float64, in float64."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        image = make_image((20, 20, 10)).to(torch.promote_types(dtype, torch.float32))
        executor = Voxelwise(lambda x, dtype=dtype: (1e4 * x).to(dtype))
        logits = predict_logits(executor, image, window, 0.5, 2)
        result = torch.float64 if dtype == torch.float64 else torch.float32
        assert logits.dtype == result
        expected = (1e4 * image).to(dtype).to(result)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("window", ["whole", WINDOW], ids=str)
def test_one_logit_that_is_no_number_is_refused(window, value):
    """No comparison with NaN is true, so the background would win everywhere."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        # With several windows, it is in the second one.
        values = iter([value] if window == "whole" else [0.0, value, *[0.0] * 6])

        def answer(image, values=values, dtype=dtype):
            logits = image.to(dtype, copy=True)
            logits[0, -1, 3, 3, 3] = next(values)
            return logits

        image = make_image((20, 20, 10))
        if math.isfinite(value):  # a finite number is accepted, however large
            assert predict_logits(Voxelwise(answer), image, window, 0.5, 1).max() > 1e28
            continue
        with pytest.raises(NonFiniteLogitsError, match="output is NaN or infinite"):
            predict_logits(Voxelwise(answer), image, window, 0.5, 1)


@pytest.mark.parametrize("window", ["whole", WINDOW], ids=str)
def test_what_a_network_returns_stays_its_own(window):
    image = make_image((16, 16, 8) if window == "whole" else (24, 16, 8))
    kept = torch.ones(1, 2, 16, 16, 8)  # one memory for all answers, as with graphs
    networks = [Voxelwise(lambda x: kept), Voxelwise(lambda x: torch.full_like(x, 3))]
    topology = networks[0].module.topology
    windows = Windows.of(image.shape[1:], topology, window, 0.5, 1, [CPU])
    slabs = list(logit_slabs(networks, slab_of(image, windows), windows, 2))
    torch.testing.assert_close(torch.cat(slabs, 1), torch.full_like(image, 2))
    assert (kept == 1).all()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_slab_is_finished_before_the_windows_after_it_are_computed(batch_size):
    executor = Voxelwise()
    image = make_image((160, 20, 8))
    topology = executor.module.topology
    windows = Windows.of(image.shape[1:], topology, WINDOW, 0.5, batch_size, [CPU])
    end = 0
    for slab in logit_slabs([executor], slab_of(image, windows), windows, 2):
        assert slab.shape[1] <= windows.slab[0] < 40
        end += slab.shape[1]
        computed = sum(shape[0] for shape in executor.batches)
        if computed < len(windows.starts):  # the next window begins behind this slab
            assert windows.starts[computed][0] == end
    assert end == 160 and computed == len(windows.starts)


def test_the_memory_of_a_slab_does_not_depend_on_the_length(monkeypatch):
    # Two classes in float32, for as many planes as a window has.
    needed = 16 * 20 * 8 * 2 * 4
    monkeypatch.setattr(host, "SMALL_BYTES", 0)
    monkeypatch.setattr(host, "available_bytes", lambda: needed)
    for length in (48, 480):
        predict_logits(Voxelwise(), make_image((length, 20, 8)), WINDOW, 0.5, 1)
    monkeypatch.setattr(host, "available_bytes", lambda: needed - 1)
    with pytest.raises(VolumeError, match="logits of 16x20x8 voxels and 2 classes"):
        predict_logits(Voxelwise(), make_image((48, 20, 8)), WINDOW, 0.5, 1)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_where_all_windows_are_empty_nothing_is_computed(batch_size):
    executor, calls = Voxelwise(), []
    image = torch.full((2, 48, 32, 8), -3.0)  # windows need no padding
    found = predict_logits(
        executor, image, WINDOW, 0.5, batch_size, lambda *done: calls.append(done), EMPTY
    )
    assert executor.batches == [] and found.dtype == torch.float32
    assert (found[0] == 9).all() and (found[1] == -9).all() and found.shape == (2, 48, 32, 8)
    windows = Windows.of((48, 32, 8), executor.module.topology, WINDOW, 0.5, 1, [CPU])
    count = len(windows.starts)
    assert calls[0] == (0, count) and calls[-1] == (count, count)


# Any shape


@property_test
@given(
    size=st.tuples(*[st.integers(1, 40)] * 3),
    window=st.tuples(*[st.integers(1, 20)] * 3),
    overlap=st.floats(0, 0.85),
    num_classes=st.integers(1, 4),
    batch_size=st.integers(1, 9),
    piece=st.sampled_from([1, 300, 2**24]),
    has_air=st.booleans(),
)
def test_slabs_of_any_shape_are_the_volume_blended_at_once(
    size, window, overlap, num_classes, batch_size, piece, has_air
):
    """The network's answer depends on the place in the window, so weights matter.

    Empty windows are skipped, and voxels in no other window are background.
    """
    computed = []

    def at_its_place(x):
        computed.append(x)
        n, k, *shape = x.shape
        ramp = torch.linspace(-1, 1, math.prod(shape)).reshape(shape)
        return x * ramp + ramp

    executor = Voxelwise(at_its_place, num_classes)
    image = make_image(size, num_classes)
    if has_air:  # all but one voxel in the last corner, in one channel
        image[:, size[0] // 3 :] = -1.5
        image[-1, -1, -1, -1] = 2.0
    empty = [9.0 - n for n in range(num_classes)] if has_air else None
    windows = Windows.of(size, executor.module.topology, window, overlap, batch_size, [CPU])
    assume(len(windows.starts) < 400)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sliding_window.PIECE_NUMBERS, "cpu", piece)
        found = predict_logits(executor, image, window, overlap, batch_size, empty_logits=empty)
    computed.clear()
    expected = blended(at_its_place, image, windows, empty)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    assert {shape[2:] for shape in executor.batches} <= {windows.shape}
    # At the end of a row of windows a batch may be smaller.
    assert all(shape[0] <= batch_size for shape in executor.batches)
    assert sum(shape[0] for shape in executor.batches) == len(computed)
    assert has_air or len(computed) == len(windows.starts)
