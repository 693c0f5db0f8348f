"""Every parallel mode gives the plain network's loss and gradients."""

import pytest
import torch

from tests.plain_network import (
    BATCH_DICE,
    NESTED,
    PER_SAMPLE,
    TOLERANCE,
    TRAINED_ELSEWHERE,
    assert_close,
    check_step,
    gradients_of,
    make_batch,
    make_network,
    make_topology,
    plain_gradients,
    plain_logits,
)
from tests.products import each_value
from unet3d.config import ModelSettings
from unet3d.kernels import recompute as remake
from unet3d.kernels.conv.hopper import api, op
from unet3d.model import (
    SegmentationLoss,
    UNet3d,
    adding_skips,
    dice_cross_entropy,
    layers,
    plan_topology,
)
from unet3d.parallel import Layout, parallelize, step

RESIDUAL = {"encoder": "residual", "deep_supervision": True}
FLAT = {"kernels": "anisotropic"}
NETWORKS: list[dict[str, object]] = [{}, RESIDUAL, {"norm": "group"}, FLAT, TRAINED_ELSEWHERE]


@each_value(
    options=NETWORKS,
    stages=[(1, None), (2, None), (3, None), (2, (9,)), (4, (1, 5, 7))],
    batch=[(1, 1), (3, 2), (5, 3), (5, 5)],
    loss_fn=[PER_SAMPLE, BATCH_DICE],
)
def test_spreading_is_transparent(options, stages, batch, loss_fn):
    topology = make_topology(**options)
    (num_devices, cuts), (num_samples, num_micro_batches) = stages, batch
    layout = {"num_devices": num_devices, "cuts": cuts, "num_micro_batches": num_micro_batches}
    executor = check_step(topology, num_samples, loss_fn, **layout)
    image, _ = make_batch(num_samples)
    assert_close(executor.predict(image), plain_logits(topology, num_samples), "logits")


@each_value(
    options=[
        *NETWORKS,
        {"norm": "batch"},
        FLAT | {"encoder": "residual"},
        FLAT | {"encoder": "residual", **TRAINED_ELSEWHERE},
    ],
    recompute=["norm", "level", "off"],
    cuts=[(), (9,), (3, 8)],
    loss_fn=[PER_SAMPLE, BATCH_DICE],
)
def test_what_is_made_again_is_transparent(options, recompute, cuts, loss_fn, monkeypatch):
    monkeypatch.setattr(remake, "MIN_ELEMENTS", 0)
    topology = make_topology(**options)
    layout = {"num_devices": len(cuts) + 1, "cuts": cuts, "recompute": recompute}
    num_micro_batches = 1 if topology.norm == "batch" else 2
    executor = check_step(topology, 3, loss_fn, num_micro_batches=num_micro_batches, **layout)
    _, _, plain = plain_gradients(topology, 3, loss_fn)
    expected, found = plain.state_dict(), executor.module.state_dict()
    assert list(found) == list(expected)
    for name, value in found.items():  # also statistics: a batch counts once, even if it runs twice
        assert torch.equal(value, expected[name]), name


THREE_UNITS = {"units": (3, 3, 2), "decoder_units": (3, 3), "deep_supervision": True}


@each_value(
    options=[{}, RESIDUAL, FLAT, THREE_UNITS, TRAINED_ELSEWHERE, {"norm": "group"}],
    recompute=["norm", "level", "off"],
    stages=[(1, None), (2, None), (2, (9,)), (4, (1, 5, 7))],
    batch=[(1, 1), (2, 1), (5, 3)],
    adds_skips=[False, True],
)
def test_maps_that_are_never_normalised_are_transparent(
    options, recompute, stages, batch, adds_skips, monkeypatch
):
    """Hand-written convolutions, here in plain versions, normalise while they load, and add."""
    (num_devices, cuts), (num_samples, num_micro_batches) = stages, batch
    topology = make_topology(**options)
    # The results to compare with are computed before anything is replaced.
    plain_gradients(topology, num_samples, PER_SAMPLE, False)
    expected = plain_logits(topology, num_samples)
    monkeypatch.setattr(remake, "MIN_ELEMENTS", 0)
    monkeypatch.setattr(api, "suits", lambda x, inputs, outputs: True)
    monkeypatch.setattr(layers, "CHANNELS_BY_HAND", topology.channels)
    monkeypatch.setattr(step, "convolves_by_hand", lambda device, lowered: adds_skips)
    fused, convolve, sums, add = [], op.convolve, [], op.add_convolution

    def watched(x, kernel, weight, *more, **given):
        fused.append(weight is not None)
        return convolve(x, kernel, weight, *more, **given)

    def adding(y, x, *more, **given):
        sums.append(y.shape)
        return add(y, x, *more, **given)

    monkeypatch.setattr(op, "convolve", watched)
    monkeypatch.setattr(op, "add_convolution", adding)
    layout = {"num_devices": num_devices, "cuts": cuts, "num_micro_batches": num_micro_batches}
    executor = check_step(topology, num_samples, recompute=recompute, **layout)
    # With recomputed levels, only units within a block are fused.
    may_fuse = recompute != "level" or topology.encoder == "residual"
    assert any(fused) == (may_fuse and topology.norm == "instance")
    # A cut may separate a skip's convolution from the block that adds it.
    may_add = any(
        len(adding_skips(stage.blocks, stage.outputs)) < len(stage.blocks)
        for stage in executor.stages
    )
    assert any(sums) == (may_add and adds_skips and recompute != "level")
    fused.clear()
    assert_close(executor.predict(make_batch(num_samples)[0]), expected, "logits")
    assert fused and any(fused) == (topology.norm == "instance")


@each_value(
    joins_samples=[False, True],
    regions=[(), NESTED],
    deep_supervision=[False, True],
    num_micro_batches=[1, 3],
    num_samples=[1, 4],
)
def test_ignored_voxels_and_regions_are_transparent(
    joins_samples, regions, deep_supervision, num_micro_batches, num_samples
):
    """Unequal shares of micro-batches are labelled, and in one nothing is."""
    loss_fn = SegmentationLoss(joins_samples=joins_samples, regions=regions)
    topology = make_topology(deep_supervision=deep_supervision)
    layout = {"num_devices": 2, "num_micro_batches": num_micro_batches}
    check_step(topology, num_samples, loss_fn, ignores=True, **layout)


@each_value(loss_fn=[PER_SAMPLE, BATCH_DICE], num_micro_batches=[1, 2])
def test_a_scale_changes_gradients_but_not_the_reported_loss(loss_fn, num_micro_batches):
    image, target = make_batch(3)
    loss, gradients, _ = plain_gradients(make_topology(), 3, loss_fn)
    model = make_network(make_topology())
    layout = Layout(devices=(torch.device("cpu"),) * 2, num_micro_batches=num_micro_batches)
    terms = parallelize(model, layout).forward_backward(image, target, loss_fn, scale=1024.0)
    assert_close(terms.total, loss, "loss")
    name = "encoder.levels.0.0.conv.weight"
    assert_close(gradients_of(model)[name], 1024 * gradients[name], name)


def _step_on(model, layout, image, target):
    """Return the loss of a step on some devices, and all gradients joined."""
    executor = parallelize(model, layout)
    image, target = image.to(executor.input_device), target.to(executor.output_device)
    loss = executor.forward_backward(image, target, dice_cross_entropy).total
    assert loss.device == executor.output_device
    return loss, torch.cat([g.cpu().double().flatten() for g in gradients_of(model).values()])


@pytest.mark.gpu
@pytest.mark.parametrize(("autocast", "tolerance"), [(None, TOLERANCE), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (("cuda:0",), {}),
        (("cuda:0",), TRAINED_ELSEWHERE),
        (("cpu", "cuda:0"), {}),
        (("cuda:0", "cpu"), {}),
        pytest.param(("cuda:0", "cuda:1"), {}, marks=pytest.mark.multigpu),
        pytest.param(("cuda:1", "cuda:0"), {}, marks=pytest.mark.multigpu),
        pytest.param(("cuda:0", "cuda:1", "cuda:0"), {}, marks=pytest.mark.multigpu),
    ],
    ids=str,
)
def test_gpus_are_transparent_or_close(devices, options, autocast, tolerance):
    image, target = make_batch(3)
    topology = make_topology(**options)
    loss, gradients, _ = plain_gradients(topology, 3)
    model = make_network(topology)
    if autocast is not None:
        model, image = model.float(), image.float()
    devices = tuple(map(torch.device, devices))
    layout = Layout(devices=devices, num_micro_batches=2, autocast=autocast)
    found, actual = _step_on(model, layout, image, target)
    assert abs(found.item() - loss.item()) <= tolerance * loss.item()
    expected = torch.cat([value.flatten() for value in gradients.values()])
    similarity = torch.nn.functional.cosine_similarity(actual, expected, dim=0)
    # In lower precision single gradients are noisy, but all point the same way.
    assert 1 - similarity <= tolerance
    if autocast is None:
        assert_close(actual, expected, "gradients")


@pytest.mark.gpu
@pytest.mark.parametrize("thick_mm", [1.0, 2.5])
@pytest.mark.parametrize("num_slots", [1, 2])
def test_levels_are_recomputed_by_the_kernels_that_large_maps_have(
    num_slots, thick_mm, monkeypatch
):
    """Maps with zeros around Z, pairs of voxels: recomputing repeats the same operations."""
    # With recomputed levels blocks are not fused, so fusing is switched off in both runs.
    monkeypatch.setattr(step, "deferring", lambda blocks, outputs: tuple(blocks))
    monkeypatch.setattr(step, "convolves_by_hand", lambda device, lowered: False)
    settings = ModelSettings(channels=(32, 64, 64), kernels="anisotropic", deep_supervision=False)
    topology = plan_topology(settings, (128, 64, 64), (1.0, 1.0, thick_mm), 1, 3)
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(2, 1, 128, 64, 64, generator=generator)
    target = torch.randint(3, (2, 128, 64, 64), generator=generator, dtype=torch.uint8)
    found = []
    for recompute in ("norm", "level"):
        torch.manual_seed(0)
        layout = Layout(
            devices=(torch.device("cuda", 0),) * num_slots,
            num_micro_batches=num_slots,
            autocast=torch.bfloat16,
            recompute=recompute,
            captures=False,
        )
        found.append(_step_on(UNet3d(topology), layout, image, target))
    (loss, gradients), (loss_again, gradients_again) = found
    assert torch.equal(loss, loss_again)
    # The second time cuDNN may add in another order.
    assert (gradients - gradients_again).norm() < 1e-3 * gradients.norm()
