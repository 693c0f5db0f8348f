import json
import shutil
from dataclasses import asdict

import pytest

from tests.images.samples import write_msd
from unet3d.datasets.dataset import load_dataset
from unet3d.inputs.plain_data import validated
from unet3d.preparation.cache import Cache
from unet3d.runs.case_split import CaseSplit


def split(training, validation):
    parts = [
        {name: 32 * digit[0] for name, digit in part.items()} for part in (training, validation)
    ]
    return CaseSplit(training=parts[0], validation=parts[1])


BEFORE = split({"a": "1", "b": "2", "c": "3"}, {"d": "4"})


def test_the_digest_of_a_case_is_that_of_its_contents(tmp_path):
    root = write_msd(tmp_path / "data", num_cases=3)
    cases = load_dataset(root).cases
    made = CaseSplit.of(cases[:2], cases[2:], Cache(tmp_path / "cache"))
    assert list(made.training) == ["case_0", "case_1"] and list(made.validation) == ["case_2"]
    assert len({*made.training.values(), *made.validation.values()}) == 3
    shutil.copytree(root, tmp_path / "elsewhere")
    cases = load_dataset(tmp_path / "elsewhere").cases
    again = CaseSplit.of(cases[:2], cases[2:], Cache(tmp_path / "other cache"))
    assert again == made and again.fingerprint == made.fingerprint
    label = tmp_path / "elsewhere/labelsTr/case_1.nii.gz"
    shutil.copy(tmp_path / "elsewhere/labelsTr/case_0.nii.gz", label)
    other = CaseSplit.of(cases[:2], cases[2:], Cache(tmp_path / "third cache"))
    assert other.changes_since(made) == ["1 case with changed contents (case_1)"]
    assert other.fingerprint != made.fingerprint


def test_it_can_be_written_and_read():
    plain = json.loads(json.dumps(asdict(BEFORE)))
    assert validated(CaseSplit, plain) == validated(CaseSplit, {**plain, "fold": 3}) == BEFORE
    wrong = [None, [], {}, {"training": {}}, {"training": [], "validation": {}}]
    wrong += [{"training": {"a": 1}, "validation": {}}, {"training": {}, "validation": {1: "a"}}]
    for tree in wrong:
        with pytest.raises(ValueError, match="must be a mapping|training|validation"):
            validated(CaseSplit, tree)


@pytest.mark.parametrize(
    ("now", "changes"),
    [
        (split({"c": "3", "a": "1", "b": "2"}, {"d": "4"}), []),  # another order is no change
        (split({"a": "1", "b": "2"}, {"d": "4"}), ["1 case missing now (c)"]),
        (split({**BEFORE.training, "e": "5"}, {"d": "4"}), ["1 case new in training (e)"]),
        (
            split(dict(BEFORE.training), {"d": "4", "e": "5"}),
            ["1 case new in validation (e)"],
        ),
        (
            split({"a": "1", "b": "2", "d": "4"}, {"c": "3"}),
            [
                "1 case in training before, in validation now (c)",
                "1 case in validation before, in training now (d)",
            ],
        ),
        (
            split({"a": "2", "b": "1", "c": "4"}, {"d": "3"}),
            ["4 cases with changed contents (a, b, c and 1 more)"],
        ),
    ],
)
def test_every_change_is_named(now, changes):
    assert now.changes_since(BEFORE) == changes


def test_copies_of_training_cases_in_validation_are_found():
    """Their Dice says nothing about cases that the network has not seen."""
    assert BEFORE.twins == []
    assert split({"a": "1", "b": "2"}, {"c": "3", "d": "2"}).twins == ["d"]
