"""Windows at a time: as many as are best, one where these do not fit, and only then an error."""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.mutations import property_test
from tests.networks import place, random_checkpoint, reseeded
from tests.volumes.samples import noise, write_volume
from unet3d.config import InferenceSettings, ParallelSettings, Shape
from unet3d.errors import DoesNotFitError
from unet3d.inference.image_slab import WholeImage
from unet3d.inference.networks import Networks
from unet3d.inference.predictor import Predictor
from unet3d.inference.sliding_window import NonFiniteLogitsError
from unet3d.inference.windows import gaussian_weight, longest_axis, window_starts
from unet3d.runs.checkpoint import Checkpoint
from unet3d.volumes.classes import Region
from unet3d.volumes.in_memory import open_array
from unet3d.volumes.nifti import ScanImage, open_channels, open_stored
from unet3d.volumes.scratch import Scratch


def scan_of(array: np.ndarray, folder: Path) -> ScanImage:
    return open_channels([write_volume(folder / "scan.nii", array)])


@pytest.mark.parametrize("shape", [(31, 24, 40), (16, 16, 16), (13, 45, 12), (20, 18, 61)], ids=str)
@pytest.mark.parametrize("axes", [(), (0, 2), (0, 1, 2)], ids=str)
def test_logits_are_those_of_nnunets_windows(
    shape: Shape, axes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the same network, which sees the same prepared image: padded, cut, mirrored, blended."""
    theirs = pytest.importorskip("nnunetv2.inference.predict_from_raw_data", reason="needs nnU-Net")
    # Their sums are of half precision, which in a volume's corners leaves no digit.
    gaussian = partial(theirs.compute_gaussian, dtype=torch.float32)
    monkeypatch.setattr(theirs, "compute_gaussian", gaussian)
    monkeypatch.setattr(torch, "half", torch.float32)
    letters = ",".join("xyz"[axis] for axis in axes)
    changes = ["training.precision=float32"]
    if axes:
        changes += [f"patches.augmentation.mirror_axes={letters}"]
    checkpoint = random_checkpoint(patch_size=(16, 16, 12), changes=tuple(changes))
    image = torch.from_numpy(noise(shape))[None]
    image = (image - image.mean()) / image.std()
    reference = theirs.nnUNetPredictor(
        tile_step_size=0.5,
        use_mirroring=bool(axes),
        perform_everything_on_device=False,
        device=torch.device("cpu"),
        allow_tqdm=False,
    )
    reference.network = checkpoint.build_model()
    reference.allowed_mirroring_axes = axes or None
    reference.configuration_manager = SimpleNamespace(patch_size=[16, 16, 12])
    reference.label_manager = SimpleNamespace(num_segmentation_heads=3)
    expected = reference.predict_sliding_window_return_logits(image)
    logits = place(checkpoint, inference=InferenceSettings(tta=bool(axes)))._logits
    slabs = logits.slabs(WholeImage(image), [(16, 16, 12)], lambda done, total: None)
    found = torch.cat(list(slabs), 1 + longest_axis(shape))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Memory:
    """Lets forward passes fail that take too much, and notes how many windows each had."""

    def __init__(
        self, predictor: Predictor, monkeypatch: pytest.MonkeyPatch, max_windows: int
    ) -> None:
        self.tried: list[int] = []
        self.max_windows = max_windows
        predict = predictor.executor.predict

        def limited(image: torch.Tensor) -> torch.Tensor:
            self.tried.append(len(image))
            if len(image) > self.max_windows:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
            return predict(image)

        monkeypatch.setattr(predictor.executor, "predict", limited)


@pytest.mark.parametrize("late", [False, True])
def test_windows_that_do_not_fit_together_are_computed_one_by_one(
    late: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="unet3d")
    monkeypatch.setattr("unet3d.inference.windows.CPU_VOXELS", 5 * 16**3)
    scan = scan_of(noise((60, 24, 20)), tmp_path)
    one = place(random_checkpoint(), inference=InferenceSettings(batch_size=1))
    expected = one.segment(scan, probabilities=tmp_path / "one.npy")
    predictor = place(random_checkpoint())
    memory = Memory(predictor, monkeypatch, 5 if late else 1)

    def windows_done(done: int, total: int) -> None:
        if done >= 10:  # others take memory while some planes are done already
            memory.max_windows = 1

    found = predictor.segment(scan, windows_done, probabilities=tmp_path / "several.npy")
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.load(tmp_path / "several.npy"), np.load(tmp_path / "one.npy"))
    num_windows = len(memory.tried) - (3 if late else 1)
    assert memory.tried == [5] * (3 if late else 1) + [1] * num_windows
    (told,) = [line for line in caplog.messages if "at a time" in line]
    assert told == "5 windows at a time do not fit; trying one"
    # The next scan does not try again.
    memory.tried.clear()
    np.testing.assert_array_equal(predictor.segment(scan), expected)
    assert set(memory.tried) == {1}


def test_one_that_does_not_fit_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unet3d.inference.windows.CPU_VOXELS", 5 * 16**3)
    predictor = place(random_checkpoint())
    memory = Memory(predictor, monkeypatch, 0)
    with pytest.raises(DoesNotFitError, match="windows of 16x16x16 voxels do not fit on cpu"):
        predictor.segment(scan_of(noise((60, 24, 20)), tmp_path))
    assert memory.tried == [5, 1]


def test_a_number_that_was_asked_for_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = place(random_checkpoint(), inference=InferenceSettings(batch_size=3))
    memory = Memory(predictor, monkeypatch, 1)
    with pytest.raises(DoesNotFitError):
        predictor.segment(scan_of(noise((60, 24, 20)), tmp_path))
    assert memory.tried == [3]


def test_of_several_networks_the_one_that_does_not_fit_is_tried_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another one, with larger windows, has begun since."""
    monkeypatch.setattr("unet3d.inference.windows.CPU_VOXELS", 3 * 8**3)
    scan = scan_of(noise((40, 16, 16)), tmp_path)
    small = random_checkpoint(patch_size=(8, 8, 8), dtype=torch.float64)
    networks = Networks.of(small, replace(small, patch_size=(16, 16, 16)))
    expected = place(networks).segment(scan)
    predictor = place(networks)
    memory = Memory(predictor, monkeypatch, 3)

    def windows_done(done: int, total: int) -> None:
        if 1 in memory.tried:  # a window of the larger ones
            memory.max_windows = 1

    np.testing.assert_array_equal(predictor.segment(scan, windows_done), expected)
    assert memory.tried[0] == 3 and set(memory.tried[memory.tried.index(1) + 2 :]) == {1}


# Folds, whose logits are added up together


def folds(count: int, **more: Any) -> Networks:
    first = random_checkpoint(patch_size=(16, 16, 12), dtype=torch.float64, **more)
    return Networks.of(first, *(reseeded(first, seed) for seed in range(1, count)))


@pytest.mark.parametrize("shape", [(13, 16, 12), (21, 45, 30), (50, 20, 61)], ids=str)
@pytest.mark.parametrize("batch_size", [1, 3, 100])
@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "cpu")], ids=str)
def test_the_mean_of_folds_is_that_of_what_each_of_them_says(
    shape: Shape, batch_size: int, devices: tuple[str, ...]
) -> None:
    networks = folds(3)
    image = WholeImage(torch.from_numpy(noise(shape))[None].double())
    settings = InferenceSettings(averaging="logits", batch_size=batch_size)
    shown: list[tuple[int, int]] = []

    def logits_of(networks: Networks, *devices: str) -> torch.Tensor:
        logits = place(networks, *devices, inference=settings)._logits
        shown.clear()
        sizes = [(16, 16, 12)] * len(networks)
        slabs = logits.slabs(image, sizes, lambda done, total: shown.append((done, total)))
        return torch.cat(list(slabs), 1 + longest_axis(shape))

    singly = torch.stack([logits_of(Networks.of(one)) for one in networks])
    num_windows = shown[-1][0]
    found = logits_of(networks, *devices)
    torch.testing.assert_close(found, singly.mean(0), rtol=1e-10, atol=1e-10)
    assert shown[0] == (0, 3 * num_windows) and shown[-1] == (3 * num_windows, 3 * num_windows)
    assert [done for done, _ in shown] == sorted({done for done, _ in shown})


def test_folds_take_the_memory_of_one_and_turns_a_row_of_windows_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    networks = folds(3)
    needed: list[int] = []
    monkeypatch.setattr(
        "unet3d.inference.sliding_window.refuse_beyond_memory", lambda n, *_: needed.append(n)
    )
    predictor = place(networks, inference=InferenceSettings(averaging="logits", batch_size=1))
    placed: list[int] = []
    load_into = predictor._placed.load_into

    def noted(executor: Any, before: int, index: int) -> bool:
        placed.append(index)
        return load_into(executor, before, index)

    monkeypatch.setattr(predictor._placed, "load_into", noted)
    image = WholeImage(torch.from_numpy(noise((24, 20, 60)))[None].double())
    rows = len(window_starts(60, 12, 0.5))
    list(predictor._logits.slabs(image, [(16, 16, 12)] * 3, lambda done, total: None))
    # Three classes in float64, of as many planes as a window has, once.
    assert needed == [24 * 20 * 12 * 3 * 8]
    assert placed == [1, 2] + [0, 1, 2] * rows  # all are looked at before the first window


def test_folds_of_other_windows_are_averaged_as_well() -> None:
    first = random_checkpoint(patch_size=(16, 16, 12), dtype=torch.float64)
    members = (first, replace(reseeded(first, 1), patch_size=(8, 8, 8)))
    image = WholeImage(torch.from_numpy(noise((24, 20, 40)))[None].double())
    sizes = [one.patch_size for one in members]
    settings = InferenceSettings(averaging="logits")

    def logits_of(members: Sequence[Checkpoint], sizes: Any) -> torch.Tensor:
        logits = place(Networks.of(*members), inference=settings)._logits
        return torch.cat(list(logits.slabs(image, sizes, lambda done, total: None)), 3)

    singly = [logits_of([one], [size]) for one, size in zip(members, sizes, strict=True)]
    expected = torch.stack(singly).mean(0)
    torch.testing.assert_close(logits_of(members, sizes), expected, rtol=1e-10, atol=1e-10)


def test_a_fold_whose_logits_are_not_finite_is_found_in_its_first_windows() -> None:
    networks = folds(2)
    predictor = place(networks, inference=InferenceSettings(averaging="logits"))
    predict = predictor.executor.predict
    calls: list[int] = []

    def broken(image: torch.Tensor) -> torch.Tensor:
        calls.append(predictor._placed.index)
        return predict(image) * (torch.nan if calls[-1] == 1 else 1)

    image = WholeImage(torch.from_numpy(noise((24, 20, 60)))[None].double())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(predictor.executor, "predict", broken)
        with pytest.raises(NonFiniteLogitsError):
            list(predictor._logits.slabs(image, [(16, 16, 12)] * 2, lambda done, total: None))
    assert calls.count(1) == 1


# Windows that are skipped


def num_windows_of(predictor: Predictor, scan: ScanImage, **more: Any) -> tuple[np.ndarray, int]:
    """Return labels, and how many windows were computed."""
    num = 0
    predict = predictor.executor.predict

    def counted(image: torch.Tensor) -> torch.Tensor:
        nonlocal num
        num += len(image)
        return predict(image)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(predictor.executor, "predict", counted)
        return predictor.segment(scan, **more), num


def skipping(checkpoint: Checkpoint) -> Predictor:
    parallel = ParallelSettings(mode="none", devices=("cpu",))
    return Predictor(Networks.of(checkpoint), parallel, [InferenceSettings()], skips_empty=True)


REGIONS = (
    Region(name="whole", values=(1, 2), written=2),
    Region(name="core", values=(1,), written=1),
)


def of_regions(checkpoint: Checkpoint) -> Checkpoint:
    """Return a network of the same weights whose two outputs are regions."""
    preprocessing = replace(
        checkpoint.preprocessing,
        label_names=("background", "edge", "core"),
        label_values=(0, 1, 2),
        regions=REGIONS,
    )
    return replace(checkpoint, preprocessing=preprocessing)


@pytest.mark.parametrize("are_regions", [False, True])
def test_a_body_in_air_is_segmented_as_without_skipping(are_regions: bool, tmp_path: Path) -> None:
    """Where every window that reaches a voxel is computed; where none is, there is nothing."""
    checkpoint = random_checkpoint()
    if are_regions:
        checkpoint = of_regions(random_checkpoint(label_values=(0, 1)))
    array = np.full((96, 16, 16), -1000, np.int16)
    array[:40] = noise((40, 16, 16))
    scan = scan_of(array, tmp_path)
    expected, num_all = num_windows_of(place(checkpoint), scan)
    path = tmp_path / "a.npy"
    found, num_computed = num_windows_of(skipping(checkpoint), scan, probabilities=path)
    # Windows of 16 start at 0, 8, ..., 80; the last one with a voxel of the body at 32.
    assert (num_all, num_computed) == (11, 5)
    np.testing.assert_array_equal(found[:40], expected[:40])
    assert not found[48:].any() and expected[48:].any()
    assert len(np.unique(found)) == 3
    outside = np.load(path).T[48:]
    certain = [0, 0] if are_regions else [1, 0, 0]
    assert (np.abs(outside.astype(float) - certain) < 1e-3).all()


def test_a_scan_of_one_number_is_background(tmp_path: Path) -> None:
    scan = scan_of(np.full((40, 32, 16), 7, np.int16), tmp_path)
    found, num_computed = num_windows_of(skipping(random_checkpoint()), scan)
    assert num_computed == 0 and not found.any() and found.shape == (40, 32, 16)


# Wherever voxels are


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scans")


@partial(property_test, share=0.4)
@given(
    shape=st.tuples(*[st.integers(1, 20)] * 3),
    overlap=st.floats(0, 0.6),
    num_classes=st.integers(2, 5),
    batch_size=st.one_of(st.just("auto"), st.integers(1, 7)),
    is_whole_numbers=st.booleans(),
    name=st.sampled_from(["a.nii", "a.nii.gz"]),
    has_scratch=st.booleans(),
)
def test_what_is_read_in_parts_is_segmented_as_in_memory(
    folder: Path,
    shape: Shape,
    overlap: float,
    num_classes: int,
    batch_size: Any,
    is_whole_numbers: bool,
    name: str,
    has_scratch: bool,
) -> None:
    settings = InferenceSettings(overlap=overlap, batch_size=batch_size)
    assume(np.prod([np.ceil(max(n - 8, 0) / max(1, 8 * (1 - overlap))) + 1 for n in shape]) < 12)
    checkpoint = random_checkpoint(
        label_values=tuple(range(num_classes)),
        patch_size=(8, 8, 8),
        dtype=torch.float64,
        channels=(2, 3),
    )
    predictor = place(checkpoint, inference=settings)
    array = noise(shape).astype(np.int16 if is_whole_numbers else np.float32)
    array.flat[0] += 1  # of one voxel, too, something is there
    held = open_stored(Path("the image"), open_array(array, np.eye(4)))
    expected = predictor.segment(held)
    assert expected.shape == shape
    path = write_volume(folder / name, array)
    scratch = Scratch(folder) if has_scratch else None
    found = predictor.segment(open_channels([path], scratch), scratch=scratch)
    np.testing.assert_array_equal(found, expected)
    with torch.no_grad():
        wide = array.astype(np.float64)
        counted = wide[wide != 0]
        std = counted.std() if counted.std() > 1e-6 else np.abs(wide).max()
        prepared = torch.from_numpy((wide - counted.mean()) / std)
        logits = blended(checkpoint.build_model().eval(), prepared, overlap)
    # What is as good as alike may be another class, because images are prepared in float32.
    strongest = logits.topk(2, dim=0).values
    is_clear = (strongest[0] - strongest[1] > 1e-4).numpy()
    np.testing.assert_array_equal(expected[is_clear], logits.argmax(0).numpy()[is_clear])


def blended(model: torch.nn.Module, image: torch.Tensor, overlap: float) -> torch.Tensor:
    """Return the logits of a volume from windows of 8^3, all of them in memory, in float64."""
    size = [max(n, 8) for n in image.shape]
    before = [(padded - n) // 2 for padded, n in zip(size, image.shape, strict=True)]
    inside = tuple(slice(a, a + n) for a, n in zip(before, image.shape, strict=True))
    padded = torch.zeros(size, dtype=image.dtype)
    padded[inside] = image
    starts = [window_starts(n, 8, overlap) for n in size]
    weight = gaussian_weight((8, 8, 8)).double()
    total: Any = 0
    weights = torch.zeros(size, dtype=torch.float64)
    for start in itertools.product(*starts):
        place = tuple(slice(a, a + 8) for a in start)
        answer = model(padded[place][None, None])[0].double() * weight
        if isinstance(total, int):
            total = torch.zeros(len(answer), *size, dtype=torch.float64)
        total[(slice(None), *place)] += answer
        weights[place] += weight
    return (total / weights)[(slice(None), *inside)]
