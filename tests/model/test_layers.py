"""Properties of units and norms that :mod:`tests.model.test_networks_of_nnunet` cannot show."""

import pytest
import torch
from torch import nn

from unet3d.model.layers import ConvUnit, ResidualUnit
from unet3d.model.norms import make_norm
from unet3d.model.topology import Topology


def topology_with(norm, channels):
    return Topology(
        in_channels=3, num_classes=2, channels=(channels,), strides=((1, 1, 1),), norm=norm
    )


@pytest.mark.parametrize(("unit", "kind"), [(ConvUnit, "group"), (ResidualUnit, "instance")])
def test_an_input_is_not_changed_by_the_in_place_activation(unit, kind):
    x = torch.randn(2, 3, 6, 4, 8)
    before = x.clone()
    unit(topology_with(kind, 3), 0, 3)(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize(("channels", "num_groups"), [(32, 8), (12, 4), (6, 2), (5, 1)])
def test_group_norm_takes_groups_that_divide(channels, num_groups):
    norm, _ = make_norm(topology_with("group", channels), channels, activated=True)
    assert isinstance(norm, nn.GroupNorm)
    assert norm.num_groups == num_groups
