"""Networks that are lists of blocks, and making one of any chain of modules."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unet3d.errors import VolumeError
from unet3d.model.blocks import Block, run_blocks

_OVER_THE_BATCH = (nn.modules.batchnorm._BatchNorm,)
"""Modules whose result for one sample depends on the others of its batch."""


class BlockNetwork(Protocol):
    """A module that can be cut between its blocks: all that executors ask of a network.

    :class:`~unet3d.model.UNet3d` is one, :class:`SequentialNetwork` makes one of a chain.
    """

    training: bool
    """Whether it is in training mode."""

    def blocks(self) -> Sequence[Block]:
        """Return every block in an order in which they can run; the input is ``image``."""
        ...

    def outputs(self) -> Sequence[str]:
        """Return the names of the blocks that write results, the main one first."""
        ...

    def check_shape(self, image: Tensor) -> None:
        """Refuse an input that the network cannot take.

        Args:
            image: The batch, (N, ...).

        Raises:
            VolumeError: Why not.
        """
        ...

    @property
    def samples_are_independent(self) -> bool:
        """Whether a sample's result is the same alone and in a batch.

        Where it is not, as with batch normalisation, a batch cannot be taken in portions.
        """
        ...

    def preferred_cuts(self, num_stages: int) -> tuple[int, ...] | None:
        """Return where the network is best cut if nothing else is asked for.

        Args:
            num_stages: How many devices share it.

        Returns:
            Index of the first block of each stage but the first; None: into stages of about equal
            work, counted on :meth:`example_input`.
        """
        ...

    def example_input(self) -> Tensor:
        """Return a small input (1, ...) on the meta device, for counting operations."""
        ...

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the parameters; see :class:`torch.nn.Module`."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters with their names."""
        ...

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Return the buffers."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """Return the network and every module in it."""
        ...

    def train(self, mode: bool = True) -> Any:
        """Set training mode."""
        ...

    def eval(self) -> Any:
        """Leave training mode."""
        ...

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and buffers by name."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Take over parameters and buffers."""
        ...


def sequential_blocks(chain: nn.Sequential, path: str = "chain") -> tuple[Block, ...]:
    """Return one block for each module of a chain.

    Args:
        chain: Modules, each of which reads the result of the one before.
        path: The part of the network that the blocks belong to.

    Returns:
        Blocks with the names of the modules, each at a level of its own.
    """
    blocks: list[Block] = []
    source = "image"
    for level, (name, module) in enumerate(chain.named_children()):
        blocks.append(Block(name=name, module=module, inputs=(source,), path=path, level=level))
        source = name
    return tuple(blocks)


class SequentialNetwork(nn.Module):
    """A chain of modules as a network that executors can place, such as a ResNet."""

    def __init__(self, chain: nn.Sequential, sample_shape: Sequence[int]) -> None:
        """Take over a chain.

        Args:
            chain: Its modules are the blocks; a module that needs more than one input is not
                possible.
            sample_shape: Of one input without the batch, such as ``(1, 64, 64, 64)``.
        """
        super().__init__()
        self.chain = chain
        self.sample_shape = tuple(sample_shape)

    def blocks(self) -> tuple[Block, ...]:
        """Return one block for each module of the chain."""
        return sequential_blocks(self.chain)

    def outputs(self) -> tuple[str, ...]:
        """Return the name of the last block."""
        return (self.blocks()[-1].name,)

    def check_shape(self, image: Tensor) -> None:
        """Refuse a batch whose samples have another rank or other channels than announced.

        Args:
            image: (N, C, ...).

        Raises:
            VolumeError: It has.
        """
        wanted = self.sample_shape
        if image.dim() != len(wanted) + 1 or image.shape[1] != wanted[0]:
            raise VolumeError(
                f"a batch of shape {tuple(image.shape)} was given to a network for samples of "
                f"shape {wanted}; give (N, {wanted[0]}, ...)"
            )

    @property
    def samples_are_independent(self) -> bool:
        """Whether no module of the chain normalises over the batch."""
        return not any(isinstance(module, _OVER_THE_BATCH) for module in self.modules())

    def preferred_cuts(self, num_stages: int) -> None:
        """Leave the cut to the count of operations.

        Args:
            num_stages: How many devices share the network.
        """
        return None

    def example_input(self) -> Tensor:
        """Return one sample of the announced shape on the meta device."""
        return torch.empty(1, *self.sample_shape, device="meta")

    def forward(self, image: Tensor) -> Tensor:
        """Map a batch (N, C, ...) to the result of the last module."""
        self.check_shape(image)
        (output,) = self.outputs()
        return run_blocks(self.blocks(), {"image": image}, [output])[output]
