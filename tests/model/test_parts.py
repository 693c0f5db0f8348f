"""Parts that are recomputed in backward: same gradients, and nothing is kept needlessly."""

import gc
import weakref
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.model.shapes import topology_of
from tests.products import each_value
from unet3d.kernels import recompute as recomputing
from unet3d.kernels import recomputed_in_backward
from unet3d.memory.saved_tensors import handling
from unet3d.model import Block, UNet3d, in_running_order, run_block, run_blocks, sequential_blocks
from unet3d.model.parts import PartsOfPass, recomputed_parts
from unet3d.torch_private import storage_key

SIZE = (8, 12, 8)
FULL, HALF, LOW = 8 * 12 * 8, 4 * 6 * 4, 2 * 3 * 2
"""Voxels of each level."""


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(recomputing, "MIN_ELEMENTS", 0)


def make_model(frozen=None, **options):
    torch.manual_seed(0)
    given = {"channels": (4, 8, 8), "deep_supervision": False, "upsampling_bias": False}
    model = UNet3d(topology_of(**given | options)).double()
    if frozen is not None:
        model.get_submodule(frozen).requires_grad_(False)
    return model


def forward(model, num_alive, blocks=None):
    """Run the network, in parts that are recomputed unless ``num_alive`` is None."""
    blocks = in_running_order(blocks or model.blocks())
    run = run_block
    if num_alive is not None:
        run = PartsOfPass(recomputed_parts(blocks, num_alive), nullcontext).run
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(1, 2, *SIZE, dtype=torch.float64, generator=generator)
    with recomputed_in_backward():
        return run_blocks(blocks, {"image": image}, model.outputs(), run=run)


def backward(model, made):
    sum(value.square().mean() for value in made.values()).backward()
    return [parameter.grad for parameter in model.parameters()]


@each_value(
    encoder=["plain", "residual"],
    options=[
        {},
        {"deep_supervision": True},
        {"norm": "batch"},
        *({"frozen": part} for part in ("encoder.levels.0", "encoder", "decoder")),
    ],
    num_alive=[1, 2],
)
def test_results_and_gradients_are_the_same_to_the_bit(encoder, options, num_alive):
    found = []
    for alive in (None, num_alive):
        model = make_model(encoder=encoder, **options)
        made = forward(model, alive)
        found.append([*made.values(), *backward(model, made), *model.buffers()])
    for expected, actual in zip(*found, strict=True):
        assert actual is expected is None or torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("num_alive", "expected"),
    [
        # The decoder's units keep their norms' inputs: two at full resolution, two at half.
        (1, [4 * FULL, 4 * FULL, 8 * HALF, 8 * HALF]),
        # If other parts run in between, only the inputs of a level are kept: both skips and the
        # lowest features for the lower level, and its result for the rest, with the head.
        (2, [4 * FULL, 8 * HALF, 8 * LOW, 8 * HALF]),
    ],
)
def test_of_the_encoder_only_what_the_first_block_of_each_level_made_is_kept(num_alive, expected):
    model = make_model()
    own = {storage_key(value) for value in model.parameters()}
    kept = []
    with handling(kept.append):
        forward(model, num_alive)
    others = {storage_key(tensor): tensor.numel() for tensor in kept}
    large = [size for key, size in others.items() if key not in own and size >= 8 * LOW]
    assert Counter(large) == Counter([2 * FULL, 8 * HALF, 8 * LOW, *expected])


@pytest.mark.parametrize(("num_alive", "decoder_runs"), [(1, 1), (2, 2)])
def test_a_part_runs_again_when_backward_comes_to_it(num_alive, decoder_runs):
    """Not earlier: the features of only one level exist at a time.

    A block runs at most twice, the first one three times.
    """
    model = make_model()
    order = []
    blocks = model.blocks()
    for block in blocks:
        block.module.register_forward_hook(lambda *_, name=block.name: order.append(name))
    weights = [f"encoder.levels.{level}.1.conv.weight" for level in (2, 1, 0)]
    for name in weights:
        weight = model.get_parameter(name)
        weight.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    made = forward(model, num_alive, blocks)
    paths = {block.name: block.path for block in blocks}
    assert sorted(order) == sorted(paths)
    backward(model, made)
    num_runs = Counter(name for name in order if name not in weights)
    assert num_runs.pop("encoder.0.0") == 3
    for name, number in num_runs.items():
        assert number == (2 if paths[name] == "encoder" else decoder_runs), name
    again = [name for name in order[len(paths) :] if name in weights or name[-2:] == ".1"]
    expected = [part for level in range(3) for part in (f"encoder.{2 - level}.1", weights[level])]
    assert [name for name in again if name.startswith("encoder")] == expected


def test_what_enters_a_level_of_a_chain_is_kept():
    """Its first module may take long, so no module runs more than twice."""
    num_runs = Counter()
    chain = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    blocks = sequential_blocks(chain)
    for index, module in enumerate(chain):
        module[0].register_forward_hook(lambda *_, index=index: num_runs.update([index]))
    leaf = torch.ones(2, 4, requires_grad=True)
    kept = []
    run = PartsOfPass(recomputed_parts(blocks, 1), nullcontext).run
    with handling(kept.append), recomputed_in_backward():
        made = run_blocks(blocks, {"image": leaf}, [blocks[-1].name], run=run)
    assert sum(tensor.shape == leaf.shape for tensor in kept) == 3
    made[blocks[-1].name].sum().backward()
    assert num_runs == {0: 2, 1: 2, 2: 2}


@pytest.mark.parametrize("num_alive", [1, 2])
def test_nothing_is_alive_after_backward(num_alive):
    """By reference counts: memory must not wait for the garbage collector."""
    model = make_model()
    seen = []

    def note(_module, _inputs, result):
        seen.append(weakref.ref(result.untyped_storage()))

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(note)
    gc.collect()
    gc.disable()
    try:
        backward(model, forward(model, num_alive))
        assert len(seen) > 10
        assert [reference for reference in seen if reference() is not None] == []
    finally:
        gc.enable()


def test_memory_that_runs_out_the_second_time_is_reported_as_such():
    """A later step is possible, such as with a smaller patch."""
    model = make_model()
    runs = []

    def fail_once(*_):
        runs.append(1)
        if len(runs) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    hook = model.encoder.levels[1][1].register_forward_pre_hook(fail_once)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        backward(model, forward(model, 1))
    model.zero_grad()
    again = backward(model, forward(model, 1))
    assert len(runs) == 4
    hook.remove()
    model.zero_grad()
    for actual, expected in zip(again, backward(model, forward(model, None)), strict=True):
        assert actual is not None and expected is not None and torch.equal(actual, expected)


@pytest.mark.parametrize("num_squares", [[1, 2], [2, 1]], ids=str)
def test_a_module_that_does_something_else_the_second_time_is_refused(num_squares):
    """The second time it saves more, or fewer, tensors."""
    squares, module = list(num_squares), nn.Module()

    def square(x):
        for _ in range(squares.pop()):
            x = x.square()
        return x

    module.forward = square
    block = Block(name="a", module=module, inputs=("image",), path="encoder")
    run = PartsOfPass([[block]], nullcontext).run
    leaf = torch.ones(3, requires_grad=True)
    with recomputed_in_backward():
        made = run_blocks([block], {"image": leaf}, ["a"], run=run)
    with pytest.raises(RuntimeError, match=r"saved other tensors .* memory\.recompute=norm or off"):
        made["a"].sum().backward()


def test_it_runs_again_in_the_same_precision():
    """Backward runs outside of autocast, in which forward ran."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    block = Block(name="a", module=module, inputs=("image",), path="encoder")
    found = []
    for parts in ([], [[block]]):
        module.zero_grad()
        autocast = torch.autocast("cpu", dtype=torch.bfloat16)
        run = PartsOfPass(parts, lambda: torch.autocast("cpu", dtype=torch.bfloat16)).run
        with autocast, recomputed_in_backward():
            made = run_blocks([block], {"image": x}, ["a"], run=run)["a"]
        made.float().square().sum().backward()
        found.append([parameter.grad for parameter in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
