import copy
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from unet3d.config import ModelSettings
from unet3d.errors import DoesNotFitError, VolumeError
from unet3d.model import Encoder, Topology, UNet3d, plan_topology, run_blocks
from unet3d.model.layers import Head
from unet3d.model.unet import refuse_beyond_memory

VARIANTS = [
    {},
    {"encoder": "residual"},
    {"norm": "group", "deep_supervision": True},
    {"norm": "batch", "encoder": "residual", "deep_supervision": True},
    {"kernels": "anisotropic"},
    {"kernels": "anisotropic", "encoder": "residual", "norm": "group"},
]


def make_topology(num_levels=4, **options):
    given = {"deep_supervision": False, "base_channels": 4, **options}
    settings = ModelSettings(num_levels=num_levels, **given)
    return plan_topology(settings, (32, 32, 16), (1.0, 1.0, 2.5), 2, 3)


def make_image(num_samples=2, size=(16, 16, 8)):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_samples, 2, *size, generator=generator)


def in_blocks(network, kind="parameters"):
    return sorted(id(v) for block in network.blocks() for v in getattr(block.module, kind)())


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_network_is_its_blocks(variant):
    """Each parameter is in one block; blocks read earlier results only, and give the logits."""
    torch.manual_seed(0)
    model = UNet3d(make_topology(**variant))
    for kind in ("parameters", "buffers"):
        assert in_blocks(model, kind) == sorted(id(value) for value in getattr(model, kind)())
    known = {"image"}
    for block in model.blocks():
        assert block.name not in known
        assert set(block.inputs) <= known
        known.add(block.name)
    assert set(model.outputs()) <= known
    image = make_image()
    made = run_blocks(model.eval().blocks(), {"image": image}, model.outputs())
    assert torch.equal(model(image), made["head"])
    assert torch.equal(model.decoder(model.encoder(image))[0], made["head"])
    # Encoder and decoder share no parameters.
    for kind in ("modules", "parameters", "buffers"):
        encoder = {id(value) for value in getattr(model.encoder, kind)()}
        decoder = {id(value) for value in getattr(model.decoder, kind)()}
        assert encoder and decoder or kind == "buffers"
        assert not encoder & decoder
    assert not any(isinstance(module, Encoder) for module in model.decoder.modules())
    # The other half could be held by an attribute that is no module.
    assert not any(isinstance(value, nn.Module) for value in vars(model.decoder).values())


def test_the_plain_block_list_is_what_the_diagram_shows():
    blocks = {block.name: block.inputs for block in UNet3d(make_topology(2)).blocks()}
    assert list(blocks.items()) == [
        ("encoder.0.0", ("image",)),
        ("encoder.0.1", ("encoder.0.0",)),
        ("encoder.1.0", ("encoder.0.1",)),
        ("encoder.1.1", ("encoder.1.0",)),
        ("decoder.0.skip", ("encoder.0.1",)),
        ("decoder.0.0", ("encoder.1.1", "decoder.0.skip")),
        ("head", ("decoder.0.0",)),
    ]


def test_a_replica_that_shares_the_network_joins_its_own_modules():
    model = UNet3d(make_topology(2)).double()
    image = make_image().double()
    replica = copy.copy(model.decoder)  # nn.DataParallel makes replicas this way
    replica._modules = dict(copy.deepcopy(model.decoder)._modules)
    with torch.no_grad():
        for value in replica._modules["levels"]["0"]["up"].parameters():
            value.zero_()
    features = model.encoder(image)
    with_skip_only = replica(features)[0]
    assert not torch.equal(with_skip_only, model.decoder(features)[0])
    own = [id(value) for module in replica._modules.values() for value in module.parameters()]
    assert in_blocks(replica) == sorted(own)
    copied = copy.deepcopy(model)
    assert in_blocks(copied) == sorted(map(id, copied.parameters()))
    assert not {*in_blocks(copied)} & {*in_blocks(model)}


@pytest.mark.parametrize("encoder", ["plain", "residual"])
def test_a_module_that_takes_the_place_of_another_is_the_one_that_runs(encoder):
    model = UNet3d(make_topology(2, encoder=encoder)).eval()
    model.decoder.heads[0] = Head(model.topology.channels[0], 7)
    assert model(make_image()).shape == (2, 7, 16, 16, 8)
    assert in_blocks(model) == sorted(map(id, model.parameters()))


@pytest.mark.parametrize(("num_levels", "sizes"), [(2, [16]), (3, [16]), (4, [16, 8])])
def test_deep_supervision_has_heads_but_at_the_two_lowest_levels(num_levels, sizes):
    model = UNet3d(make_topology(num_levels, deep_supervision=True))
    image = make_image()
    logits = model(image)
    levels = logits if isinstance(logits, tuple) else (logits,)
    assert [level.shape[2] for level in levels] == sizes
    assert len(model.outputs()) == len(sizes)
    assert model.eval()(image).shape == (2, 3, 16, 16, 8)


def test_images_that_do_not_suit_are_refused_in_one_line():
    model = UNet3d(make_topology())
    for size, channels, message in [
        ((16, 15, 8), 2, "16x15x8 voxels does not divide by the network's strides 8x8x4"),
        ((16, 16, 6), 2, "16x16x6 voxels does not divide"),
        ((8, 8, 4), 2, "8x8x4 voxels is one voxel at the network's lowest level"),
        ((16, 16, 8), 1, "the image has 1 channel, but the network was built for 2"),
    ]:
        with pytest.raises(VolumeError, match=message) as caught:
            model(torch.zeros(1, channels, *size))
        assert "\n" not in str(caught.value)
    assert model(torch.randn(1, 2, 16, 8, 4)).isfinite().all()  # the smallest allowed image


WIDE = Topology(in_channels=1, num_classes=2, channels=(32, 64), strides=((1, 1, 1), (2, 2, 2)))


@pytest.mark.parametrize("slope", [0.01, 0.5])
def test_initialisation_keeps_the_variance_of_he(slope):
    torch.manual_seed(0)
    model = UNet3d(replace(WIDE, negative_slope=slope))
    assert not model.decoder.heads[0].bias.any()
    # Two convolutions that are added are initialised like one convolution over both inputs.
    level = model.decoder.levels["0"]
    for conv, inputs in (
        (model.encoder.levels[1][0].conv, 32),
        (level["skip"], 64),
        (level["units"][0].conv, 64),
    ):
        expected = (2 / (1 + slope**2) / (27 * inputs)) ** 0.5
        assert conv.weight.std().item() == pytest.approx(expected, rel=0.02)


def test_weights_beyond_the_memory_of_the_host_are_refused():
    with pytest.raises(DoesNotFitError, match=r"65536, 65536 channels takes [0-9.]+ TiB"):
        refuse_beyond_memory(replace(WIDE, channels=(65536, 65536)))
    refuse_beyond_memory(WIDE)


@pytest.mark.nightly
def test_a_network_without_memory_needs_no_compiler():
    """Random numbers on the meta device would import a compiler, which takes a second."""
    script = (
        "import sys, torch; from unet3d.model import Topology, UNet3d\n"
        "with torch.device('meta'):\n"
        "    UNet3d(Topology(in_channels=1, num_classes=2, channels=(4,), strides=((1, 1, 1),)))\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
