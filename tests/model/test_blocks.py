import gc
import weakref
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from unet3d.memory.saved_tensors import handling, storage_key
from unet3d.model import Topology, UNet3d
from unet3d.model.blocks import Block, run_blocks, run_levels


class Add(nn.Module):
    """Adds its inputs and a number, and remembers which tensors were alive."""

    def __init__(self, number: float, seen: list[weakref.ref[Tensor]]) -> None:
        super().__init__()
        self.number = number
        self.seen = seen
        self.alive: list[bool] = []

    def forward(self, *inputs: Tensor) -> Tensor:
        gc.collect()
        self.alive = [reference() is not None for reference in self.seen]
        out = sum(inputs) + self.number
        self.seen.append(weakref.ref(out))
        return out


def test_blocks_run_in_order_and_only_what_is_kept_comes_back() -> None:
    seen: list[weakref.ref[Tensor]] = []
    blocks = [
        Block(name="a", module=Add(1, seen), inputs=("image",)),
        Block(name="b", module=Add(10, seen), inputs=("a",)),
        Block(name="c", module=Add(100, seen), inputs=("a", "b")),
        Block(name="d", module=Add(1000, seen), inputs=("c", "image")),
    ]
    result = run_blocks(blocks, {"image": torch.zeros(2)}, ["d", "b"])
    assert {name: value.tolist() for name, value in result.items()} == {
        "b": [11.0, 11.0],
        "d": [1112.0, 1112.0],
    }


def test_a_tensor_is_freed_after_its_last_reader() -> None:
    seen: list[weakref.ref[Tensor]] = []
    modules = [Add(1, seen) for _ in range(5)]
    blocks = [
        Block(name="a", module=modules[0], inputs=("image",)),
        Block(name="b", module=modules[1], inputs=("a",)),
        Block(name="c", module=modules[2], inputs=("b",)),
        Block(name="d", module=modules[3], inputs=("a", "c", "a")),  # one that reads a tensor twice
        Block(name="e", module=modules[4], inputs=("d",)),
    ]
    run_blocks(blocks, {"image": torch.zeros(2)}, ["e"])
    assert modules[3].alive == [True, False, True]  # a is still to be read, b is not
    assert modules[4].alive == [False, False, False, True]


@pytest.mark.parametrize("run", [run_blocks, run_levels])
def test_the_caller_keeps_no_tensor_alive(run: Callable[..., dict[str, Tensor]]) -> None:
    tensors = {"image": torch.zeros(1)}
    made = run([Block(name="a", module=nn.Identity(), inputs=("image",))], tensors, ["a"])
    assert set(made) == {"a"}
    assert not tensors


@pytest.mark.parametrize("encoder", ["plain", "residual"])
def test_running_by_level_keeps_only_what_enters_each_level(
    encoder: Literal["plain", "residual"],
) -> None:
    strides = ((1, 1, 1), (2, 2, 2), (2, 2, 1))
    topology = Topology(
        in_channels=2,
        num_classes=3,
        channels=(4, 8, 8),
        strides=strides,
        encoder=encoder,
        deep_supervision=True,
    )
    torch.manual_seed(0)
    model = UNet3d(topology).double()
    x = torch.randn(2, 2, 8, 12, 8, dtype=torch.float64)
    found = []
    for run in (run_blocks, run_levels):
        kept: list[Tensor] = []
        with handling(kept.append):
            made = run(model.blocks(), {"image": x}, model.outputs())
        wanted = list(model.parameters())
        total = sum(value.square().mean() for value in made.values())
        gradients = torch.autograd.grad(total, wanted)
        found.append((made, gradients, {storage_key(v): v.numel() for v in kept}))
    (made, gradients, all_kept), (made_again, gradients_again, kept_levels) = found
    assert list(made) == list(made_again)
    assert all(torch.equal(made[name], made_again[name]) for name in made)
    assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_again, strict=True))
    full, half, low = (2 * 8 * 12 * 8, 2 * 4 * 6 * 4, 2 * 2 * 3 * 4)
    # The image; both skips; what the lowest level, and the decoder's at half, hand up.
    expected = [2 * full, 4 * full, 8 * half, 8 * low, 8 * half]
    parameters = {storage_key(value) for value in model.parameters()}
    sizes = [size for key, size in kept_levels.items() if key not in parameters and size > 0]
    assert sorted(sizes) == sorted(expected)
    assert sum(sizes) < sum(size for key, size in all_kept.items() if key not in parameters) / 3
