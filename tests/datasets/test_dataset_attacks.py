"""Descriptions of data sets that anyone may have written: accepted, or refused in one line."""

import json
import os
import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.images.samples import msd_entry, write_json, write_msd, write_nnunet
from tests.mutations import mutated, property_test
from unet3d.datasets.dataset import fold_cases, load_dataset
from unet3d.datasets.labels import MAX_LABEL_VALUE
from unet3d.errors import Unet3dError
from unet3d.preparation.check import examine

SHAPE = (4, 5, 6)

ENTRIES = [msd_entry(number, fold=number % 2) for number in range(4)]
UNNAMED = {"labels": None, "modality": None, "testing": [{"image": "d/t1.nii"}]}

LISTED = {"num_cases": 4, "training": ENTRIES[:3], "validation": ENTRIES[3:], **UNNAMED}

MAKERS = {
    "decathlon": write_msd,
    "nnunet": write_nnunet,
    "datalist": partial(write_msd, **LISTED),
}


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return {name: make(folder / name, shape=SHAPE) for name, make in MAKERS.items()}


@pytest.mark.parametrize("layout", MAKERS)
@partial(property_test, share=0.3)
@given(data=st.data())
def test_a_changed_description(roots, layout, data):
    """Whatever names a description has, no file can be lost or be written elsewhere."""
    root = roots[layout]
    tree = data.draw(mutated(json.loads((root / "dataset.json").read_text())))
    (root / "changed.json").write_text(json.dumps(tree, default=repr))
    try:
        dataset = load_dataset(root / "changed.json")
        examine(dataset)
        train, validation = fold_cases(dataset, 0, 2, seed=0)
    except Unet3dError as error:
        assert str(error).isprintable() and len(str(error)) < 1000, error
        return
    names = [case.name for case in dataset.cases]
    assert len({*names}) == len(names)
    assert len({*dataset.label_names}) == len(dataset.label_names)
    for name in (*names, *dataset.label_names, *dataset.channel_names):
        assert name and not set(name) & {"\n", "\x1b", "\0"} and len(name) < 5000
        name.encode()
    assert dataset.label_values[0] == 0 and len(dataset.label_values) >= 2
    assert list(dataset.label_values) == sorted(set(dataset.label_values))
    assert dataset.label_values[-1] <= MAX_LABEL_VALUE
    results = Path("/runs/one/validation")  # whose files are named after cases
    for name in names:
        assert Path(os.path.normpath(results / name)).is_relative_to(results)
    assert train and validation and not {*train} & {*validation}
    assert {*train, *validation} <= {*dataset.cases}


def test_a_large_data_set_is_read_in_seconds(tmp_path):
    entries = [
        {"image": f"imagesTr/{number}.nii.gz", "label": f"labelsTr/{number}.nii.gz"}
        for number in range(5_000)
    ]
    tree = {"modality": {"0": "CT"}, "labels": {"0": "background", "1": "a"}, "training": entries}
    began = time.process_time()
    write_json(tmp_path / "dataset.json", tree)
    fold = {"train": [str(number) for number in range(1, 5_000)], "val": ["0"]}
    write_json(tmp_path / "splits_final.json", [fold] * 20)
    train, validation = fold_cases(load_dataset(tmp_path), 0, 5, seed=0)
    assert (len(train), len(validation)) == (4_999, 1)
    assert time.process_time() - began < 10
