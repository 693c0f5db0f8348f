"""Which of nnU-Net's trainers use the network of the plans unchanged."""

import ast
import importlib.util
from pathlib import Path

import pytest

from unet3d.nnunet.reading import keeps_network


def test_trainers_that_only_train_are_told_from_others():
    usual = ["nnUNetTrainer", "nnUNetTrainer_4000epochs_NoMirroring", "nnUNet_Trainer_BS8"]
    usual += ["nnUNetTrainer_DASegOrd0_NoMirroring", "nnUNetTrainerNoDeepSupervision"]
    usual += ["nnUNetTrainerDiceCELoss_noSmooth", "nnUNetTrainerAdan1en3"]
    others = ["", "None", "Mine", "DA5", "nnUNetTrainerBN", "nnUNetTrainerGELU_250epochs"]
    others += ["MynnUNetTrainer", "nnUNet_Primus_M_Trainer", "nnUNetTrainer nnUNetTrainer"]
    assert [name for name in [*usual, *others] if keeps_network(name)] == usual


def test_every_trainer_of_nnunet_is_judged_by_whether_it_builds_a_network():
    found = importlib.util.find_spec("nnunetv2")
    if found is None or found.origin is None:
        pytest.skip("needs nnU-Net")
    trainers = Path(found.origin).parent / "training" / "nnUNetTrainer"
    classes = {
        node.name: node
        for file in trainers.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    assert len(classes) > 50

    def builds(name):
        if name == "nnUNetTrainer" or name not in classes:
            return False
        node = classes[name]
        own = any(getattr(part, "name", "") == "build_network_architecture" for part in node.body)
        return own or any(builds(base.id) for base in node.bases if isinstance(base, ast.Name))

    assert {name for name in classes if not keeps_network(name)} == set(filter(builds, classes))
