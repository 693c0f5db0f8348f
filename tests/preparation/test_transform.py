import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.images.samples import held_image
from unet3d.datasets.labels import Region
from unet3d.errors import VolumeError
from unet3d.inputs.plain_data import validated
from unet3d.memory import host
from unet3d.preparation.normalization import ChannelNormalization
from unet3d.preparation.prepared_image import PreparedImage, prepare_image, prepare_label
from unet3d.preparation.resample import Interpolation
from unet3d.preparation.transform import Preprocessing, classes_of

RNG = np.random.default_rng(0)


def plan(*channels, spacing_mm=None, label_values=(0, 1, 2)):
    return Preprocessing(
        spacing_mm=spacing_mm,
        channels=channels or (ChannelNormalization(kind="z-score"),),
        channel_names=tuple(f"m{number}" for number in range(max(1, len(channels)))),
        label_names=tuple(f"label {value}" for value in label_values),
        label_values=label_values,
    )


def through_json(preprocessing):
    """Return the plan that is read back after it was written to JSON."""
    tree = json.loads(json.dumps(preprocessing.to_dict()))
    assert validated(Preprocessing, tree) == preprocessing
    return tree


def test_survives_json():
    ct = ChannelNormalization(kind="ct", low=-100, high=200, mean=40.5, std=31.25)
    kinds = ("z-score", "z-score-inside", "rescale", "rgb", "none")
    channels = (ct, *(ChannelNormalization(kind=kind) for kind in kinds))
    how = Interpolation(
        order=1, thick="always", across_slices=0, logits_across_slices=0, clips=True
    )
    tree = through_json(
        replace(
            plan(*channels, spacing_mm=(0.5, 0.75, 3.0)), orientation="stored", interpolation=how
        )
    )
    for field, value in (("order", 2), ("thick", "z"), ("across_slices", 3), ("clips", 1)):
        wrong = {**tree, "interpolation": {**tree["interpolation"], field: value}}
        with pytest.raises(ValueError, match=f"interpolation.{field} must be"):
            validated(Preprocessing, wrong)
    with pytest.raises(ValueError, match="orientation must be"):
        validated(Preprocessing, {**tree, "orientation": "lps"})
    tree = through_json(replace(plan(), crops_to_nonzero=True))
    with pytest.raises(ValueError, match="crops_to_nonzero must be a valid boolean, but is 1"):
        validated(Preprocessing, {**tree, "crops_to_nonzero": 1})


def test_ignored_voxels_have_the_index_after_the_last_class():
    preprocessing = replace(plan(label_values=(0, 3, 5)), ignore_value=9)
    tree = through_json(preprocessing)
    with pytest.raises(ValueError, match="has labels that contradict each other"):
        validated(Preprocessing, {**tree, "ignore_value": 4})
    label = np.array([[[0, 3, 9], [5, 5, 9]]], np.int16)
    prepared = prepare_label(label, (1, 1, 1), preprocessing)
    assert prepared.tolist() == [[[0, 1, 3], [2, 2, 3]]]
    with pytest.raises(VolumeError, match=r"does not name: 9"):
        prepare_label(label, (1, 1, 1), plan(label_values=(0, 3, 5)))


REGIONS = (
    Region(name="whole", values=(3, 5, 6), written=3),
    Region(name="core", values=(5, 6), written=5),
    Region(name="rim", values=(3,), written=6),
)


def test_regions_survive_json_and_are_made_of_classes():
    preprocessing = replace(plan(label_values=(0, 3, 5, 6)), regions=REGIONS)
    tree = through_json(preprocessing)
    assert preprocessing.num_outputs == 3
    assert preprocessing.region_classes == ((1, 2, 3), (2, 3), (1,))
    assert preprocessing.scored == {"whole": (1, 2, 3), "core": (2, 3), "rim": (1,)}
    alone = plan(label_values=(0, 3, 5, 6))
    assert (alone.num_outputs, alone.region_classes) == (4, ())
    assert alone.scored == {"label 3": (1,), "label 5": (2,), "label 6": (3,)}
    for region in (
        {"name": "whole", "values": [3, 5], "written": 3},  # no label value is 6
        {"name": "whole", "values": [3, 5, 6, 7], "written": 3},
        {"name": "whole", "values": [3, 5, 6], "written": 0},
    ):
        with pytest.raises(ValueError, match="has labels that contradict each other"):
            validated(Preprocessing, {**tree, "regions": [region]})


def test_classes_of_regions_are_what_is_written_for_them():
    preprocessing = replace(plan(label_values=(0, 3, 5, 6)), regions=REGIONS)
    logits = torch.tensor([[-1.0, 2, 2, -3], [-1, -2, 1, 4], [-1, -1, 3, -1]])[..., None, None]
    assert classes_of(logits, preprocessing).flatten().tolist() == [0, 1, 3, 2]
    logits = torch.tensor([[1.0, -5], [-1, -2], [0, -1], [0, -3]])[..., None, None]
    assert classes_of(logits, plan(label_values=(0, 3, 5, 6))).flatten().tolist() == [0, 2]


def test_channels_are_normalized_each_its_own_way():
    image = RNG.uniform(-2000, 2000, (4, 6, 6, 6)).astype(np.float32)
    image[:, :3] = 0  # other voxels are not changed by a mask
    ct = ChannelNormalization(kind="ct", low=-100, high=200, mean=50, std=25)
    others = [ChannelNormalization(kind=kind) for kind in ("none", "z-score", "z-score-inside")]
    how = plan(ct, *others)
    before = image.copy()
    prepared = prepare_image(held_image(image), how)
    np.testing.assert_array_equal(image, before)
    np.testing.assert_allclose(prepared[0], (np.clip(image[0], -100, 200) - 50) / 25, rtol=1e-5)
    np.testing.assert_array_equal(prepared[1], image[1])
    for channel, masks in ((2, False), (3, True)):
        inside = image[channel, 3 * masks :].astype(np.float64)
        z_score = (image[channel] - inside.mean()) / inside.std()
        z_score[: 3 * masks] = 0
        np.testing.assert_allclose(prepared[channel], z_score, atol=1e-4)
    with pytest.raises(VolumeError, match=r"has 4 channels, not 2: m0, m1"):
        prepare_image(held_image(image), plan(ct, ct))


def test_labels_become_class_indices():
    label = np.array([[[0, 9], [4, 4]]], np.uint16)
    classes = prepare_label(label, (1, 1, 1), plan(label_values=(0, 4, 9)))
    assert classes.dtype == np.uint8
    np.testing.assert_array_equal(classes, [[[0, 2], [1, 1]]])
    many = prepare_label(label, (1, 1, 1), plan(label_values=tuple(range(300))))
    assert many.dtype == np.uint16
    np.testing.assert_array_equal(many, label)
    for value in (-1, 3, 255):
        label = np.zeros((3, 3, 3), np.int16)
        label[1, 1, 1] = value
        with pytest.raises(VolumeError, match=rf"does not name: {value} .it names 0, 1, 2, 9"):
            prepare_label(label, (1, 1, 1), plan(label_values=(0, 1, 2, 9)))


def test_what_would_not_fit_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(host, "available_bytes", lambda: 2**33)
    array, label = np.ones((1, 32, 32, 32), np.float32), np.zeros((32, 32, 32), int)
    at_one_mm = plan(spacing_mm=(1, 1, 1))
    for spacing_mm, would in {
        (1000.0, 1000.0, 1000.0): "32000x32000x32000 of 1x1x1 mm, which is far too many",
        (1.0, 1.0, 1e7): "32x32x3.2e+08 of 1x1x1 mm, which is far too many",
        (201.0, 1.0, 1.0): "6432x32x32 of 1x1x1 mm, which is far too many",
        (150.0, 150.0, 150.0): "4800x4800x4800 of 1x1x1 mm, which takes ",
    }.items():
        for prepare in (
            lambda mm: prepare_image(held_image(array, spacing_mm=mm), at_one_mm),
            lambda mm: prepare_label(label, mm, at_one_mm),
        ):
            with pytest.raises(VolumeError, match="unit in the header") as caught:
                prepare(spacing_mm)
            assert f"would become {would}" in str(caught.value)
    with pytest.raises(VolumeError, match="would become 1x1x1 of 1x1x1 mm, which is far too few"):
        prepare_image(held_image(array, spacing_mm=(1e-3, 1e-3, 1e-3)), at_one_mm)


def test_what_becomes_infinite_is_refused():
    image = np.zeros((1, 6, 6, 6), np.float32)
    image[:, ::2] = 3.3e38
    for how in (
        ChannelNormalization(kind="none"),
        ChannelNormalization(kind="ct", low=-3e38, high=3e38, mean=-3e38, std=1.0),
        ChannelNormalization(kind="ct", low=0, high=1, mean=0.5, std=1e-60),
    ):
        with pytest.raises(VolumeError, match="normalised intensities reach .*; look for"):
            prepare_image(held_image(image), plan(how, spacing_mm=(0.4, 1, 1)))


def test_the_largest_intensity_is_that_of_the_normalised_image():
    image = RNG.normal(5, 2, size=(2, 12, 11, 10)).astype(np.float32)
    image[1, 3, 4, 5] = -900
    how = ChannelNormalization(kind="z-score")
    prepared = PreparedImage(held_image(image), plan(how, how))
    assert prepared.largest == pytest.approx(float(prepared.planes(0, 0, 12).abs().max()), rel=1e-6)
