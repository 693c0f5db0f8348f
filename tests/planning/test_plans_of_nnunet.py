"""Our plans compared with nnU-Net's plans for the same data.

nnU-Net's plans are in ``benchmarks/results/plans-2026-11-23.json``: ``benchmarks/plans.py`` had
``ExperimentPlanner`` of nnunetv2 2.8.1 compute them (3d_fullres, 8 GB) from the medians that the
file also has. nnU-Net's papers name the same patches for most of these data sets (arXiv 1809.10486
and 1904.08128).
"""

import json
import math
import re
from pathlib import Path

import pytest

from unet3d.config import load_config
from unet3d.planning.network_plan import NetworkPlan, plan_fingerprint
from unet3d.preparation.preprocess import Fingerprint

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "plans-2026-11-23.json"
DATA_SETS = json.loads(RECORD.read_text())["data_sets"]


def planned(name: str, *changes: str) -> NetworkPlan:
    data = DATA_SETS[name]
    shape = tuple(data["shape"])
    fingerprint = Fingerprint(
        spacing_mm=tuple(data["spacing_mm"]),
        shape=shape,
        shapes=frozenset([shape]),
        num_cases=data["num_cases"],
    )
    return plan_fingerprint(
        load_config(None, changes), fingerprint, data["num_channels"], data["num_classes"]
    )


@pytest.mark.nightly
@pytest.mark.parametrize("name", DATA_SETS)
def test_a_plan_takes_the_memory_that_there_is_in_the_shape_that_nnunet_gives_it(name):
    data, network = DATA_SETS[name], planned(name)
    theirs, batch_size = data["nnunet"]["patch_size"], data["nnunet"]["batch_size"]
    assert float(re.search(r"predicted memory: ([\d.]+) of 10 GiB", network.limits)[1]) <= 10
    strides = network.topology.total_stride
    assert all(n % stride == 0 for n, stride in zip(network.size, strides, strict=True))
    # At least as large along each axis, so everything that nnU-Net sees is visible.
    assert all(n >= other for n, other in zip(network.size, theirs, strict=True))
    assert network.batch_size >= 2
    assert network.batch_size * math.prod(network.size) >= batch_size * math.prod(theirs)
    # The same proportions, to a step of the strides.
    growth = [n / other for n, other in zip(network.size, theirs, strict=True)]
    mean = math.prod(growth) ** (1 / 3)
    assert all(abs(math.log2(one / mean)) < 0.3 for one in growth), growth
    # At most 5 % of the voxels of the data set, or two patches.
    voxels = data["num_cases"] * math.prod(data["shape"])
    share = round(0.05 * voxels / math.prod(network.size))
    assert network.batch_size <= max(2, share)


def test_where_the_median_volume_fits_the_choice_is_nnunets():
    theirs, network = DATA_SETS["Hippocampus"]["nnunet"], planned("Hippocampus")
    assert list(network.size) == theirs["patch_size"] == [40, 56, 40]
    assert network.batch_size == theirs["batch_size"] == 9
    assert network.topology.num_levels == theirs["num_levels"] == 4
