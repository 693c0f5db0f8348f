"""Networks as lists of blocks: how blocks run, and how cuts divide a network into stages.

Any chain of modules can become such a network.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from unet3d.errors import ConfigError, VolumeError, counted
from unet3d.kernels.sharding import Shard, sharded

_OVER_THE_BATCH = (nn.modules.batchnorm._BatchNorm,)
"""Modules whose result for one sample depends on the other samples of the batch."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One step of the network; cuts fall between blocks.

    The blocks of a network are in an order in which they can run. Each reads tensors by name and
    writes one tensor under its own name; ``image`` is the network's input. So the names tell which
    tensors consecutive blocks need from outside: these tensors must cross a cut.
    """

    name: str
    """Name, such as ``encoder.0.1`` (level, unit), ``decoder.2.skip`` or ``head``."""
    module: nn.Module
    """The module that runs; it shares no parameters with others."""
    inputs: tuple[str, ...]
    """Names of the tensors that it reads, in the order of its arguments."""
    path: str = ""
    """Part of the network that it belongs to, such as ``encoder``, ``decoder`` or ``head``."""
    level: int = 0
    """Resolution at which it works; 0 is the full one."""
    shard: Shard | None = None
    """The slab of the volume that it computes; None: the whole volume."""
    enter: Callable[[Tensor], Tensor] | None = None
    """Converts its inputs to the planes of its slab; None: they already have these planes."""


AfterBlock = Callable[[Block, Tensor], None]
"""Called with each block that has run, and the block's result."""

RunBlock = Callable[[Block, Mapping[str, Tensor]], Tensor]
"""Runs one block on its inputs, which are given by name."""


def run_block(block: Block, inputs: Mapping[str, Tensor]) -> Tensor:
    """Run a block on its inputs, which are found by name, and return the result."""
    given = [inputs[name] for name in block.inputs]
    with sharded(block.shard):
        made: Tensor = block.module(*(given if block.enter is None else map(block.enter, given)))
    return made


def run_blocks(
    blocks: Sequence[Block],
    tensors: dict[str, Tensor],
    keep: Iterable[str],
    after: AfterBlock | None = None,
    run: RunBlock = run_block,
) -> dict[str, Tensor]:
    """Run blocks in order, and return the tensors that are to be kept, by name.

    ``tensors`` holds the tensors that the blocks need from outside. Each tensor is deleted after
    its last reader has run.
    """
    kept = set(keep)
    last_reader = {name: block.name for block in blocks for name in block.inputs}
    for block in blocks:
        tensors[block.name] = run(block, {name: tensors[name] for name in block.inputs})
        if after is not None:
            after(block, tensors[block.name])
        for name in set(block.inputs):
            if last_reader[name] == block.name and name not in kept:
                del tensors[name]
    return {name: tensors.pop(name) for name in kept}


def in_running_order(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Return blocks in the order in which their backward passes need the least memory.

    The convolution of a skip can run long before the decoder needs its result. Then its backward
    runs late, right before the backward of the encoder level that computed the skip, so backward
    needs the skip only once, not at two distant times. Therefore a block that reads a single tensor
    follows the first other reader of that tensor, if both are among these blocks.
    """
    ordered: list[Block] = []
    for block in blocks:
        place = len(ordered)
        made = {other.name for other in ordered}
        if len(block.inputs) == 1 and block.inputs[0] in made:
            readers = (i for i, other in enumerate(ordered) if block.inputs[0] in other.inputs)
            place = next(readers, place - 1) + 1
        ordered.insert(place, block)
    return tuple(ordered)


class BlockNetwork(nn.Module, ABC):
    """A module that can be cut between its blocks: all that executors need from a network.

    :class:`~unet3d.model.UNet3d` is one; :class:`SequentialNetwork` turns a chain into one.
    """

    @abstractmethod
    def blocks(self) -> Sequence[Block]:
        """Return every block in an order in which they can run; the input is ``image``."""

    @abstractmethod
    def outputs(self) -> Sequence[str]:
        """Return the names of the blocks that write results, the main one first."""

    @abstractmethod
    def example_input(self) -> Tensor:
        """Return a small input (N, ...) on the meta device, for counting operations."""

    @abstractmethod
    def check_shape(self, image: Tensor) -> None:
        """Refuse an input that the network cannot take.

        Args:
            image: The batch, (N, ...).

        Raises:
            VolumeError: The input does not suit the network; the message says why.
        """

    @property
    def samples_are_independent(self) -> bool:
        """Whether a sample's result is the same alone and in a batch.

        Where it is not, as with batch normalisation, a batch cannot be divided.
        """
        return not any(isinstance(module, _OVER_THE_BATCH) for module in self.modules())

    def preferred_cuts(self, num_stages: int) -> tuple[int, ...] | None:
        """Return the network's default cuts, used if the settings name none.

        Args:
            num_stages: Number of devices that share the network.

        Returns:
            Index of the first block of each stage but the first; None: cuts into stages of about
            equal work, counted on :meth:`example_input`.
        """
        return None


def sequential_blocks(
    chain: nn.Sequential, path: str = "chain", source: str = "image"
) -> tuple[Block, ...]:
    """Return the modules of a chain as blocks, each of which reads the one before.

    A plain ``nn.Sequential`` within the chain is taken apart, so that a cut may fall inside it; its
    blocks have one level. A module that works in place, such as ``nn.ReLU(inplace=True)``, belongs
    to the block of the module before it, because a stage must not overwrite what it receives.

    Args:
        chain: Modules with one input and one output. Hooks of the chain and of chains within it are
            not called; hooks of the other modules are.
        path: The part of the network that the blocks belong to. Their names begin with it.
        source: Name of the tensor that the first module reads.

    Returns:
        Blocks such as ``chain.layer1.0``.
    """
    blocks: list[Block] = []
    for level, (top, module) in enumerate(_children(chain)):
        for name, part in _parts(module, f"{path}.{top}"):
            if blocks and getattr(part, "inplace", False):
                joined = nn.Sequential(blocks[-1].module, part)
                blocks[-1] = replace(blocks[-1], module=joined)
                continue
            blocks.append(Block(name=name, module=part, inputs=(source,), path=path, level=level))
            source = name
    return tuple(blocks)


def _children(chain: nn.Sequential) -> Iterator[tuple[str, nn.Module]]:
    """Return a chain's modules by name; ``named_children`` leaves out repeated ones."""
    return zip(chain._modules, chain, strict=True)


def _parts(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module by name, or the parts of a plain chain; a subclass may run differently."""
    if type(module) is not nn.Sequential:
        yield name, module
        return
    for child, part in _children(module):
        yield from _parts(part, f"{name}.{child}")


class SequentialNetwork(BlockNetwork):
    """A chain of modules as a network that executors can place, such as a ResNet."""

    def __init__(self, chain: nn.Sequential, sample_shape: Sequence[int]) -> None:
        """Divide a chain into blocks.

        Args:
            chain: Modules with one input and one output; see :func:`sequential_blocks`.
            sample_shape: Shape of one input without the batch, such as ``(1, 64, 64, 64)``. Inputs
                must have its rank and channels; its other axes only serve to find a cut.

        Raises:
            ConfigError: The chain or the shape is empty, or two modules share a parameter.
        """
        super().__init__()
        self.chain = chain
        self.sample_shape = tuple(sample_shape)
        if not self.blocks() or not self.sample_shape:
            raise ConfigError(
                f"a chain of {counted(len(self.blocks()), 'module')} for samples of shape "
                f"{self.sample_shape} cannot be run; give at least one module and one axis"
            )
        _refuse_shared(self.blocks())

    def blocks(self) -> tuple[Block, ...]:
        """Return the modules of the chain; see :func:`sequential_blocks`."""
        return sequential_blocks(self.chain)

    def outputs(self) -> tuple[str, ...]:
        """Return the name of the last block."""
        return (self.blocks()[-1].name,)

    def check_shape(self, image: Tensor) -> None:
        """Refuse a batch whose samples have another rank or other channels than announced."""
        wanted = self.sample_shape
        if image.dim() != len(wanted) + 1 or image.shape[1] != wanted[0]:
            raise VolumeError(
                f"a batch of shape {tuple(image.shape)} was given to a network for samples of "
                f"shape {wanted}; give (N, {wanted[0]}, ...)"
            )

    def example_input(self) -> Tensor:
        """Return two samples on the meta device: batch normalisation may refuse a single one."""
        return torch.empty(2, *self.sample_shape, device="meta")

    def forward(self, image: Tensor) -> Tensor:
        """Map a batch (N, C, ...) to the result of the last module."""
        self.check_shape(image)
        (output,) = self.outputs()
        return run_blocks(self.blocks(), {"image": image}, [output])[output]


def _refuse_shared(blocks: Sequence[Block]) -> None:
    """Refuse blocks that share parameters or buffers, because each stage owns its own."""
    owners: dict[Tensor, str] = {}
    for block in blocks:
        for tensor in (*block.module.parameters(), *block.module.buffers()):
            owner = owners.setdefault(tensor, block.name)
            if owner != block.name:
                raise ConfigError(
                    f"{owner} and {block.name} share a parameter of shape {tuple(tensor.shape)}, "
                    "but may be on different devices; give each a module of its own"
                )
