import pytest

from tests.steps import predicted
from unet3d.planning import memory_estimate, network_plan, out_of_memory, placements, step_size


@pytest.fixture
def launched(monkeypatch):
    """Launch every step: predictions without captured steps take half the time."""
    monkeypatch.setenv("UNET3D_CUDA_GRAPHS", "0")


@pytest.fixture(autouse=True)
def predicts_once(monkeypatch):
    """Predict the memory of each step only once in this process, however many tests plan it.

    The accuracy of predictions is tested in test_memory_estimate.py, which predicts anew.
    """
    for module in (memory_estimate, network_plan, out_of_memory, placements, step_size):
        monkeypatch.setattr(module, "predict_memory", predicted)
