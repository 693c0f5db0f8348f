import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from tests.model.shapes import topology_of
from unet3d.model import UNet3d
from unet3d.model.blocks import Block, in_running_order, run_blocks


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


def test_blocks_run_in_order_and_only_what_is_kept_comes_back():
    seen: list[weakref.ref[Tensor]] = []
    blocks = [
        Block(name="a", module=Add(1, seen), inputs=("image",)),
        Block(name="b", module=Add(10, seen), inputs=("a",)),
        Block(name="c", module=Add(100, seen), inputs=("a", "b")),
        Block(name="d", module=Add(1000, seen), inputs=("c", "image")),
    ]
    tensors = {"image": torch.zeros(2)}
    result = run_blocks(blocks, tensors, ["d", "b"])
    assert not tensors  # the caller keeps none of them alive
    assert {name: value.tolist() for name, value in result.items()} == {
        "b": [11.0, 11.0],
        "d": [1112.0, 1112.0],
    }


def test_a_tensor_is_freed_after_its_last_reader():
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


def chain(**inputs: tuple[str, ...]) -> list[Block]:
    return [Block(name=name, module=nn.Identity(), inputs=read) for name, read in inputs.items()]


def test_a_block_that_reads_one_tensor_follows_the_first_reader_of_it():
    blocks = chain(
        a=("image",),
        b=("a",),
        c=("b",),
        skip_b=("b",),
        d=("skip_b", "c"),
        skip_a=("a",),
        e=("d", "skip_a"),
        end=("e",),
    )
    ordered = [block.name for block in in_running_order(blocks)]
    assert ordered == ["a", "b", "skip_a", "c", "skip_b", "d", "e", "end"]


def test_what_others_make_moves_nothing():
    """Of the decoder alone, and of a chain."""
    for blocks in (
        chain(low=("c",), skip_a=("a",), e=("low", "skip_a")),
        chain(a=("image",), b=("a",), c=("b",)),
    ):
        assert in_running_order(blocks) == tuple(blocks)


@pytest.mark.parametrize("encoder", ["plain", "residual"])
def test_every_convolution_of_a_skip_runs_behind_the_next_level_s_first_unit(encoder):
    model = UNet3d(topology_of(encoder=encoder))
    names = [block.name for block in in_running_order(model.blocks())]
    assert sorted(names) == sorted(block.name for block in model.blocks())
    for level in range(2):
        place = names.index(f"encoder.{level + 1}.0")
        assert names[place + 1] == f"decoder.{level}.skip"
