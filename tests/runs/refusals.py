"""Reasons for refusing checkpoints, and a training step for accepted ones."""

import time

import pytest

from unet3d.errors import CheckpointError
from unet3d.inputs.plain_data import is_printable
from unet3d.model.optimizer import Optimization
from unet3d.runs.checkpoint import load_checkpoint

MAX_SECONDS = 5
"""Limit in seconds of processor time, which does not depend on the machine's other work."""


def stepped(model, settings, precision="float32", training=None):
    """Return a network's optimizer after a step: its first one, or the one after ``training``."""
    optimization = Optimization(model, settings, precision)
    if training:
        optimization.load_state_dict(training)
    for value in model.parameters():
        value.grad = value.detach().clone()
    optimization.step(0.01)
    return optimization


def refusal(path):
    """Return a refusal, after checking: one short printable line with the file's name, soon."""
    began = time.thread_time()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert time.thread_time() - began < MAX_SECONDS
    assert str(path) in str(caught.value)
    message = str(caught.value).replace(str(path), "")
    assert is_printable(message), repr(message)
    assert len(message) < 900, message
    return message
