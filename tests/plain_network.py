"""The plain network on one device, with which every parallel mode is compared."""

import functools
from dataclasses import replace

import torch
from torch import nn

from unet3d.config import ModelSettings
from unet3d.model import SegmentationLoss, UNet3d, plan_topology
from unet3d.parallel import Layout, parallelize

TOLERANCE = 1e-10
PER_SAMPLE = SegmentationLoss()
BATCH_DICE = SegmentationLoss(joins_samples=True)
NESTED = ((1, 2), (2,), (1,))
"""Regions of the classes of :func:`make_batch`; their number equals the network's outputs."""

_UNITS = {"units": (1, 3, 2), "decoder_units": (3, 1)}
TRAINED_ELSEWHERE = {**_UNITS, "upsampling_bias": True, "norm_eps": 0.02, "negative_slope": 0.1}
"""Properties that networks of :func:`make_topology` have only if a checkpoint says so."""


def make_topology(**options):
    """Return a network of three levels; options are settings or fields of a topology."""
    fields = {name: options.pop(name) for name in TRAINED_ELSEWHERE if name in options}
    small = {"deep_supervision": False, "base_channels": 4, "num_levels": 3}
    settings = ModelSettings(**small | options)
    return replace(plan_topology(settings, (16, 16, 8), (1.0, 1.0, 2.5), 2, 3), **fields)


def make_batch(num_samples, dtype=torch.float64, ignores=False):
    """Return images and targets; if some voxels are ignored, all of the last sample are."""
    generator = torch.Generator().manual_seed(num_samples)
    image = torch.randn(num_samples, 2, 16, 16, 8, generator=generator, dtype=dtype)
    target = torch.randint(0, 3, (num_samples, 16, 16, 8), generator=generator)
    if ignores:
        shares = torch.linspace(0.2, 1.0, num_samples).view(-1, 1, 1, 1)
        target[torch.rand(target.shape, generator=generator) < shares] = 3
    return image, target.to(torch.uint8)


def make_network(topology):
    """Return a float64 network with the weights of seed 1, and random biases of upsampling."""
    torch.manual_seed(1)
    model = UNet3d(topology).double()
    for name, parameter in model.named_parameters():
        if name.endswith("up.bias"):  # a bias of 0 would have no effect
            nn.init.normal_(parameter)
    return model


@functools.lru_cache(maxsize=64)
def plain_gradients(topology, num_samples, loss_fn=PER_SAMPLE, ignores=False):
    """Return loss, gradients and network of a step in float64, with the weights of seed 1.

    The whole batch passes through the network at once. Equal calls return the same objects, which
    must not be changed.
    """
    image, target = make_batch(num_samples, ignores=ignores)
    model = make_network(topology)
    loss = loss_fn(model(image), target).total
    loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters()}
    return loss.detach(), gradients, model


@functools.lru_cache(maxsize=64)
def plain_logits(topology, num_samples):
    """Return the prediction of the network of :func:`plain_gradients` for the same images."""
    _, _, model = plain_gradients(topology, num_samples)
    with torch.no_grad():
        return model.eval()(make_batch(num_samples)[0])


def assert_close(actual, expected, name):
    error = (actual - expected).norm() / expected.norm().clamp_min(1e-8)
    assert error <= TOLERANCE, f"{name}: relative difference {error:.1e}"


def assert_same_in_ranks(by_rank, loss, expected):
    """Check that all ranks have the plain network's loss and, bit-identical, the same gradients."""
    for own_loss, gradients in by_rank:
        assert abs(own_loss - loss.item()) <= TOLERANCE * loss.item()
        assert_gradients(gradients, expected)
        for name, value in gradients.items():
            assert torch.equal(value, by_rank[0][1][name]), name


def assert_gradients(found, expected):
    """Check that gradients equal those of :func:`plain_gradients`."""
    assert list(found) == list(expected)
    for name, value in found.items():
        # A bias before a normalisation has no effect: its gradient is rounding error.
        if expected[name].norm() > 1e-12:
            assert_close(value, expected[name], name)


def gradients_of(model):
    """Return the gradient of each parameter that has one."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_step(topology, num_samples, loss_fn=PER_SAMPLE, ignores=False, **layout):
    """Run a step in a layout on CPUs, compare it with the plain network, and return the executor.

    Options are fields of the layout; ``num_devices`` stands for its devices.
    """
    loss, gradients, _ = plain_gradients(topology, num_samples, loss_fn, ignores)
    image, target = make_batch(num_samples, ignores=ignores)
    devices = (torch.device("cpu"),) * layout.pop("num_devices", 1)
    executor = parallelize(make_network(topology), Layout(devices=devices, **layout))
    terms = executor.forward_backward(image, target, loss_fn)
    assert_close(terms.total, loss, "loss")
    assert_gradients(gradients_of(executor.module), gradients)
    return executor
