import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.model.shapes import topology_of
from unet3d.model import UNet3d
from unet3d.model.blocks import Block, in_running_order, run_blocks


class Add(nn.Module):
    """Adds its inputs and a number, and remembers which tensors were alive."""

    def __init__(self, number, seen):
        super().__init__()
        self.number = number
        self.seen = seen
        self.alive = []

    def forward(self, *inputs):
        gc.collect()
        self.alive = [reference() is not None for reference in self.seen]
        out = sum(inputs) + self.number
        self.seen.append(weakref.ref(out))
        return out


def chain(**inputs):
    names = inputs.items()
    return [Block(name=name, module=nn.Identity(), inputs=tuple(read)) for name, read in names]


def test_blocks_run_in_order_and_a_tensor_is_freed_after_its_last_reader():
    seen = []
    modules = [Add(10**index, seen) for index in range(5)]
    # One reads a tensor twice.
    inputs = {"a": ["image"], "b": ["a"], "c": ["b"], "d": ["a", "c", "a"], "e": ["d", "image"]}
    blocks = chain(**inputs)
    blocks = [replace(block, module=m) for block, m in zip(blocks, modules, strict=True)]
    tensors = {"image": torch.zeros(2)}
    result = run_blocks(blocks, tensors, ["e", "d"])
    assert not tensors  # the caller keeps none of them alive
    assert {name: value.tolist() for name, value in result.items()} == {
        "d": [1113.0, 1113.0],
        "e": [11113.0, 11113.0],
    }
    assert modules[3].alive == [True, False, True]  # a is still to be read, b is not
    assert modules[4].alive == [False, False, False, True]


def test_a_block_that_reads_one_tensor_follows_the_first_reader_of_it():
    blocks = chain(a=["image"], b=["a"], c=["b"], skip_b=["b"], d=["skip_b", "c"], skip_a=["a"])
    blocks += chain(e=["d", "skip_a"], end=["e"])
    ordered = [block.name for block in in_running_order(blocks)]
    assert ordered == ["a", "b", "skip_a", "c", "skip_b", "d", "e", "end"]
    # What others make moves nothing: of the decoder alone, and of a chain.
    for blocks in (
        chain(low=["c"], skip_a=["a"], e=["low", "skip_a"]),
        chain(a=["image"], b=["a"], c=["b"]),
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
