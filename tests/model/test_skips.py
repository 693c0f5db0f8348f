"""Which convolutions of skips join the blocks that add them."""

import pytest
import torch

from tests.plain_network import make_batch, make_network, make_topology
from unet3d.kernels.conv.hopper import api
from unet3d.model import Block, UNet3d, adding_skips, layers, run_blocks
from unet3d.model.layers import Convolution


@pytest.fixture(autouse=True)
def channels(monkeypatch):
    monkeypatch.setattr(layers, "CHANNELS_BY_HAND", (4, 8))


def joined(topology, start=0, stop=None, outputs=("head",)):
    """Return the blocks that have become one with a skip, and what each then reads."""
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


def test_those_that_can_be_added_in_passing():
    assert joined(make_topology()) == {
        "decoder.1.0": ("encoder.2.1", "encoder.1.1"),
        "decoder.0.0": ("decoder.1.1", "encoder.0.1"),
    }
    shallow = make_topology(units=(1, 1, 1), decoder_units=(1, 1))
    assert joined(shallow)["head"] == ("decoder.1.0", "encoder.0.0")
    assert joined(make_topology(kernels="anisotropic")) == {
        "decoder.1.0": ("encoder.2.1", "encoder.1.1")
    }


def test_not_those_that_another_block_reads():
    blocks = UNet3d(make_topology()).blocks()
    more = Block(name="more", module=torch.nn.ReLU(), inputs=("decoder.0.skip",))
    made = adding_skips((*blocks, more), ("head", "more"))
    assert "decoder.0.skip" in [block.name for block in made]
    assert "decoder.1.skip" not in [block.name for block in made]


def test_not_those_of_other_channels_or_places(monkeypatch):
    blocks = [block.name for block in UNet3d(make_topology()).blocks()]
    start = blocks.index("decoder.1.skip")
    assert len(joined(make_topology(), start)) == 2
    assert len(joined(make_topology(), start + 1)) == 1  # the skip of level 1 is made elsewhere
    # Another place reads it.
    assert list(joined(make_topology(), outputs=("head", "decoder.0.skip"))) == ["decoder.1.0"]
    monkeypatch.setattr(layers, "CHANNELS_BY_HAND", (8,))
    assert list(joined(make_topology())) == ["decoder.1.0"]


def test_a_hook_of_a_skip_is_called(monkeypatch):
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
