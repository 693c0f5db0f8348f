import pytest

from unet3d.parallel import precision


@pytest.fixture
def float32(monkeypatch):
    """Compute in float32, as nnU-Net does on a CPU, even if this CPU has bfloat16."""
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: False)
