"""Why checkpoints are refused."""

import time
from pathlib import Path

import pytest

from unet3d.errors import CheckpointError
from unet3d.inputs.plain_data import is_printable
from unet3d.runs.checkpoint import load_checkpoint

MAX_SECONDS = 5
"""Of a processor, so that what else the machine does is no matter."""


def refusal(path: Path) -> str:
    """Return why a file is refused: one short printable line that names it, soon."""
    began = time.thread_time()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert time.thread_time() - began < MAX_SECONDS
    assert str(path) in str(caught.value)
    message = str(caught.value).replace(str(path), "")
    assert is_printable(message), repr(message)
    assert len(message) < 900, message
    return message
