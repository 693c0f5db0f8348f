"""Networks that are lists of blocks, and how any chain of modules becomes one."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from unet3d.errors import ConfigError, VolumeError
from unet3d.model.blocks import Block, run_blocks

_OVER_THE_BATCH = (nn.modules.batchnorm._BatchNorm,)
"""Modules whose result for one sample depends on the others of its batch."""


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
        """Return the preferred cuts of the network, for when no others are asked for.

        Args:
            num_stages: How many devices share it.

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
    """Return a module by its name, or the parts of a chain; a subclass may run them differently."""
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
                f"a chain of {len(self.blocks())} modules for samples of shape "
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
