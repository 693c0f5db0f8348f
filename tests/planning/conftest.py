import pytest

from tests.steps import predicted
from unet3d.planning import memory_estimate, network_plan, out_of_memory, placements, step_size


@pytest.fixture
def launched(monkeypatch):
    """Launch every step: where none is captured, a prediction takes half the time."""
    monkeypatch.setenv("UNET3D_CUDA_GRAPHS", "0")


@pytest.fixture(autouse=True)
def predicts_once(monkeypatch):
    """Predict the memory of a step once in this process, however many tests plan with it.

    What a prediction is worth is tested in test_memory_estimate.py, which predicts itself.
    """
    for module in (memory_estimate, network_plan, out_of_memory, placements, step_size):
        monkeypatch.setattr(module, "predict_memory", predicted)
