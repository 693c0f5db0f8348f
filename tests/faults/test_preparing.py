"""Several processes that prepare one data set at the same time, some of which are killed."""

import random
import signal
import time

import numpy as np
import pytest

from tests import warm
from tests.faults.amounts import seeds
from tests.faults.whole_files import assert_whole
from tests.images.samples import write_msd
from unet3d.config import DataSettings
from unet3d.datasets.dataset import load_dataset
from unet3d.preparation.preprocess import plan_preprocessing, prepare_cases

NUM_CASES = 6


def prepare(data, cache):
    """Prepare a data set, and return the arrays of its cases."""
    settings = DataSettings(cache=cache, spacing_mm=(0.8, 0.8, 0.8))
    dataset = load_dataset(data)
    plan, _ = plan_preprocessing(dataset, settings)
    cases = prepare_cases(dataset.cases, plan, cache, 0)
    return [(np.array(case.image()), np.array(case.label())) for case in cases]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return a data set, its prepared arrays, and how long preparing takes."""
    folder = tmp_path_factory.mktemp("alone")
    data = write_msd(folder / "data", num_cases=NUM_CASES, shape=(40, 40, 24), modality="CT")
    begun = time.monotonic()
    arrays = prepare(data, folder / "cache")
    return data, arrays, time.monotonic() - begun


@pytest.mark.parametrize("seed", seeds(share=4))
def test_processes_that_prepare_at_once_share_what_is_whole(seed, tmp_path, expected):
    data, arrays, seconds = expected
    choices, cache = random.Random(seed), tmp_path / "cache"
    processes = [warm.call(prepare, data, cache, cwd=tmp_path) for _ in range(3)]
    time.sleep(choices.uniform(0, seconds))
    victim = choices.choice(processes)
    victim.send_signal(choices.choice([signal.SIGKILL, signal.SIGTERM]))
    for process in processes:
        errors = process.communicate(timeout=60)[1]
        assert "damaged" not in errors, errors
        assert process is victim or process.returncode == 0, errors
    assert_whole(tmp_path)
    found = prepare(data, cache)
    for (image, label), (own_image, own_label) in zip(found, arrays, strict=True):
        assert np.array_equal(image, own_image) and np.array_equal(label, own_label)
    for kind, number in (("prepared", NUM_CASES), ("planned", 1)):
        names = [path.name for path in (cache / kind).iterdir()]
        assert len(names) == number and not any(name.startswith(".") for name in names)
