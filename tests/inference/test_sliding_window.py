import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from monai.inferers import sliding_window_inference
from torch import Tensor

from tests.mutations import property_test
from unet3d.config import ModelSettings, Shape
from unet3d.errors import DoesNotFitError, VolumeError
from unet3d.inference import sliding_window
from unet3d.inference.image_slab import ImageSlab, WholeImage
from unet3d.inference.sliding_window import NonFiniteLogitsError, WindowsDone, logit_slabs
from unet3d.inference.windows import Windows, gaussian_weight, longest_axis
from unet3d.memory import host
from unet3d.model import Topology, UNet3d, plan_topology
from unet3d.parallel import Layout, parallelize

CPU = torch.device("cpu")
STRIDES = ((1, 1, 1), (2, 2, 1), (2, 2, 2))  # in all 4, 4, 2


def slab_of(image: Tensor, windows: Windows) -> ImageSlab:
    return ImageSlab(WholeImage(image), windows, image.dtype)


def all_slabs(
    executor: Any,
    image: Tensor,
    window: Any,
    overlap: float,
    batch_size: Any,
    windows_done: WindowsDone = lambda done, total: None,
) -> list[Tensor]:
    """Return the slabs of a volume."""
    topology = executor.module.topology
    devices = [slot.device for slot in executor.slots]
    windows = Windows.of(image.shape[1:], topology, window, overlap, batch_size, devices)
    slab = slab_of(image, windows)
    return list(logit_slabs([executor], slab, windows, topology.num_classes, windows_done))


def predict_logits(executor: Any, image: Tensor, *request: Any, **more: Any) -> Tensor:
    """Return the logits of the whole volume."""
    slabs = all_slabs(executor, image, *request, **more)
    return torch.cat(slabs, 1 + longest_axis(image.shape[1:]))


class Voxelwise:
    """An executor whose network looks at each voxel alone: windows cannot matter to it."""

    input_device = output_device = CPU
    slots = (SimpleNamespace(device=CPU),)

    def __init__(
        self, function: Callable[[Tensor], Tensor] = lambda image: image, num_classes: int = 2
    ) -> None:
        topology = Topology(
            in_channels=num_classes, num_classes=num_classes, channels=(4, 4, 4), strides=STRIDES
        )
        self.module = SimpleNamespace(topology=topology)
        self.function = function
        self.batches: list[tuple[int, ...]] = []

    def predict(self, image: Tensor) -> Tensor:
        self.batches.append(tuple(image.shape))
        return self.function(image)


def make_image(size: Shape, channels: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(math.prod(size))
    return torch.randn(channels, *size, generator=generator)


def small_network(**options: object) -> tuple[UNet3d, object]:
    torch.manual_seed(0)
    settings = ModelSettings(
        **{"deep_supervision": False, "base_channels": 4, "num_levels": 3, **options}
    )
    model = UNet3d(plan_topology(settings, (16, 16, 16), (1.0, 1.0, 1.0), 1, 3)).eval()
    return model, parallelize(model, Layout(devices=(CPU,)))


@pytest.mark.parametrize("size", [(20, 20, 10), (21, 17, 11), (16, 33, 8), (37, 16, 9)])
@pytest.mark.parametrize(
    ("overlap", "batch_size"), [(0.0, 1), (0.0, 3), (0.25, 100), (0.5, 1), (0.5, 3), (0.9, 100)]
)
def test_a_voxelwise_network_gives_the_same_with_windows(
    size: Shape, overlap: float, batch_size: int
) -> None:
    """No voxel is left out, tails included, and none of the last batch is left at zero."""
    image = make_image(size)
    executor = Voxelwise(lambda x: 2 * x - 1)
    logits = predict_logits(executor, image, (16, 16, 8), overlap, batch_size)
    torch.testing.assert_close(logits, 2 * image - 1, rtol=1e-5, atol=1e-5)
    assert {shape[2:] for shape in executor.batches} == {(16, 16, 8)}
    # At the end of a row of windows there may be fewer at a time.
    assert max(shape[0] for shape in executor.batches) <= batch_size
    count = Windows.count(size, executor.module.topology, (16, 16, 8), overlap)
    assert sum(shape[0] for shape in executor.batches) == count


def test_the_last_batch_is_a_partial_one_and_counts() -> None:
    executor = Voxelwise()
    image = make_image((40, 16, 8)).abs() + 1
    logits = predict_logits(executor, image, (16, 16, 8), 0.5, 3)
    assert [shape[0] for shape in executor.batches] == [3, 1]
    assert logits.min() >= 1 - 1e-5
    torch.testing.assert_close(logits[:, -8:], image[:, -8:])  # seen by the last window alone


@pytest.mark.parametrize("size", [(9, 20, 5), (3, 2, 1), (17, 40, 40), (1, 1, 1)])
def test_volumes_smaller_than_the_window(size: Shape) -> None:
    image = make_image(size)
    executor = Voxelwise()
    logits = predict_logits(executor, image, (16, 32, 32), 0.5, 2)
    torch.testing.assert_close(logits, image, rtol=1e-5, atol=1e-5)


def test_padding_is_zero_and_even_on_both_sides() -> None:
    seen = []
    executor = Voxelwise(lambda x: seen.append(x) or x)
    image = make_image((9, 16, 8)) + 10
    predict_logits(executor, image, (16, 16, 8), 0.5, 1)
    (padded,) = seen
    assert torch.equal(padded[0, :, 3:12], image)
    assert not padded[0, :, :3].any() and not padded[0, :, 12:].any()


def test_whole_is_one_pass_over_all() -> None:
    image = make_image((21, 18, 11))
    executor = Voxelwise()
    logits = predict_logits(executor, image, "whole", 0.5, 4)
    assert executor.batches == [(1, 2, 24, 20, 12)]  # up to multiples of 4, 4, 2
    assert torch.equal(logits, image)


def test_a_window_is_rounded_up_to_the_strides() -> None:
    executor = Voxelwise()
    predict_logits(executor, make_image((30, 30, 30)), (13, 16, 7), 0.5, 1)
    assert {shape[2:] for shape in executor.batches} == {(16, 16, 8)}


@pytest.mark.parametrize("window", ["whole", (4, 4, 4), (3, 1, 2)], ids=str)
@pytest.mark.parametrize("size", [(1, 1, 1), (4, 4, 4), (3, 2, 4)])
def test_a_tiny_volume_is_padded_until_the_lowest_level_can_be_normalised(
    window: object, size: Shape
) -> None:
    _, executor = small_network()
    logits = predict_logits(executor, make_image(size, 1), window, 0.5, 1)
    assert logits.shape == (3, *size)
    assert logits.isfinite().all()


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("size", [(24, 32, 16), (20, 16, 24)])
def test_windows_of_a_network_agree_with_monai(size: Shape, batch_size: int) -> None:
    model, executor = small_network()
    image = make_image(size, 1)
    ours = predict_logits(executor, image, (16, 16, 16), 0.5, batch_size)
    with torch.no_grad():
        theirs = sliding_window_inference(
            image[None],
            (16, 16, 16),
            1,
            model,
            overlap=0.5,
            roi_weight_map=gaussian_weight((16, 16, 16)),
        )
    torch.testing.assert_close(ours, theirs[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_size", [2, 3, 7, 50])
def test_the_batch_size_does_not_matter(batch_size: int) -> None:
    _, executor = small_network()
    image = make_image((30, 21, 18), 1)
    one_by_one = predict_logits(executor, image, (16, 16, 16), 0.5, 1)
    together = predict_logits(executor, image, (16, 16, 16), 0.5, batch_size)
    torch.testing.assert_close(together, one_by_one, rtol=1e-4, atol=1e-5)


def test_blending_by_hand_on_one_axis() -> None:
    """Two windows that answer 0 and 1 are mixed by their weights."""
    answers = iter([0.0, 1.0])
    executor = Voxelwise(lambda x: torch.full_like(x, next(answers)))
    logits = predict_logits(executor, make_image((24, 16, 8)), (16, 16, 8), 0.5, 1)
    weight = gaussian_weight((16, 16, 8))
    middle = weight[:8, 3, 3] / (weight[:8, 3, 3] + weight[8:, 3, 3])
    expected = torch.cat([torch.zeros(8), middle, torch.ones(8)])
    torch.testing.assert_close(logits[0, :, 3, 3], expected)


@pytest.mark.parametrize("window", ["whole", (16, 16, 8)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_logits_are_added_up_in_float32_at_least(
    window: object, dtype: torch.dtype, result: torch.dtype
) -> None:
    image = make_image((20, 20, 10)).to(torch.float64)
    executor = Voxelwise(lambda x: x.to(dtype))
    logits = predict_logits(executor, image, window, 0.5, 2)
    assert logits.dtype == result
    torch.testing.assert_close(logits, image.to(dtype).to(result), rtol=1e-5, atol=1e-5)


def test_deep_supervision_gives_the_full_resolution() -> None:
    model, executor = small_network(deep_supervision=True)
    image = make_image((16, 16, 16), 1)
    logits = predict_logits(executor, image, "whole", 0.5, 1)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(image[None])[0])


def test_too_little_memory_says_what_to_do() -> None:
    def fail(image: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. And more.")

    executor = Voxelwise(fail)
    with pytest.raises(DoesNotFitError) as caught:
        predict_logits(executor, make_image((20, 20, 10)), (13, 16, 8), 0.5, 2)
    assert str(caught.value) == (
        "windows of 16x16x8 voxels do not fit on cpu (CUDA out of memory); "
        "use a smaller inference.window or more devices"
    )


def test_auto_takes_as_many_windows_as_are_best() -> None:
    executor = Voxelwise()
    image = make_image((128, 64, 64))
    predict_logits(executor, image, (64, 64, 64), 0.5, "auto")
    predict_logits(executor, image, (128, 64, 64), 0.5, "auto")
    assert [shape[0] for shape in executor.batches] == [3, 1]


class Answers:
    """What a network says of one window after the other; the last answer stays."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def __call__(self, image: Tensor) -> Tensor:
        value = self.values.pop(0) if len(self.values) > 1 else self.values[0]
        logits = image.clone()
        logits[0, -1, 3, 3, 3] = value
        return logits


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("window", ["whole", (16, 16, 8)], ids=str)
def test_one_logit_that_is_no_number_is_refused(
    window: object, value: float, dtype: torch.dtype
) -> None:
    """A class is never larger than NaN, so the background would win everywhere."""
    answers = Answers(0.0, value, 0.0)  # in the second of several windows
    if window == "whole":
        answers = Answers(value)
    executor = Voxelwise(lambda image: answers(image.to(dtype)))
    with pytest.raises(NonFiniteLogitsError, match="output is NaN or infinite"):
        predict_logits(executor, make_image((20, 20, 10)), window, 0.5, 1)


def test_a_bad_network_is_refused_at_its_first_window() -> None:
    executor = Voxelwise(lambda image: image * math.nan)
    with pytest.raises(NonFiniteLogitsError):
        predict_logits(executor, make_image((64, 64, 32)), (16, 16, 8), 0.5, 2)
    assert len(executor.batches) == 1


def test_large_logits_are_none_of_these() -> None:
    executor = Voxelwise(lambda image: 1e30 * image)
    image = make_image((20, 20, 10))
    logits = predict_logits(executor, image, (16, 16, 8), 0.5, 1)
    torch.testing.assert_close(logits, 1e30 * image, rtol=1e-5, atol=1e25)


@pytest.mark.parametrize(
    ("window", "batch_size", "expected"),
    [
        ("whole", 1, [(0, 1), (1, 1)]),
        ((16, 16, 8), 1, [(done, 4) for done in range(5)]),
        ((16, 16, 8), 3, [(0, 4), (3, 4), (4, 4)]),
    ],
    ids=str,
)
def test_it_says_how_many_windows_are_done(
    window: object, batch_size: int, expected: list[tuple[int, int]]
) -> None:
    executor, calls = Voxelwise(), []
    predict_logits(
        executor,
        make_image((20, 20, 8)),
        window,
        0.5,
        batch_size,
        windows_done=lambda *numbers: calls.append((*numbers, len(executor.batches))),
    )
    assert [(done, total) for done, total, _ in calls] == expected
    assert [batches for *_, batches in calls] == list(range(len(expected)))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 8.00 TiB for an array"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 99 bytes. Error code 12 (Cannot allocate memory)"
        ),
    ],
)
def test_too_little_host_memory_is_explained_too(error: Exception) -> None:
    def fail(image: Tensor) -> Tensor:
        raise error

    executor = Voxelwise(fail)
    with pytest.raises(DoesNotFitError, match=r"do not fit on cpu \((can't|Unable to) allocate"):
        predict_logits(executor, make_image((20, 20, 10)), (16, 16, 8), 0.5, 2)


def test_an_error_that_has_nothing_to_do_with_memory_is_raised_as_it_is() -> None:
    def fail(image: Tensor) -> Tensor:
        raise RuntimeError("sizes differ")

    executor = Voxelwise(fail)
    with pytest.raises(RuntimeError, match="sizes differ"):
        predict_logits(executor, make_image((20, 20, 10)), (16, 16, 8), 0.5, 2)


@pytest.mark.parametrize("size", [(50, 20, 10), (20, 41, 9), (17, 16, 30), (9, 40, 5)])
@pytest.mark.parametrize(("overlap", "batch_size"), [(0.0, 1), (0.5, 1), (0.5, 5), (0.8, 2)])
def test_slabs_are_the_volume_blended_at_once(size: Shape, overlap: float, batch_size: int) -> None:
    """The reference keeps the logits of the whole volume, in float64."""
    _, executor = small_network()
    image = make_image(size, 1)
    topology = executor.module.topology
    slabs = all_slabs(executor, image, (16, 16, 16), overlap, batch_size)
    windows = Windows.of(image.shape[1:], topology, (16, 16, 16), overlap, 1, [CPU])
    weight = gaussian_weight(windows.shape).double()
    total = torch.zeros(3, *windows.size, dtype=torch.float64)
    weights = torch.zeros(windows.size, dtype=torch.float64)
    padded = torch.zeros(1, *windows.size)
    padded[(slice(None), *windows.inside)] = image
    for start in windows.starts:
        place = windows.place(start)
        window = padded[(slice(None), *place)]
        total[(slice(None), *place)] += weight * executor.predict(window[None])[0]
        weights[place] += weight
    expected = (total / weights)[(slice(None), *windows.inside)]
    found = torch.cat(slabs, 1 + windows.axis)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_slab_is_finished_before_the_windows_after_it_are_computed(batch_size: int) -> None:
    executor = Voxelwise()
    image = make_image((160, 20, 8))
    topology = executor.module.topology
    windows = Windows.of(image.shape[1:], topology, (16, 16, 8), 0.5, batch_size, [CPU])
    end = 0
    for slab in logit_slabs([executor], slab_of(image, windows), windows, 2):
        assert slab.shape[1] <= windows.slab[0] < 40
        end += slab.shape[1]
        computed = sum(shape[0] for shape in executor.batches)
        if computed < len(windows.starts):  # the next window begins where the slab ends
            assert windows.starts[computed][0] == end
    assert end == 160 and computed == len(windows.starts)


def test_the_memory_of_a_slab_does_not_depend_on_the_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed: list[int] = []
    monkeypatch.setattr(sliding_window, "refuse_beyond_memory", lambda n, *_: needed.append(n))
    for length in (48, 480):
        all_slabs(Voxelwise(), make_image((length, 20, 8)), (16, 16, 8), 0.5, 1)
    # Two classes in float32, of as many planes as a window has.
    assert needed == [16 * 20 * 8 * 2 * 4] * 2


def test_logits_that_the_host_cannot_add_up_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SMALL_BYTES", 0)
    monkeypatch.setattr(host, "available_bytes", lambda: 16 * 20 * 8 * 2 * 4 - 1)
    with pytest.raises(VolumeError, match="logits of 16x20x8 voxels and 2 classes"):
        all_slabs(Voxelwise(), make_image((48, 20, 8)), (16, 16, 8), 0.5, 1)


# Windows that are skipped


def skipping_slabs(
    executor: Any,
    image: Tensor,
    overlap: float,
    batch_size: int,
    empty_logits: list[float],
) -> Tensor:
    topology = executor.module.topology
    windows = Windows.of(image.shape[1:], topology, WINDOW, overlap, batch_size, [CPU])
    slabs = logit_slabs(
        [executor],
        slab_of(image, windows),
        windows,
        topology.num_classes,
        empty_logits=empty_logits,
    )
    return torch.cat(list(slabs), 1 + windows.axis)


WINDOW = (16, 16, 8)
EMPTY = [9.0, -9.0]


def body_in_air(size: Shape, share: float) -> Tensor:
    """Return an image that is one number in each channel, but for its end and some voxels."""
    image = torch.stack([torch.full(size, -1.5), torch.full(size, 0.0)])
    length = int(size[0] * share)
    image[:, :length] = make_image((length, *size[1:]))
    image[1, -1, -1, -1] = 2.0  # in one channel, in the last corner
    return image


@pytest.mark.parametrize("size", [(70, 20, 10), (64, 33, 9), (17, 17, 9)])
@pytest.mark.parametrize(("overlap", "batch_size"), [(0.0, 1), (0.5, 1), (0.5, 4), (0.7, 100)])
def test_empty_windows_are_skipped_and_what_only_they_reach_is_background(
    size: Shape, overlap: float, batch_size: int
) -> None:
    """The reference looks at each window of the whole volume, and blends in float64."""
    image = body_in_air(size, 0.3)
    executor = Voxelwise(lambda x: 2 * x - 1)
    topology = executor.module.topology
    windows = Windows.of(size, topology, WINDOW, overlap, 1, [CPU])
    padded = torch.zeros(2, *windows.size)
    padded[(slice(None), *windows.inside)] = image
    weight = gaussian_weight(WINDOW).double()
    total = torch.zeros(2, *windows.size, dtype=torch.float64)
    weights = torch.zeros(windows.size, dtype=torch.float64)
    num_full = 0
    for start in windows.starts:
        place = windows.place(start)
        window = padded[(slice(None), *place)]
        if all(len(channel.unique()) == 1 for channel in window):
            continue
        num_full += 1
        total[(slice(None), *place)] += weight * (2 * window - 1)
        weights[place] += weight
    empty = torch.tensor(EMPTY, dtype=torch.float64)[:, None, None, None]
    expected = torch.where(weights > 0, total / weights, empty)[(slice(None), *windows.inside)]
    found = skipping_slabs(executor, image, overlap, batch_size, EMPTY)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    computed = sum(shape[0] for shape in executor.batches)
    assert computed == num_full
    if size[0] > 60:
        assert num_full < len(windows.starts)
        assert (found == empty).all(0).any()


def test_where_no_window_is_empty_nothing_changes() -> None:
    image = make_image((50, 20, 10))
    _, executor = small_network()
    image = image[:1]
    found = skipping_slabs(executor, image, 0.5, 3, [9.0, -9.0, -9.0])
    assert torch.equal(found, predict_logits(executor, image, WINDOW, 0.5, 3))


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("value", [0.0, -3.0])
def test_where_all_windows_are_empty_nothing_is_computed(batch_size: int, value: float) -> None:
    executor = Voxelwise()
    image = torch.full((2, 48, 32, 8), value)  # no window reaches beyond it
    calls: list[tuple[int, int]] = []
    windows = Windows.of((48, 32, 8), executor.module.topology, WINDOW, 0.5, batch_size, [CPU])
    slabs = list(
        logit_slabs(
            [executor],
            slab_of(image, windows),
            windows,
            2,
            lambda done, total: calls.append((done, total)),
            EMPTY,
        )
    )
    found = torch.cat(slabs, 1 + windows.axis)
    assert executor.batches == [] and found.dtype == torch.float32
    assert (found[0] == 9).all() and (found[1] == -9).all() and found.shape == (2, 48, 32, 8)
    num_windows = len(windows.starts)
    assert calls[0] == (0, num_windows) and calls[-1] == (num_windows, num_windows)


def test_a_bad_network_is_refused_also_after_windows_that_were_skipped() -> None:
    image = body_in_air((70, 20, 10), 0.3).flip(1)
    executor = Voxelwise(lambda x: x * math.nan)
    with pytest.raises(NonFiniteLogitsError):
        skipping_slabs(executor, image, 0.5, 1, EMPTY)


# Any shape


@property_test
@given(
    size=st.tuples(*[st.integers(1, 40)] * 3),
    window=st.tuples(*[st.integers(1, 20)] * 3),
    overlap=st.floats(0, 0.85),
    num_classes=st.integers(1, 4),
    batch_size=st.integers(1, 9),
)
def test_slabs_of_any_shape_are_the_volume_blended_at_once(
    size: Shape, window: Shape, overlap: float, num_classes: int, batch_size: int
) -> None:
    """What a window answers depends on its place, so that each counts as it should."""

    def at_its_place(x: Tensor) -> Tensor:
        n, k, *shape = x.shape
        ramp = torch.linspace(-1, 1, math.prod(shape)).reshape(shape)
        return x * ramp + ramp

    executor = Voxelwise(at_its_place, num_classes)
    image = make_image(size, num_classes)
    topology = executor.module.topology
    windows = Windows.of(size, topology, window, overlap, batch_size, [CPU])
    assume(len(windows.starts) < 400)
    found = predict_logits(executor, image, window, overlap, batch_size)
    padded = torch.zeros(num_classes, *windows.size)
    padded[(slice(None), *windows.inside)] = image
    weight = gaussian_weight(windows.shape).double()
    total, weights = torch.zeros_like(padded, dtype=torch.float64), torch.zeros(windows.size)
    weights = weights.double()
    for start in windows.starts:
        place = windows.place(start)
        answer = at_its_place(padded[(None, slice(None), *place)])[0]
        total[(slice(None), *place)] += weight * answer
        weights[place] += weight
    expected = (total / weights)[(slice(None), *windows.inside)]
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
