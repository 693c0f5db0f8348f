import numpy as np
import pytest
import torch

from unet3d.errors import VolumeError
from unet3d.volumes import image_voxels
from unet3d.volumes.image_voxels import ImageVoxels, StoredChannels
from unet3d.volumes.normalization import ChannelNormalization, ChannelScaling

RNG = np.random.default_rng(0)
Z_SCORE = ChannelNormalization(kind="z-score")


def channel(scale: float = 1.0) -> np.ndarray:
    array = RNG.normal(300, 40, (13, 9, 7)).astype(np.float32)
    array[RNG.random(array.shape) < 0.3] = 0
    return (array * np.float32(scale)).astype(np.float32)


def normalised(scaling: ChannelScaling, array: np.ndarray, inside: np.ndarray | None) -> np.ndarray:
    values = torch.from_numpy(array.copy())
    scaling.apply_(values, None if inside is None else torch.from_numpy(inside.copy()))
    return values.numpy()


@pytest.mark.parametrize("piece_voxels", [1, 100, 2**23])
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, -1e35])
def test_a_z_score_is_that_of_the_voxels_that_count(
    piece_voxels: int, is_masked: bool, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_voxels, "PIECE_VOXELS", piece_voxels)
    array = channel(scale)
    inside = RNG.random(array.shape) < 0.5 if is_masked else None
    counted = array[array != 0 if inside is None else inside].astype(np.float64)
    expected = (array - counted.mean()) / counted.std()
    if inside is not None:
        expected[~inside] = 0
    found = normalised(
        ChannelScaling.of(ImageVoxels.of(array[None]), 0, Z_SCORE, inside), array, inside
    )
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_part_is_normalised_as_in_the_whole() -> None:
    array = channel()
    inside = RNG.random(array.shape) < 0.5
    for how in (Z_SCORE, ChannelNormalization(kind="ct", low=200, high=350, mean=280, std=30)):
        scaling = ChannelScaling.of(ImageVoxels.of(array[None]), 0, how, inside)
        whole = normalised(scaling, array, inside)
        part = normalised(scaling, array[:, 2:5], inside[:, 2:5])
        np.testing.assert_array_equal(part, whole[:, 2:5])


@pytest.mark.parametrize("how", [Z_SCORE, ChannelNormalization(kind="none")])
def test_what_has_no_intensities_stays(how: ChannelNormalization) -> None:
    array = np.zeros((4, 5, 6), np.float32)
    found = ChannelScaling.of(ImageVoxels.of(array[None]), 0, how, None).apply(array)
    np.testing.assert_array_equal(found, array)
    nowhere = np.zeros(array.shape, bool)
    assert (
        ChannelScaling.of(ImageVoxels.of((array + 1)[None]), 0, Z_SCORE, nowhere)
        == ChannelScaling()
    )


def test_a_constant_channel_becomes_finite() -> None:
    array = np.full((4, 5, 6), 7, np.float32)
    found = ChannelScaling.of(ImageVoxels.of(array[None]), 0, Z_SCORE, None).apply(array)
    np.testing.assert_array_equal(found, 0)


def plain_z_score(array: np.ndarray, inside: np.ndarray | None) -> tuple[float, float]:
    """Return mean and deviation of the voxels that count, in float64."""
    counted = array[array != 0 if inside is None else inside].astype(np.float64)
    return float(counted.mean()), float(counted.std())


@pytest.mark.parametrize("piece_voxels", [1, 100, 2**23])
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize(("slope", "inter"), [(1.0, 0.0), (0.5, -1024.0), (1e30, 0.0)])
@pytest.mark.parametrize("dtype", ["u1", "i1", "<u2", ">i2", "<i4", "?"])
def test_integers_have_the_z_score_of_what_they_stand_for(
    dtype: str,
    slope: float,
    inter: float,
    is_masked: bool,
    piece_voxels: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted or not: four bytes are not."""
    monkeypatch.setattr(image_voxels, "PIECE_VOXELS", piece_voxels)
    rng = np.random.default_rng(2)
    stored = rng.integers(0, 2 if dtype == "?" else 100, (13, 9, 7)).astype(dtype)
    stored[rng.random(stored.shape) < 0.3] = 0
    array = (stored.astype(np.float64) * slope + inter).astype(np.float32)
    inside = rng.random(array.shape) < 0.5 if is_masked else None
    image = ImageVoxels([StoredChannels(voxels=stored[None], slope=slope, inter=inter)])
    scaling = ChannelScaling.of(image, 0, Z_SCORE, inside)
    mean, std = plain_z_score(array, inside)
    if std < 1e-6 * abs(mean):  # all that is not 0 is alike
        std = float(np.abs(array).max())
    assert np.ldexp(scaling.mean, -scaling.exponent) == pytest.approx(mean, rel=1e-12)
    assert np.ldexp(scaling.std, -scaling.exponent) == pytest.approx(std, rel=1e-12)


def test_many_voxels_lose_no_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Added up in float32, or as squares, a large mean would hide the deviation."""
    monkeypatch.setattr(image_voxels, "PIECE_VOXELS", 1000)
    rng = np.random.default_rng(3)
    stored = (30_000 + rng.integers(0, 3, (90, 80, 70))).astype(np.uint16)
    mean, std = plain_z_score(stored, None)
    for voxels in (stored, stored.astype(np.float32)):
        image = ImageVoxels([StoredChannels(voxels=voxels[None])])
        scaling = ChannelScaling.of(image, 0, Z_SCORE, None)
        assert scaling.mean == pytest.approx(mean, rel=1e-13)
        assert scaling.std == pytest.approx(std, rel=1e-11)


@pytest.mark.parametrize("piece_voxels", [100, 2**23])
@pytest.mark.parametrize("dtype", [np.int16, np.float32])
def test_kinds_of_nnunet(
    piece_voxels: int, dtype: type[np.generic], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_voxels, "PIECE_VOXELS", piece_voxels)
    array = channel().astype(dtype)
    inside = RNG.random(array.shape) < 0.5
    image = ImageVoxels([StoredChannels(voxels=array[None])])
    values = array.astype(np.float64)
    counted = values[inside]
    expected = {
        "z-score-all": (values - values.mean()) / values.std(),
        "z-score-inside": np.where(inside, (values - counted.mean()) / counted.std(), 0),
        "rescale": (values - values.min()) / (values.max() - values.min()),
    }
    for kind, wanted in expected.items():
        how = ChannelNormalization(kind=kind)  # type: ignore[arg-type]
        scaling = ChannelScaling.of(image, 0, how, inside)
        found = normalised(scaling, array.astype(np.float32), inside)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6, err_msg=kind)


@pytest.mark.parametrize("value", [0.1, -7.3, 1e-12, 3e38, 1234567.9])
@pytest.mark.parametrize("kind", ["z-score-all", "z-score-inside", "rescale"])
def test_a_constant_channel_becomes_zero_whatever_its_value(kind: str, value: float) -> None:
    array = np.full((31, 17, 13), value, np.float32)
    how = ChannelNormalization(kind=kind)  # type: ignore[arg-type]
    inside = np.ones(array.shape, bool)
    found = normalised(
        ChannelScaling.of(ImageVoxels.of(array[None]), 0, how, inside), array, inside
    )
    np.testing.assert_array_equal(found, 0)


@pytest.mark.parametrize("kind", ["z-score-all", "z-score-inside", "rescale"])
@pytest.mark.parametrize("least", [1e-8, 1e-3])
@pytest.mark.parametrize("scale", [1e-14, 1e-30])
def test_a_least_deviation_keeps_tiny_intensities_small(
    kind: str, least: float, scale: float
) -> None:
    array = channel(scale)
    how = ChannelNormalization(kind=kind, least_std=least)  # type: ignore[arg-type]
    inside = np.ones(array.shape, bool)
    scaling = ChannelScaling.of(ImageVoxels.of(array[None]), 0, how, inside)
    values = array.astype(np.float64)
    start = values.min() if kind == "rescale" else values.mean()
    expected = (values - start) / least
    found = normalised(scaling, array, inside)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["z-score-all", "z-score-inside", "rescale"])
@pytest.mark.parametrize("scale", [2.0**-40, 2.0**-90, 2.0**60])
def test_without_one_the_unit_of_intensities_does_not_matter(kind: str, scale: float) -> None:
    array = channel()
    how = ChannelNormalization(kind=kind)  # type: ignore[arg-type]
    inside = RNG.random(array.shape) < 0.5
    expected, found = (
        normalised(ChannelScaling.of(ImageVoxels.of(one[None]), 0, how, inside), one, inside)
        for one in (array, array * np.float32(scale))
    )
    assert expected.max() > 0.5
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_the_largest_numbers_are_rescaled() -> None:
    array = np.array([-3e38, 0, 3e38], np.float32).reshape(1, 1, 3)
    how = ChannelNormalization(kind="rescale")
    found = ChannelScaling.of(ImageVoxels.of(array[None]), 0, how, None).apply(array)
    np.testing.assert_allclose(found.ravel(), [0, 0.5, 1], atol=1e-7)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_colours_are_from_0_to_255(dtype: type[np.generic]) -> None:
    array = RNG.integers(0, 256, (5, 6, 7)).astype(dtype)
    how = ChannelNormalization(kind="rgb")
    image = ImageVoxels([StoredChannels(voxels=array[None])])
    found = ChannelScaling.of(image, 0, how, None).apply(array.astype(np.float32))
    np.testing.assert_allclose(found, array / 255.0, atol=1e-7)


@pytest.mark.parametrize(("low", "high"), [(-1, 255), (0, 256), (-1024, 3071)])
def test_what_are_no_colours_is_refused(low: int, high: int) -> None:
    array = np.array([low, 3, high], np.int16).reshape(1, 1, 1, 3)
    image = ImageVoxels([StoredChannels(voxels=array)])
    with pytest.raises(VolumeError, match=f"intensities from {low} to {high}, but colours"):
        ChannelScaling.of(image, 0, ChannelNormalization(kind="rgb"), None)
