"""Which units leave their normalisation to the convolution that reads them."""

import pytest
import torch

from tests.plain_network import make_batch, make_network, make_topology
from unet3d.kernels.conv.hopper import api
from unet3d.model import UNet3d, deferring, sequential_blocks
from unet3d.model.layers import ConvUnit

ENCODER = ["encoder.0.0", "encoder.1.0", "encoder.2.0"]
THREE = {"units": (3, 3, 2), "decoder_units": (3, 1)}


def names_of(topology, start=0, stop=None, outputs=("head",)):
    """Return the units, of some blocks, that are told of their reader."""
    blocks = UNet3d(topology).blocks()[start:stop]
    told = deferring(blocks, outputs)
    assert [block.name for block in told] == [block.name for block in blocks]
    pairs = zip(blocks, told, strict=True)
    return [new.name for old, new in pairs if new.module is not old.module]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [*ENCODER, "decoder.1.0", "decoder.0.0"]),
        (THREE, ["encoder.0.0", "encoder.0.1", "encoder.1.0", "encoder.1.1", "encoder.2.0"]),
        # Residual units do it within.
        ({"encoder": "residual"}, []),
        # What is flat normalises nothing.
        ({"kernels": "anisotropic"}, ["encoder.1.0", "encoder.2.0", "decoder.1.0"]),
    ],
)
def test_units_with_one_reader_that_is_a_plain_convolution(options, expected):
    topology = make_topology(**options)
    if options is THREE:
        expected = [*expected, "decoder.0.0", "decoder.0.1"]
    assert names_of(topology) == expected


def test_not_what_others_read():
    """As at a cut, whose blocks do not run together, or with a head at each level."""
    topology = make_topology()
    assert names_of(topology, stop=3, outputs=["encoder.0.1", "encoder.1.0"]) == ["encoder.0.0"]
    assert names_of(topology, start=1) == [*ENCODER[1:], "decoder.1.0", "decoder.0.0"]
    assert "encoder.0.0" not in names_of(topology, outputs=["encoder.0.0", "head"])


def test_modules_of_others_stay_as_they_are():
    blocks = sequential_blocks(torch.nn.Sequential(torch.nn.Conv3d(1, 1, 3), torch.nn.ReLU()))
    assert deferring(blocks, [blocks[-1].name]) == blocks


@pytest.mark.parametrize("encoder", ["plain", "residual"])
def test_a_hook_gets_what_is_normalised(encoder, monkeypatch):
    """As one that keeps features does; nothing is deferred then."""
    network = make_network(make_topology(encoder=encoder)).eval()
    image, _ = make_batch(1)
    seen = []
    for module in network.modules():
        if isinstance(module, ConvUnit):
            module.register_forward_hook(lambda module, given, made: seen.append(made))
    with torch.no_grad():
        network(image)
        expected = [made.clone() for made in seen]
        monkeypatch.setattr(api, "suits", lambda x, inputs, outputs: True)
        seen.clear()
        network(image)
    assert len(seen) > 3
    torch.testing.assert_close(seen, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("encoder.levels.1.1", {}),
        ("encoder.levels.1.1.conv", {"encoder": "residual"}),
        ("decoder.levels.0.units.0.norm", {}),
    ],
)
def test_hooks_of_what_is_beside_get_it_too(name, options, monkeypatch):
    """Of the reader, of a residual unit's second convolution, of the normalisation itself."""
    network = make_network(make_topology(**options)).eval()
    image, _ = make_batch(1)
    module, seen = network.get_submodule(name), []
    if name.endswith("norm"):
        module.register_forward_hook(lambda module, given, made: seen.append(made.clone()))
    else:
        module.register_forward_pre_hook(lambda module, given: seen.append(given[0].clone()))
    with torch.no_grad():
        network(image)
        monkeypatch.setattr(api, "suits", lambda x, inputs, outputs: True)
        network(image)
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-11, atol=1e-11)
