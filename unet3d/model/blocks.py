"""The list of blocks that a cut divides, and how they run."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, kw_only=True)
class Block:
    """One step of the network, and the unit that a cut can fall between.

    The blocks of a network are in an order in which they can run. Each reads tensors by name and
    writes one tensor under its own name; ``image`` is the network's input. So any run of blocks
    tells which tensors it needs from outside: at a cut, those are the ones that must travel.
    """

    name: str
    """Name, such as ``encoder.0.1`` (level, unit), ``decoder.2.up`` or ``head``."""
    module: nn.Module
    """The module that runs; it shares no parameters with others."""
    inputs: tuple[str, ...]
    """Names of the tensors that it reads, in the order of its arguments."""
    path: str = ""
    """Part of the network that it belongs to, such as ``encoder``, ``decoder`` or ``head``."""
    level: int = 0
    """Resolution at which it works; 0 is the full one."""


class BlockWatcher(Protocol):
    """Is called before and after each block."""

    def before(self, block: Block) -> None:
        """Prepare the inputs of a block that is about to run."""
        ...

    def after(self, block: Block, made: Tensor) -> None:
        """Act on a block that has run.

        Args:
            block: The block.
            made: Its result.
        """
        ...


def run_blocks(
    blocks: Sequence[Block],
    tensors: dict[str, Tensor],
    keep: Iterable[str],
    watcher: BlockWatcher | None = None,
) -> dict[str, Tensor]:
    """Run blocks in order, letting go of each tensor after its last reader.

    Args:
        blocks: A run of a network's blocks.
        tensors: What they need from outside, by name. It is emptied, so that no tensor is kept that
            no block reads any more.
        keep: Names of the tensors to return.
        watcher: Is called before and after each block.

    Returns:
        The kept tensors by name.
    """
    kept = set(keep)
    last_reader = {name: block.name for block in blocks for name in block.inputs}
    for block in blocks:
        if watcher is not None:
            watcher.before(block)
        tensors[block.name] = block.module(*(tensors[name] for name in block.inputs))
        if watcher is not None:
            watcher.after(block, tensors[block.name])
        for name in set(block.inputs):
            if last_reader[name] == block.name and name not in kept:
                del tensors[name]
    return {name: tensors.pop(name) for name in kept}


def run_levels(
    blocks: Sequence[Block], tensors: dict[str, Tensor], keep: Iterable[str]
) -> dict[str, Tensor]:
    """Run blocks as :func:`run_blocks` does, but keep only what enters each level for backward.

    The rest is recomputed when backward comes to the level (Chen et al., arXiv 1604.06174). A
    second forward pass saves most of the activations' memory.

    Args:
        blocks: A run of a network's blocks.
        tensors: What they need from outside, by name. It is emptied.
        keep: Names of the tensors to return.
    """
    levels = [tuple(group) for _, group in itertools.groupby(blocks, lambda b: (b.path, b.level))]
    kept = set(keep)
    for index, level in enumerate(levels):
        later = {name for after in levels[index + 1 :] for block in after for name in block.inputs}
        made = {block.name for block in level}
        inputs = list(dict.fromkeys(n for block in level for n in block.inputs if n not in made))
        outputs = [name for name in made if name in later or name in kept]

        def run(
            *values: Tensor,
            level: tuple[Block, ...] = level,
            inputs: list[str] = inputs,
            outputs: list[str] = outputs,
        ) -> tuple[Tensor, ...]:
            results = run_blocks(level, dict(zip(inputs, values, strict=True)), outputs)
            return tuple(results[name] for name in outputs)

        values = [tensors[name] for name in inputs]
        results = checkpoint(
            run,
            *values,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(_contexts, level),
        )
        tensors.update(zip(outputs, results, strict=True))
        for name in inputs:
            if name not in later and name not in kept:
                del tensors[name]
        del values, results
    return {name: tensors.pop(name) for name in kept}


def _contexts(
    level: Sequence[Block],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _second_pass(level)


@contextmanager
def _second_pass(level: Sequence[Block]) -> Iterator[None]:
    """Keep batch normalisations from counting the same samples twice in their running means."""
    norms = [
        (module, module.momentum, module.num_batches_tracked, module.num_batches_tracked.clone())
        for block in level
        for module in block.module.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module.num_batches_tracked is not None
    ]
    for norm, *_ in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, count, before in norms:
            norm.momentum = momentum
            count.copy_(before)
