"""From file to file: orientations, placements, windows, names of outputs, statistics."""

import math
from dataclasses import replace
from unittest.mock import Mock

import nibabel as nib
import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from tests.images.orientations import ORIENTATIONS, turn_to
from tests.images.samples import SPACING_MM, noise, write_volume
from tests.inference.blending import blended
from tests.networks import place, random_checkpoint, reseeded
from unet3d.config import InferenceSettings
from unet3d.distributed.ranks import Ranks
from unet3d.errors import DoesNotFitError, VolumeError
from unet3d.images.image import open_image
from unet3d.inference import placing, windows
from unet3d.inference.label_volume import LabelVolume
from unet3d.inference.networks import Networks
from unet3d.inference.postprocessing import keep_largest
from unet3d.inference.prediction_memory import prediction_memory
from unet3d.inference.scans import Scan, write_segmentation
from unet3d.inference.windows import Windows
from unet3d.memory import host
from unet3d.preparation.normalization import ChannelNormalization
from unet3d.preparation.resample import Interpolation


def oblique():
    affine = np.eye(4)
    turn = Rotation.from_euler("zx", [25, 10], degrees=True).as_matrix()
    affine[:3, :3] = turn @ np.diag(SPACING_MM)
    affine[:3, 3] = [-31.4, 15.9, 26.5]
    return affine


def volume_of(array, folder):
    return open_image([write_volume(folder / "volume.nii", array)])


@pytest.fixture(scope="module")
def checkpoint():
    return random_checkpoint()


@pytest.fixture(scope="module")
def predictor(checkpoint):
    return place(checkpoint)


def segmented(predictor, path):
    """Return the labels and the probabilities of a file, as they are written."""
    scan = Scan(images=(path,), output=path.with_name("labels.nii"))
    image = open_image(scan.images)
    labels = predictor.segment(image, probabilities=path.with_suffix(".npy"))
    assert labels.shape == image.geometry.shape  # in RAS
    write_segmentation(scan, labels, image.geometry, {}, overwrite=True)
    loaded = nib.load(scan.output)
    np.testing.assert_array_equal(nib.as_closest_canonical(loaded).dataobj, labels)
    found = np.asarray(loaded.dataobj).copy()
    return nib.Nifti1Image(found, loaded.affine), np.load(path.with_suffix(".npy"))


def test_all_orientations_of_a_scan_are_segmented_alike(tmp_path):
    predictor = place(random_checkpoint(spacing_mm=(1.0, 1.0, 2.0)))
    original = nib.Nifti1Image(noise(), oblique())
    reference = None
    assert len(set(ORIENTATIONS)) == 48
    for codes in ORIENTATIONS:
        turned = original.as_reoriented(turn_to(codes, original.affine))
        path = tmp_path / f"{codes}.nii"
        nib.save(turned, path)
        segmentation, _ = segmented(predictor, path)
        assert "".join(nib.aff2axcodes(segmentation.affine)) == codes
        assert segmentation.shape == turned.shape
        labels = np.asarray(nib.as_closest_canonical(segmentation).dataobj)
        reference = labels if reference is None else reference
        np.testing.assert_array_equal(labels, reference, err_msg=codes)
    assert (np.bincount(reference.ravel(), minlength=3) > 50).all()


MIRRORED = ("patches.augmentation_details.mirror_axes=x,z",)
MIRRORING = InferenceSettings(tta=True)

SHEARED = np.diag([1.0, 1.0, 2.0, 1.0])
SHEARED[1, 2] = -0.6


def prepared_by(checkpoint, **changes):
    """Return a network whose images are prepared with these changes."""
    return replace(checkpoint, preprocessing=replace(checkpoint.preprocessing, **changes))


@pytest.mark.parametrize(
    ("codes", "affine"),
    [("RAS", np.diag([1.0, 1.0, 2.0, 1.0])), ("PIR", oblique()), ("AIL", SHEARED)],
)
def test_a_network_that_sees_the_axes_of_the_file_does_so_wherever_they_run(
    codes, affine, tmp_path
):
    """It segments like a network for RAS whose file declares its stored axes to be RAS."""
    array = noise((21, 17, 12))
    array[:3] = array[..., 10:] = 0
    checkpoint = random_checkpoint(spacing_mm=(0.9, 1.0, 1.7), changes=MIRRORED)
    slicewise = Interpolation(thick="always", across_slices=0, logits_across_slices=0, clips=True)
    cropped = prepared_by(checkpoint, crops_to_nonzero=True, interpolation=slicewise)
    ras, stored = (
        place(prepared_by(cropped, orientation=orientation), inference=MIRRORING)
        for orientation in ("ras", "stored")
    )
    image = nib.Nifti1Image(array, affine).as_reoriented(turn_to(codes, affine))
    nib.save(image, tmp_path / "scan.nii")
    found, found_probabilities = segmented(stored, tmp_path / "scan.nii")
    straight = np.diag([*image.header.get_zooms(), 1.0])
    nib.save(nib.Nifti1Image(np.asarray(image.dataobj), straight), tmp_path / "straight.nii")
    expected, probabilities = segmented(ras, tmp_path / "straight.nii")
    assert nib.aff2axcodes(found.affine) == tuple(codes)
    np.testing.assert_allclose(found.affine, image.affine, atol=1e-6)
    np.testing.assert_array_equal(found.dataobj, expected.dataobj)
    np.testing.assert_array_equal(found_probabilities, probabilities)
    assert (np.bincount(np.asarray(found.dataobj).ravel(), minlength=3) > 50).all()
    usual, _ = segmented(ras, tmp_path / "scan.nii")
    assert np.array_equal(usual.dataobj, found.dataobj) == (codes == "RAS")


def test_half_a_voxel_is_rounded_as_by_nnunet(tmp_path):
    """49 voxels of 500 mm / 512 are 24.5 at twice the spacing; NumPy rounds that to 24."""
    path = write_volume(tmp_path / "scan.nii", noise((49, 16, 16)), (0.9765625, 1.0, 1.0))
    checkpoint = random_checkpoint(spacing_mm=(1.953125, 1.0, 1.0), patch_size=(16, 16, 16))
    network = prepared_by(checkpoint, interpolation=Interpolation(clips=True))
    totals = set()
    place(network).segment(open_image(path), lambda done, total: totals.add(total))
    assert totals == {2}
    memory = prediction_memory(open_image(path), Networks.of(network), torch.device("cpu"), 0)
    assert memory["num_windows"] == 2


def test_the_components_that_the_network_keeps_are_kept(predictor, tmp_path, caplog):
    caplog.set_level("INFO")
    image = volume_of(noise(), tmp_path)
    usual = predictor.segment(image)
    assert "post-processing" not in caplog.text
    rules = ((1, 2), (2,))
    expected = usual.copy()
    keep_largest(expected, rules)
    assert not np.array_equal(expected, usual)
    checkpoint = random_checkpoint(postprocessing=rules)
    np.testing.assert_array_equal(place(checkpoint).segment(image), expected)
    (line,) = [message for message in caplog.messages if "post-processing" in message]
    assert line.endswith("the largest component is kept of all labels together, of label 2")
    off = place(checkpoint, inference=InferenceSettings(postprocessing=False))
    np.testing.assert_array_equal(off.segment(image), usual)
    other = random_checkpoint(postprocessing=((1,), (2,)))
    kept = usual.copy()
    keep_largest(kept, ((2,),))  # the only rule that both have
    np.testing.assert_array_equal(place(Networks.of(checkpoint, other)).segment(image), kept)
    place(Networks.of(checkpoint, random_checkpoint()))
    assert "post-processing: none, because the networks have none in common" in caplog.messages


def test_what_is_zero_around_a_scan_is_background(tmp_path):
    """The rest is segmented like a scan that was cropped before."""
    checkpoint = random_checkpoint(spacing_mm=(1.5, 0.8, 2.0), label_values=(0, 5, 300))
    predictor = place(prepared_by(checkpoint, crops_to_nonzero=True))
    array = noise((20, 22, 18))
    around = np.pad(array, ((7, 3), (1, 2), (0, 0)))
    found = predictor.segment(volume_of(around, tmp_path / "around"))
    expected = predictor.segment(volume_of(array, tmp_path / "cut"))
    assert found.dtype == expected.dtype == np.uint16
    assert len(np.unique(expected)) == 3
    np.testing.assert_array_equal(found, np.pad(expected, ((7, 3), (1, 2), (0, 0))))


# Several networks


def prepared(array):
    """Return the network's input for a scan that is neither cropped nor resampled, in float64."""
    return torch.from_numpy((array - array.mean()) / array.std()).double()[None]


def of_another_kind(dtype=torch.float32):
    return random_checkpoint(channels=(6, 8), seed=3, patch_size=(12, 8, 8), dtype=dtype)


@pytest.mark.parametrize(
    ("averaging", "devices"), [("probabilities", ("cpu",)), ("logits", ("cpu",) * 3)]
)
def test_networks_are_averaged_each_with_its_own_windows(tmp_path, averaging, devices):
    first = random_checkpoint(dtype=torch.float64)
    whole = replace(reseeded(first, 1), patch_size=None)
    members = (first, whole, of_another_kind(torch.float64))
    array = noise((24, 20, 16))
    image = volume_of(array, tmp_path)
    settings = InferenceSettings(averaging=averaging)
    found = place(Networks.of(*members), *devices, inference=settings)
    shown = []
    again = [found.segment(image, lambda *done: shown.append(done)) for _ in "ab"]
    np.testing.assert_array_equal(*again)
    shares = [done / total for done, total in shown[: len(shown) // 2]]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1
    # Windows of 16^3, the whole volume, and windows of 12x8x8; windows overlap by half.
    assert {total for _, total in shown} == {2 * 2 * 1 + 1 + 3 * 4 * 3}
    assert [done for done, _ in shown].count(0) == 2  # each scan begins once
    logits = []
    for member in members:
        size, cpu = member.patch_size or array.shape, torch.device("cpu")
        windows = Windows.of(array.shape, member.topology, size, 0.5, 1, [cpu])
        with torch.no_grad():
            logits.append(blended(member.build_model().eval(), prepared(array), windows))
    each = torch.stack(logits)
    means = {"logits": each.mean(0), "probabilities": each.softmax(1).mean(0)}
    labels = {name: mean.argmax(0).numpy() for name, mean in means.items()}
    assert (labels["logits"] != labels["probabilities"]).sum() > 10
    assert (again[0] == labels[averaging]).mean() > 0.999  # images are normalised in float32


def test_a_network_that_had_no_place_is_placed_by_the_next_image(tmp_path, monkeypatch):
    """A program in Python may catch the error and go on with the next image."""
    networks = Networks.of(random_checkpoint(), of_another_kind())
    image = volume_of(noise(), tmp_path)
    expected = place(networks).segment(image)
    predictor = place(networks)

    def failing(*arguments):
        raise DoesNotFitError("no place")

    with monkeypatch.context() as patch, pytest.raises(DoesNotFitError, match="no place"):
        patch.setattr(placing.PlacedNetworks, "_executor", failing)
        predictor.segment(image)
    np.testing.assert_array_equal(predictor.segment(image), expected)


def test_tta_averages_over_the_axes_of_training(tmp_path):
    checkpoint = random_checkpoint(patch_size=None, dtype=torch.float64, changes=MIRRORED)
    array = noise((12, 16, 8))
    image = volume_of(array, tmp_path)
    model = checkpoint.build_model().eval()
    tensor = prepared(array)[None]
    with torch.no_grad():
        mean = sum(model(tensor.flip(dims)).flip(dims) for dims in ([], [2], [4], [2, 4]))[0]
    found = place(checkpoint, inference=MIRRORING).segment(image)
    assert (found == mean.argmax(0).numpy()).mean() > 0.999  # images are normalised in float32
    plain = place(checkpoint).segment(image)
    assert (found != plain).mean() > 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [("0",), ("0", "0"), ("cpu", "0")])
def test_a_gpu_gives_nearly_the_same_labels(checkpoint, predictor, tmp_path, devices):
    image = volume_of(noise((30, 25, 19)), tmp_path)
    agreement = place(checkpoint, *devices).segment(image) == predictor.segment(image)
    assert agreement.mean() > 0.9  # random weights give close logits, and bfloat16 is coarse


def test_channels_that_do_not_suit_the_network_are_refused(predictor, tmp_path):
    two = volume_of(noise((6, 7, 8, 2)), tmp_path)
    with pytest.raises(VolumeError, match=r"volume.nii has 2 channels, but .* on 1 \(channel 0"):
        predictor.segment(two)
    one = volume_of(noise((6, 7, 8)), tmp_path)
    with pytest.raises(VolumeError, match="has 1 channel.* trained on 2 .*case_0000, case_0001"):
        place(random_checkpoint(num_channels=2)).segment(one)


# Numbers that cannot be computed with


def not_normalised(checkpoint):
    return prepared_by(checkpoint, channels=(ChannelNormalization(kind="none"),))


def test_intensities_that_nothing_can_be_computed_with_are_refused(checkpoint, tmp_path):
    """The image is not normalised, so its large numbers reach the network."""
    image = volume_of(noise() * np.float32(1e20), tmp_path)
    with pytest.raises(VolumeError, match=r"volume.nii: its normalised intens.* reach .*e\+"):
        place(not_normalised(checkpoint)).segment(image)
    assert len(np.unique(place(checkpoint).segment(image))) == 3  # normalised they can be used


def test_an_output_that_is_not_finite_names_the_scan_and_the_likely_cause(
    checkpoint, tmp_path, monkeypatch
):
    image = volume_of(noise((24, 16, 16)), tmp_path)
    larger = volume_of(noise((24, 16, 16)) * 1e6, tmp_path / "larger")
    half = "float16 overflows beyond 65504; add --precision bfloat16"
    cases = (
        (checkpoint, image, "float32", "its intensities differ from those in training, or"),
        (checkpoint, image, "float16", half),
        (
            not_normalised(checkpoint),
            larger,
            "float16",
            r"its normalised intensities reach \d.*e\+",
        ),
    )
    for network, scan, precision, cause in cases:
        found = place(network)
        monkeypatch.setattr(placing.PlacedNetworks, "precision", precision)
        predict = found.executor.predict

        def overflow(tensor, predict=predict):
            return predict(tensor) * math.inf

        monkeypatch.setattr(found.executor, "predict", overflow)
        with pytest.raises(VolumeError, match="NaN or infinite; " + cause) as caught:
            found.segment(scan)
        assert str(caught.value).startswith(f"{scan.geometry.path} cannot be segmented: ")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("is_shared", "kind"), [(False, VolumeError), (True, DoesNotFitError)])
def test_memory_that_ends_amid_the_windows_ends_ranks_that_share_them(
    checkpoint, tmp_path, monkeypatch, is_shared, kind
):
    """The other ranks wait for the next window, so this rank cannot go on with another scan."""

    def write(*_):
        raise MemoryError("no room")

    predictor = place(checkpoint)
    monkeypatch.setattr(LabelVolume, "add", write)
    monkeypatch.setattr(predictor._placed, "is_shared", is_shared)
    with pytest.raises(kind, match=r"volume.nii: its segmentation: too little memory"):
        predictor.segment(volume_of(noise(), tmp_path))


@pytest.mark.parametrize("other", [None, "the host has no room"])
def test_ranks_go_on_after_a_scan_that_one_of_them_cannot_begin(
    checkpoint, tmp_path, monkeypatch, other
):
    if other is None:
        monkeypatch.setattr(windows, "MOST_WINDOWS", 0)
    predictor = place(checkpoint)
    group = Mock(ranks=Ranks(), size=2, exchange=lambda own: [own, [other, 1]])
    monkeypatch.setattr(predictor._logits, "_group", group)
    monkeypatch.setattr(predictor._placed, "is_shared", True)
    with pytest.raises(VolumeError, match=f"volume.nii: .*{other or 'check the spacing'}"):
        predictor.segment(volume_of(noise(), tmp_path))


def test_a_small_scan_is_not_padded_to_a_window_that_the_host_cannot_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "available_bytes", lambda: 2**29)
    predictor = place(random_checkpoint(patch_size=(512, 512, 512)))
    with pytest.raises(DoesNotFitError, match=r"window of 512x512x512 voxels, with .* takes "):
        predictor.segment(volume_of(noise(), tmp_path))
