import copy
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from unet3d.config import ModelSettings
from unet3d.errors import DoesNotFitError, VolumeError
from unet3d.model import Decoder, Encoder, Topology, UNet3d, plan_topology, run_blocks
from unet3d.model.layers import Head
from unet3d.model.unet import refuse_beyond_memory

CUBE = (3, 3, 3)

VARIANTS = [
    {},
    {"encoder": "residual"},
    {"norm": "group", "deep_supervision": True},
    {"norm": "batch", "encoder": "residual", "deep_supervision": True},
    {"kernels": "anisotropic"},
    {"kernels": "anisotropic", "encoder": "residual", "norm": "group"},
]


def make_topology(num_levels: int = 4, **options: object) -> Topology:
    settings = ModelSettings(
        **{
            "deep_supervision": False,
            "base_channels": 4,
            "max_channels": 12,
            "num_levels": num_levels,
            **options,
        }
    )
    return plan_topology(settings, (32, 32, 16), (1.0, 1.0, 2.5), 2, 3)


def make_image(num_samples: int = 2, size: tuple[int, int, int] = (16, 16, 8)) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_samples, 2, *size, generator=generator)


@pytest.fixture(params=VARIANTS, ids=str)
def model(request: pytest.FixtureRequest) -> UNet3d:
    torch.manual_seed(0)
    return UNet3d(make_topology(**request.param))


def test_every_parameter_and_buffer_is_in_exactly_one_block(model: UNet3d) -> None:
    for kind in ("parameters", "buffers"):
        in_blocks = [id(v) for block in model.blocks() for v in getattr(block.module, kind)()]
        assert sorted(in_blocks) == sorted(id(value) for value in getattr(model, kind)())
        assert len(in_blocks) == len(set(in_blocks))


def test_block_names_are_unique_and_only_earlier_tensors_are_read(model: UNet3d) -> None:
    known = {"image"}
    for block in model.blocks():
        assert block.name not in known
        assert set(block.inputs) <= known
        known.add(block.name)
    assert set(model.outputs()) <= known


def test_forward_equals_running_the_blocks(model: UNet3d) -> None:
    model.eval()
    image = make_image()
    made = run_blocks(model.blocks(), {"image": image}, model.outputs())
    assert torch.equal(model(image), made["head"])


def test_logits_have_the_size_of_the_image_and_a_channel_per_class(model: UNet3d) -> None:
    logits = model.eval()(make_image(3, (32, 16, 8)))
    assert logits.shape == (3, 3, 32, 16, 8)


def test_every_parameter_learns_in_training(model: UNet3d) -> None:
    logits = model(make_image())
    levels = logits if isinstance(logits, tuple) else (logits,)
    sum(level.square().mean() for level in levels).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


def test_encoder_and_decoder_share_nothing(model: UNet3d) -> None:
    for kind in ("modules", "parameters", "buffers"):
        encoder = {id(value) for value in getattr(model.encoder, kind)()}
        decoder = {id(value) for value in getattr(model.decoder, kind)()}
        assert encoder and decoder or kind == "buffers"
        assert not encoder & decoder
    assert not any(isinstance(module, Encoder) for module in model.decoder.modules())
    # What is no registered module could still hold the other half.
    assert not any(isinstance(value, nn.Module) for value in vars(model.decoder).values())


def test_moving_the_decoder_leaves_the_encoder() -> None:
    model = UNet3d(make_topology())
    model.decoder.to("meta")
    assert {value.device.type for value in model.encoder.parameters()} == {"cpu"}
    model.encoder(make_image())


def test_encoder_and_decoder_run_alone() -> None:
    model = UNet3d(make_topology()).eval()
    image = make_image()
    features = model.encoder(image)
    assert [tuple(level.shape[1:]) for level in features] == [
        (4, 16, 16, 8),
        (8, 8, 8, 8),
        (12, 4, 4, 4),
        (12, 2, 2, 2),
    ]
    assert torch.equal(model.decoder(features)[0], model(image))


def test_the_plain_block_list_is_what_the_diagram_shows() -> None:
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


def test_a_replica_that_shares_the_network_joins_its_own_modules() -> None:
    model = UNet3d(make_topology(2)).double()
    image = make_image().double()
    replica = copy.copy(model.decoder)  # as nn.DataParallel makes them
    replica._modules = dict(copy.deepcopy(model.decoder)._modules)
    with torch.no_grad():
        for value in replica._modules["levels"]["0"]["up"].parameters():
            value.zero_()
    features = model.encoder(image)
    with_skip_only = replica(features)[0]
    assert not torch.equal(with_skip_only, model.decoder(features)[0])
    own = {id(value) for module in replica._modules.values() for value in module.parameters()}
    assert {id(v) for block in replica.blocks() for v in block.module.parameters()} == own


def test_joined_blocks_stay_those_of_their_network() -> None:
    model = UNet3d(make_topology(2))
    assert [a.module is b.module for a, b in zip(model.blocks(), model.blocks(), strict=True)] == [
        True
    ] * 7
    copied = copy.deepcopy(model)
    assert {id(v) for b in copied.blocks() for v in b.module.parameters()} == {
        id(v) for v in copied.parameters()
    }
    assert not {id(v) for v in copied.parameters()} & {id(v) for v in model.parameters()}


@pytest.mark.parametrize("encoder", ["plain", "residual"])
def test_a_module_that_takes_the_place_of_another_is_the_one_that_runs(encoder: str) -> None:
    model = UNet3d(make_topology(2, encoder=encoder)).eval()
    image = make_image()
    before = model(image)
    model.decoder.heads[0] = Head(model.topology.channels[0], 7)
    assert model(image).shape == (*before.shape[:1], 7, *before.shape[2:])
    assert {id(v) for block in model.blocks() for v in block.module.parameters()} == {
        id(value) for value in model.parameters()
    }
    assert all(a.module is b.module for a, b in zip(model.blocks(), model.blocks(), strict=True))


def test_the_residual_encoder_has_nnunets_units_and_one_decoder_convolution() -> None:
    names = [block.name for block in UNet3d(make_topology(encoder="residual")).blocks()]
    per_level = [sum(name.startswith(f"encoder.{i}.") for name in names) for i in range(4)]
    assert per_level == [1 + 1, 3, 4, 6]  # the stem, and nnU-Net's 1, 3, 4, 6
    assert names[-4:] == ["decoder.1.skip", "decoder.1.0", "decoder.0.skip", "head"]


def test_every_parameter_belongs_to_one_block_and_keeps_its_plain_name() -> None:
    model = UNet3d(make_topology(3, deep_supervision=True))
    owned = [value for block in model.blocks() for value in block.module.parameters()]
    assert len(owned) == len(set(owned)) and set(owned) == set(model.parameters())
    names = set(model.state_dict())
    assert {"decoder.levels.0.up.weight", "decoder.levels.0.units.0.conv.weight"} <= names
    assert {"decoder.levels.0.units.1.norm.bias", "decoder.heads.0.weight"} <= names


@pytest.mark.parametrize(("num_levels", "sizes"), [(2, [16]), (3, [16]), (4, [16, 8])])
def test_deep_supervision_has_heads_but_at_the_two_lowest_levels(
    num_levels: int, sizes: list[int]
) -> None:
    model = UNet3d(make_topology(num_levels, deep_supervision=True))
    image = make_image()
    logits = model(image)
    levels = logits if isinstance(logits, tuple) else (logits,)
    assert [level.shape[2] for level in levels] == sizes
    assert len(model.outputs()) == len(sizes)
    assert model.eval()(image).shape == (2, 3, 16, 16, 8)


def test_the_number_of_parameters_is_that_of_the_layers() -> None:
    def conv(i: int, o: int) -> int:
        return 27 * i * o + 2 * o  # weights; scale and shift of the norm

    encoder = conv(2, 4) + conv(4, 4) + conv(4, 8) + conv(8, 8)
    up = 2 * 2 * 8 * 4  # the stride is (2, 2, 1)
    decoder = up + conv(8, 4) + conv(4, 4) + (4 * 3 + 3)
    model = UNet3d(make_topology(2))
    assert sum(value.numel() for value in model.parameters()) == encoder + decoder


@pytest.mark.parametrize(
    ("size", "channels", "message"),
    [
        ((16, 15, 8), 2, "16x15x8 voxels does not divide by the network's strides 8x8x4"),
        ((16, 16, 6), 2, "16x16x6 voxels does not divide"),
        ((8, 8, 4), 2, "8x8x4 voxels is one voxel at the network's lowest level"),
        ((16, 16, 8), 1, "the image has 1 channels but the network was built for 2"),
    ],
)
def test_images_that_do_not_suit_are_refused_in_one_line(
    size: tuple[int, int, int], channels: int, message: str
) -> None:
    model = UNet3d(make_topology())
    with pytest.raises(VolumeError, match=message) as caught:
        model(torch.zeros(1, channels, *size))
    assert "\n" not in str(caught.value)


def test_the_smallest_image_that_is_taken_runs() -> None:
    model = UNet3d(make_topology())
    assert model(torch.randn(1, 2, 16, 8, 4)).isfinite().all()


def test_initialisation_keeps_the_variance_of_he() -> None:
    torch.manual_seed(0)
    model = UNet3d(
        Topology(in_channels=1, num_classes=2, channels=(32, 64), strides=((1, 1, 1), (2, 2, 2)))
    )
    weight = model.encoder.levels[1][0].conv.weight
    expected = (2 / (1 + 0.01**2) / (27 * 32)) ** 0.5
    assert weight.std().item() == pytest.approx(expected, rel=0.02)
    assert not model.decoder.heads[0].bias.any()
    # Two convolutions that are added start as the one over both inputs would.
    expected = (2 / (1 + 0.01**2) / (27 * 64)) ** 0.5
    for conv in (model.decoder.levels["0"]["skip"], model.decoder.levels["0"]["units"][0].conv):
        assert conv.weight.std().item() == pytest.approx(expected, rel=0.02)


def test_the_decoder_names_its_skips_and_nothing_more() -> None:
    topology = make_topology(2)
    decoder = Decoder(topology, ("x", "y"))
    read = {name for block in decoder.blocks() for name in block.inputs}
    made = {block.name for block in decoder.blocks()}
    assert read - made == {"x", "y"}


def test_weights_beyond_the_memory_of_the_host_are_refused() -> None:
    wide = Topology(
        in_channels=1, num_classes=2, channels=(65536, 65536), strides=((1, 1, 1), (2, 2, 2))
    )
    with pytest.raises(DoesNotFitError, match=r"65536, 65536 channels takes [0-9.]+ TiB"):
        refuse_beyond_memory(wide)
    refuse_beyond_memory(replace(wide, channels=(2, 4)))


def test_a_network_without_memory_needs_no_compiler() -> None:
    """Random numbers on meta would import it, which takes a second of every command."""
    script = (
        "import sys, torch; from unet3d.model import Topology, UNet3d\n"
        "with torch.device('meta'):\n"
        "    UNet3d(Topology(in_channels=1, num_classes=2, channels=(4,), strides=((1, 1, 1),)))\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


ACROSS = {
    "X": (((1, 1, 1), (1, 2, 2), (1, 2, 2), (2, 2, 2)), ((1, 3, 3), (1, 3, 3), CUBE, CUBE)),
    "Y": (((1, 1, 1), (2, 1, 2), (2, 2, 2)), ((3, 1, 3), CUBE, CUBE)),
    "Z": (((1, 1, 1), (2, 2, 1), (2, 2, 2)), ((3, 3, 1), (3, 3, 1), CUBE)),
    "X and Z": (((1, 1, 1), (1, 2, 1), (2, 2, 2)), ((1, 3, 1), CUBE, CUBE)),
}
"""Strides and kernels of networks for thick slices across each axis."""


@pytest.mark.parametrize("encoder", ["plain", "residual"])
@pytest.mark.parametrize("axis", ACROSS)
def test_flat_kernels_are_cubes_with_zeros_across(axis: str, encoder: str) -> None:
    strides, kernels = ACROSS[axis]
    topology = Topology(
        in_channels=2,
        num_classes=3,
        channels=(4, 8, 12, 12)[: len(strides)],
        strides=strides,
        kernels=kernels,
        encoder=encoder,
        deep_supervision=True,
    )
    torch.manual_seed(0)
    flat, cubes = UNet3d(topology).double(), UNet3d(replace(topology, kernels=())).double()
    inside = {}
    with torch.no_grad():
        for (name, own), other in zip(flat.named_parameters(), cubes.parameters(), strict=True):
            inside[name] = tuple(
                slice(1, 2) if few < many else slice(None)
                for few, many in zip(own.shape, other.shape, strict=True)
            )
            other.zero_()[inside[name]] = own
    assert sum(p.numel() for p in flat.parameters()) < sum(p.numel() for p in cubes.parameters())
    image = make_image(2, (16, 16, 16)).double()
    for logits, expected in zip(flat(image), cubes(image), strict=True):
        torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    for network in (flat, cubes):
        sum(level.square().mean() for level in network(image)).backward()
    gradients = dict(cubes.named_parameters())
    for name, parameter in flat.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[name].grad[inside[name]], rtol=1e-9, atol=1e-12
        )
