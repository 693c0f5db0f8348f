"""Which units leave normalisation to their reader, and which skips are fused."""

import pytest
import torch

from tests.plain_network import make_batch, make_network, make_topology
from unet3d.kernels.conv.hopper import api
from unet3d.model import (
    Block,
    UNet3d,
    adding_skips,
    deferring,
    layers,
    run_blocks,
    sequential_blocks,
)
from unet3d.model.layers import Convolution, ConvUnit

ENCODER = ["encoder.0.0", "encoder.1.0", "encoder.2.0"]
THREE = {"units": (3, 3, 2), "decoder_units": (3, 1)}


def names_of(topology, start=0, stop=None, outputs=("head",)):
    """Return the names of the units in some blocks that learn of their reader."""
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
        # Residual units fuse within themselves.
        ({"encoder": "residual"}, []),
        # Flat convolutions cannot normalise.
        ({"kernels": "anisotropic"}, ["encoder.1.0", "encoder.2.0", "decoder.1.0"]),
    ],
)
def test_units_with_one_reader_that_is_a_plain_convolution(options, expected):
    topology = make_topology(**options)
    if options is THREE:
        expected = [*expected, "decoder.0.0", "decoder.0.1"]
    assert names_of(topology) == expected


def test_no_unit_that_others_read():
    """Such as at a cut, because its blocks do not run together, or with a head at each level."""
    topology = make_topology()
    assert names_of(topology, stop=3, outputs=["encoder.0.1", "encoder.1.0"]) == ["encoder.0.0"]
    assert names_of(topology, start=1) == [*ENCODER[1:], "decoder.1.0", "decoder.0.0"]
    assert "encoder.0.0" not in names_of(topology, outputs=["encoder.0.0", "head"])


def test_modules_of_others_stay_as_they_are():
    blocks = sequential_blocks(torch.nn.Sequential(torch.nn.Conv3d(1, 1, 3), torch.nn.ReLU()))
    assert deferring(blocks, [blocks[-1].name]) == blocks


@pytest.mark.parametrize("encoder", ["plain", "residual"])
def test_a_hook_gets_what_is_normalised(encoder, monkeypatch):
    """Such as a hook that keeps features; then nothing is deferred."""
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
    """Hooks of the reader, of a residual unit's second convolution, and of the normalisation."""
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


@pytest.fixture
def by_hand(monkeypatch):
    monkeypatch.setattr(layers, "CHANNELS_BY_HAND", (4, 8))


def joined(topology, start=0, stop=None, outputs=("head",)):
    """Return the blocks that were fused with a skip, with their new inputs."""
    blocks = UNet3d(topology).blocks()[start:stop]
    made = adding_skips(blocks, outputs)
    before = {block.name: block for block in blocks}
    assert [b.name for b in blocks if not b.name.endswith("skip")] == [
        b.name for b in made if not b.name.endswith("skip")
    ]
    for block in made:
        own = {name for name, _ in block.module.named_parameters()}
        assert len(own) >= len(dict(before[block.name].module.named_parameters()))
    return {b.name: b.inputs for b in made if b.inputs != before[b.name].inputs}


def test_skips_that_can_be_added_in_passing(by_hand):
    assert joined(make_topology()) == {
        "decoder.1.0": ("encoder.2.1", "encoder.1.1"),
        "decoder.0.0": ("decoder.1.1", "encoder.0.1"),
    }
    shallow = make_topology(units=(1, 1, 1), decoder_units=(1, 1))
    assert joined(shallow)["head"] == ("decoder.1.0", "encoder.0.0")
    assert joined(make_topology(kernels="anisotropic")) == {
        "decoder.1.0": ("encoder.2.1", "encoder.1.1")
    }


def test_no_skip_that_another_block_reads(by_hand):
    blocks = UNet3d(make_topology()).blocks()
    more = Block(name="more", module=torch.nn.ReLU(), inputs=("decoder.0.skip",))
    made = adding_skips((*blocks, more), ("head", "more"))
    assert "decoder.0.skip" in [block.name for block in made]
    assert "decoder.1.skip" not in [block.name for block in made]


def test_no_skip_of_other_channels_or_places(by_hand, monkeypatch):
    blocks = [block.name for block in UNet3d(make_topology()).blocks()]
    start = blocks.index("decoder.1.skip")
    assert len(joined(make_topology(), start)) == 2
    assert len(joined(make_topology(), start + 1)) == 1  # the skip of level 1 is computed elsewhere
    # The skip is also an output.
    assert list(joined(make_topology(), outputs=("head", "decoder.0.skip"))) == ["decoder.1.0"]
    monkeypatch.setattr(layers, "CHANNELS_BY_HAND", (8,))
    assert list(joined(make_topology())) == ["decoder.1.0"]


def test_a_hook_of_a_skip_is_called(by_hand, monkeypatch):
    monkeypatch.setattr(api, "suits", lambda x, inputs, outputs: True)
    network, (image, _) = make_network(make_topology()), make_batch(1)
    seen = []
    for module in network.modules():
        if type(module) is Convolution:
            module.register_forward_hook(lambda module, given, made: seen.append(made))
    made = []
    for blocks in (network.blocks(), adding_skips(network.blocks(), network.outputs())):
        with torch.no_grad():
            made.append((*run_blocks(blocks, {"image": image}, ["head"]).values(), *seen))
        seen.clear()
    assert len(made[0]) == len(made[1]) > 2
    torch.testing.assert_close(*made, rtol=1e-11, atol=1e-11)
