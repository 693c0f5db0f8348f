"""Shapes of nnU-Net's networks, and networks and images with these shapes."""

import torch

from unet3d.inputs.plain_data import validated
from unet3d.model import Topology

ONE, HALF, FLAT, THIN, CUBE = (1, 1, 1), (2, 2, 2), (1, 3, 3), (3, 3, 1), (3, 3, 3)

SHAPES = {
    # fields of the topology, and the size of the image
    "one unit": ({"units": (1, 1, 1), "decoder_units": (1, 1)}, (8, 12, 8)),
    "no bias": ({"upsampling_bias": False}, (8, 12, 8)),
    "units": ({"units": (3, 1, 2), "decoder_units": (3, 1), "upsampling_bias": False}, (8, 12, 8)),
    "eps and slope": ({"norm_eps": 0.03, "negative_slope": 0.2}, (8, 8, 8)),
    "ReLU": ({"negative_slope": 0.0}, (8, 8, 8)),
    "no activation": ({"negative_slope": 1.0}, (8, 8, 8)),
    "group": ({"norm": "group", "norm_eps": 0.03, "negative_slope": 0.2}, (8, 8, 8)),
    "batch": ({"norm": "batch", "norm_eps": 0.03, "negative_slope": 0.2}, (8, 8, 8)),
    "one voxel below": ({}, (4, 8, 4)),
    "flat": ({"strides": (ONE, (1, 2, 2), HALF), "kernels": (FLAT, FLAT, CUBE)}, (2, 8, 12)),
    "flat Y": ({"strides": (ONE, (2, 1, 2), HALF), "kernels": ((3, 1, 3), CUBE, CUBE)}, (4, 4, 8)),
    "flat Z": ({"strides": (ONE, (2, 2, 1), HALF), "kernels": (THIN, THIN, CUBE)}, (8, 4, 2)),
    "points": ({"strides": (ONE, (1, 1, 2), HALF), "kernels": (ONE, (1, 1, 3), CUBE)}, (4, 2, 8)),
    "one plane": ({"strides": (ONE, (1, 2, 2), (1, 2, 2))}, (1, 8, 12)),
    "a stride of 3": ({"strides": (ONE, (3, 1, 3), (1, 3, 2))}, (6, 6, 12)),
    "a stride of 4": ({"strides": (ONE, (4, 1, 2), HALF)}, (16, 4, 4)),
    "no stride": ({"strides": (ONE, ONE, HALF)}, (4, 6, 4)),
    "as wide below": ({"channels": (4, 4, 4)}, (8, 8, 8)),
    "two levels": ({"channels": (4, 6), "strides": (ONE, HALF)}, (4, 6, 8)),
    "six levels": (
        {"channels": (4, 4, 4, 8, 8, 8), "strides": (ONE, HALF, HALF, (1, 2, 1), (1, 1, 2), ONE)},
        (4, 8, 16),
    ),
}


def topology_of(**fields):
    """Return a topology of three levels, with a bias where it is known."""
    given = {"in_channels": 2, "num_classes": 3, "channels": (4, 6, 8), "deep_supervision": True}
    has_bias = fields.get("norm", "instance") == "instance"
    given |= {"strides": (ONE, HALF, HALF), "upsampling_bias": has_bias}
    return validated(Topology, given | fields)


def without_plain_numbers(network):
    """Change a network so that none of its parameters is 0 or 1."""
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)


def image_of(size):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, 2, *size, generator=generator, dtype=torch.float64) + 1
