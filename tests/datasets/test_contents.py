"""What a data set holds, compared with NumPy and nibabel, and cases that are outliers."""

import json
from dataclasses import replace

import nibabel as nib
import numpy as np
import pytest

from tests.command_line import run
from tests.images.samples import blob_label, msd_entry, write_msd, write_volume
from unet3d.datasets import contents
from unet3d.datasets.contents import CaseContents, intensities_of, lines, summary, voxels_of
from unet3d.datasets.dataset import load_dataset
from unet3d.datasets.phantom import write_phantom_dataset
from unet3d.images.image import Image
from unet3d.preparation import check


def approximately(value):
    return pytest.approx(value, rel=1e-5, abs=1e-5)


def spread(values):
    kinds = {"median": np.median, "lowest": np.min, "highest": np.max}
    return {kind: approximately(of(values, axis=0)) for kind, of in kinds.items()}


def test_phantoms_hold_what_numpy_finds_in_them(tmp_path, monkeypatch, capsys):
    root = write_phantom_dataset(tmp_path / "data", 8, (24, 20, 18), (1.0, 1.0, 2.0), seed=3)
    names = [f"phantom_{number:03d}" for number in range(8)]
    other = nib.load(root / f"imagesTr/{names[5]}.nii.gz").get_fdata()[:, :, :6]
    write_volume(root / f"imagesTr/{names[5]}.nii.gz", other.astype(np.float32) * 50, (1, 1, 7))
    none = np.zeros((24, 20, 6), np.uint8)
    none[3, 4, 5] = 1
    write_volume(root / f"labelsTr/{names[5]}.nii.gz", none, (1, 1, 7))
    read = []
    whole, label = Image.whole, check.read_label
    monkeypatch.setattr(Image, "whole", lambda one: (read.append(one.geometry.path), whole(one))[1])
    monkeypatch.setattr(check, "read_label", lambda *file: (read.append(file[0]), label(*file))[1])
    assert run("check", root, "--json", tmp_path / "check.json") == 0
    assert len(read) == len(set(read)) == 16

    images, labels = (
        [nib.load(root / folder / f"{name}.nii.gz") for name in names]
        for folder in ("imagesTr", "labelsTr")
    )
    arrays = [image.get_fdata() for image in images]
    volumes_ml = np.array(
        [
            [(label.get_fdata() == value).sum() * np.prod(label.header.get_zooms()) / 1000]
            for value in (1, 2, 3)
            for label in labels
        ]
    ).reshape(3, 8)
    found = json.loads((tmp_path / "check.json").read_text())["contents"]
    assert (found["num_cases"], found["num_label_maps"]) == (8, 8)
    assert found["shape"] == spread([image.shape for image in images])
    assert found["spacing_mm"] == spread([image.header.get_zooms() for image in images])
    (channel,) = found["channels"]
    assert channel["name"] == "MRI"
    ranks = (0, 1, 50, 99, 100)
    assert tuple(found["percentiles"]) == ranks
    assert channel["intensities"] == spread([np.percentile(array, ranks) for array in arrays])
    of_labels = [
        (label["name"], label["num_cases"], label["volume_ml"]) for label in found["labels"]
    ]
    assert of_labels == [
        (name, (of_label > 0).sum(), spread(of_label[of_label > 0]))
        for name, of_label in zip(("brain", "ventricles", "lesion"), volumes_ml, strict=True)
    ]
    assert [case["name"] for case in found["cases"]] == names
    (outlier,) = found["outliers"]
    assert outlier["case"] == names[5]
    shape, spacing, intensities, brain = outlier["why"]
    assert (shape, spacing) == ("shape 24x20x6", "spacing 1x1x7 mm")
    assert intensities.startswith("MRI ") and brain == "brain 0.007 mL"
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == [
        "data: 8 cases, 1 channel, 3 labels",
        "  shape       24x20x18 (median), 24x20x6 to 24x20x18 voxels",
        "  spacing     1x1x2 (median), 1x1x2 to 1x1x7 mm",
    ]
    assert printed[5].startswith("  ventricles  in 7 of 8 cases, ")
    assert printed[-2] == f"  outliers    {names[5]} ({'; '.join(outlier['why'])})"
    assert printed[-1] == "8 cases, 0 errors, 0 warnings"


def test_regions_channels_and_what_cannot_be_read(tmp_path):
    labels = {"background": 0, "whole": [1, 2], "core": [2], "ignore": 5}
    files = [[f"imagesTr/{number}_{n}.nii.gz" for n in "abc"] for number in range(2)]
    entries = [msd_entry(number, image=of_case) for number, of_case in enumerate(files)]
    names = {"channel_names": ["one", "two", "three", "four"], "labels": labels}
    root = write_msd(tmp_path, 2, training=entries, regions_class_order=[1, 2], **names)
    for number, (one, two, three) in enumerate(files):
        write_volume(root / one, np.full((4, 4, 4), 1.0 + number, np.float32))
        write_volume(root / two, np.full((4, 4, 4, 2), 2.0 + number, np.float32))
        write_volume(root / three, np.full((4, 4, 4), 4.0 + number, np.float32))
        label = np.zeros((4, 4, 4), np.uint8)
        label[0], label[1, 0], label[3] = 1, 2, 5
        write_volume(root / f"labelsTr/case_{number}.nii.gz", label)
    damaged = np.full((4, 4, 4, 2), np.nan, np.float32)
    write_volume(root / files[0][1], damaged)
    (root / "labelsTr/case_1.nii.gz").write_bytes(b"")
    dataset = load_dataset(root)
    findings, _, cases = check.examine(dataset, watch=print)
    assert sum(finding.severity == "error" for finding in findings) == 2
    found = summary(dataset, cases)
    spreads = {channel["name"]: channel["intensities"] for channel in found["channels"]}
    ranges = {name: [of["lowest"][0], of["highest"][-1]] for name, of in spreads.items()}
    assert ranges == {"one": [1, 2], "two": [3, 3], "three": [3, 3], "four": [4, 5]}
    assert found["num_label_maps"] == 1
    volumes = {label["name"]: label["volume_ml"]["median"] for label in found["labels"]}
    assert volumes == approximately({"whole": 0.020, "core": 0.004})
    for path in root.rglob("*.nii.gz"):
        path.write_bytes(b"")
    empty = summary(dataset, check.examine(dataset, watch=print).contents)
    assert (empty["shape"], empty["channels"][0]["intensities"]) == (None, None)
    assert "  spacing   unknown" in list(lines(empty))


def case_of(number, spacing_mm=(1.0, 1.0, 1.0), middle=100.0, num_voxels=1000):
    return CaseContents(
        name=f"case_{number}",
        shape=(12, 14, 10),
        spacing_mm=spacing_mm,
        voxel_ml=0.001,
        intensities={0: [0, 10, middle, 200, 250]},
        num_voxels={0: 500, 1: num_voxels, 2: 900 + 20 * number},
    )


def test_an_image_of_a_microscope_has_its_units(tmp_path):
    """1000 voxels of 10 nm have 0.001 µm3; JSON has mm and mL."""
    dataset = load_dataset(write_msd(tmp_path))
    nm = (1e-5, 1e-5, 1e-5)
    case = replace(case_of(1, nm), voxel_ml=1e-18)
    far = replace(case_of(2, (1e-5, 1e-5, 3e-5), num_voxels=3), voxel_ml=1e-18)
    found = summary(dataset, [*[case] * 9, far])
    told = "\n".join(lines(found))
    assert "10x10x10 (median), 10x10x10 to 10x10x30 nm" in told
    assert "  left      in 10 of 10 cases, 0.001 (median), 3e-06 to 0.001 µm³" in told
    assert found["outliers"][0]["why"] == ["spacing 10x10x30 nm", "left 3e-06 µm³"]
    assert found["spacing_mm"]["median"] == pytest.approx(nm)


def test_cases_that_are_far_out_are_named(tmp_path):
    dataset = load_dataset(write_msd(tmp_path))
    common = [case_of(number) for number in range(9)]
    far = [
        case_of(10, spacing_mm=(1.0, 1.0, 2.0)),
        case_of(11, middle=170),
        case_of(12, num_voxels=3),
        case_of(13, spacing_mm=(1.1, 1.2, 1.0), middle=110, num_voxels=1200),
        case_of(14, num_voxels=0),
    ]
    found = summary(dataset, [*common, *far])
    assert {one["case"]: one["why"] for one in found["outliers"]} == {
        "case_10": ["spacing 1x1x2 mm"],
        "case_11": ["MRI 10, 170, 200"],
        "case_12": ["left 0.003 mL"],
    }
    assert found["labels"][0]["num_cases"] == 13
    assert summary(dataset, [*common[:6], far[0]])["outliers"] == []  # too few cases for outliers


def test_lines_stay_few_and_short(tmp_path):
    names = {str(number): f"label {number} " + "x" * 150 for number in range(1, 118)}
    dataset = load_dataset(write_msd(tmp_path, labels=names))
    shown = list(lines(summary(dataset, [case_of(number) for number in range(9)])))
    assert len(shown) == 11 and max(map(len, shown)) < 600
    assert shown[-1].strip() == "and 112 more labels: --json names all"


def test_large_images_are_sampled(monkeypatch):
    array = np.random.default_rng(0).normal(40, 20, (60, 50, 40)).astype(np.float32)
    monkeypatch.setattr(contents, "SAMPLE_VOXELS", 20_000)
    lowest, *inner, highest = intensities_of(array)
    assert (lowest, highest) == (array.min(), array.max())
    assert inner == pytest.approx(np.percentile(array, (1, 50, 99)), abs=1.0)
    label = np.asfortranarray(blob_label((20, 30, 10)))
    values, counts = np.unique(label, return_counts=True)
    assert voxels_of(label) == dict(zip(values, counts, strict=True))
