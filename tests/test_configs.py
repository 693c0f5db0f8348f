from pathlib import Path

import pytest
import yaml

from unet3d.config import Config, load_config
from unet3d.model import plan_topology

FOLDER = Path(__file__).parent.parent / "configs"
FILES = sorted(FOLDER.glob("*.yaml"))


def keys(tree, prefix=""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def test_the_promised_configurations_exist():
    promised = {"quickstart", "hippocampus", "hippocampus-cpu", "whole-volume-2gpu", "large-ct"}
    promised |= {"em-membranes"}
    assert promised <= {file.stem for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_its_sections_differ_from_the_defaults_its_patch_suits_and_it_says_how_to_run_it(file):
    first, second = file.read_text().splitlines()[:2]
    assert first.startswith("# ") and second.startswith("#   unet3d train ")
    assert f"--config configs/{file.name}" in second
    config = load_config(file)
    given = yaml.safe_load(file.read_text())
    resolved, defaults = (dict(keys(c.model_dump(mode="json"))) for c in (config, Config()))
    assert {key: resolved[key] for key, _ in keys(given)} == dict(keys(given))
    for section, values in given.items():
        names = [key for key, _ in keys(values, f"{section}.")]
        assert any(resolved[name] != defaults[name] for name in names), section
    size = config.patches.size
    if isinstance(size, str):
        size = (256, 256, 256)  # a volume for such a network
    topology = plan_topology(config.model, size, (1.0, 1.0, 1.0), 1, 2)
    assert all(n % step == 0 for n, step in zip(size, topology.total_stride, strict=True))
