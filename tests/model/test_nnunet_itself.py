"""Logits of all heads against nnU-Net's own networks, where they are installed."""

import pytest
import torch

from tests.model.shapes import SHAPES, image_of, topology_of, without_plain_numbers
from tests.nnunet.models import their_network
from tests.products import pairwise
from unet3d.model import UNet3d
from unet3d.nnunet.axes import Axes
from unet3d.nnunet.weights import from_nnunet, of_plan

pytest.importorskip("dynamic_network_architectures")

TOLERANCE = 1e-10
OURS = Axes.of((2, 1, 0))
"""nnU-Net's axes, in the order that ours have here."""


@pairwise(
    shape=[name for name, (fields, _) in SHAPES.items() if "norm" not in fields],
    encoder=["plain", "residual"],
    has_bias=[False, True],
    deep_supervision=[False, True],
)
def test_logits_are_those_of_nnunet(shape, encoder, has_bias, deep_supervision):
    fields, size = SHAPES[shape]
    given = {"upsampling_bias": has_bias, "deep_supervision": deep_supervision}
    topology = topology_of(**{**fields, **given, "encoder": encoder})
    torch.manual_seed(1)
    theirs = their_network(topology, OURS)
    theirs.decoder.deep_supervision = deep_supervision
    without_plain_numbers(theirs)
    ours = UNet3d(topology)
    weights = of_plan(theirs.state_dict(), topology, OURS, "nnUNetTrainer")
    ours.load_state_dict(from_nnunet(weights, topology, OURS))
    image = image_of(size)
    with torch.no_grad():
        expected, actual = theirs.double()(image), ours.double()(image)
    expected = expected if isinstance(expected, list) else [expected]
    actual = actual if isinstance(actual, tuple) else (actual,)
    # nnU-Net has a head at the last level but one too, whose loss counts nothing.
    assert len(actual) == (max(len(expected) - 1, 1) if deep_supervision else 1)
    for own, wanted in zip(actual, expected, strict=False):
        assert (own - wanted).norm() <= TOLERANCE * wanted.norm()
