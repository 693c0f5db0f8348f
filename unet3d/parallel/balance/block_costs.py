"""What each block of a network costs: bytes, counted on fake tensors, and seconds, measured.

Fake tensors have shapes, types and devices but no memory, so a volume of any size can be counted,
and what is counted is what the code does. Times are taken on the device itself, one block alive at
a time, and remembered in the cache folder.
"""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from unet3d.config import Recompute, Shape
from unet3d.inputs.plain_data import key_of, validated
from unet3d.kernels import recomputed_in_backward
from unet3d.kernels.padding import detached
from unet3d.kernels.recompute import forget_source
from unet3d.memory.allocations import counted_allocations
from unet3d.memory.fake_devices import fake_device
from unet3d.memory.saved_tensors import handling, storage_key
from unet3d.model import Block, UNet3d, dice_cross_entropy
from unet3d.parallel.balance.stopwatch import (
    hardware,
    median_seconds,
    recorded,
    versions,
)
from unet3d.parallel.memory_format import laid_out, memory_format
from unet3d.parallel.precision import lowered_on, lowering
from unet3d.records import recall, remember

logger = logging.getLogger(__name__)

Times = tuple[Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False, strict=True)], ...]

LOSS = "loss"
"""Name of the last entry: the loss, which follows the last block on its device."""


@dataclass(frozen=True, kw_only=True)
class BlockBytes:
    """What one block needs on a device for one micro-batch."""

    name: str
    """Name of the block, or ``loss``."""
    inputs: tuple[str, ...]
    """Names of the tensors that it reads."""
    shape: tuple[int, ...]
    """Shape of the tensor that it writes."""
    dtype: torch.dtype
    """Type of the tensor that it writes."""
    parameters_bytes: int
    """Weights and buffers."""
    kept: Mapping[str, int]
    """What autograd keeps for backward, parameters and the image left out: bytes by name. What a
    block writes has the block's name: two blocks may keep the same tensor, which counts once in a
    stage."""
    forward_bytes: int
    """The most that its forward allocates, with what it writes and keeps."""
    work_bytes: int
    """The most that its backward needs beyond that: gradients of what it writes and reads, those of
    its parameters, and intermediates. The gradient of what it writes is counted all the time,
    because one that a later stage sent stays that long."""
    passing_work_bytes: int
    """The same where that gradient is freed once it is used, as one from a block of the same stage
    is."""
    workspace_bytes: int
    """What libraries keep from their first call on; a stage's blocks share it."""

    @property
    def output_bytes(self) -> int:
        """Bytes of the tensor that it writes, and so of its gradient."""
        return math.prod(self.shape) * self.dtype.itemsize


def block_bytes(
    model: UNet3d,
    size: Shape,
    num_samples: int,
    autocast: torch.dtype | None,
    device: torch.device,
    recompute: Recompute = "off",
) -> tuple[BlockBytes, ...]:
    """Count what each block keeps for backward, by running it on fake tensors.

    Args:
        model: The network, on any device; it is not changed.
        size: Voxels of the image along X, Y, Z; multiples of the total stride.
        num_samples: Number of samples in one micro-batch.
        autocast: Lower precision where the device has it, or None.
        device: A CPU and a GPU may keep different things; this machine need not have it.
        recompute: ``norm`` leaves out what is recomputed, and so does ``level``, of which it counts
            what is there while backward is in a level.

    Returns:
        One entry for each block, and one for the loss.
    """
    dtype = next(model.parameters()).dtype
    place = fake_device(device)
    format_ = memory_format(place, lowered_on(place, autocast) or dtype)
    entries = []
    recomputing = nullcontext() if recompute == "off" else recomputed_in_backward()
    alive: list[Tensor] = []  # what is recomputed must live while others read it
    # What is recomputed is not kept, so the handler that notes what is kept is asked last.
    counting = counted_allocations(autocast is not None)
    with counting as recorder, _kept_bytes() as saved, recomputing:

        def fake(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            return laid_out(torch.empty(tuple(shape), dtype=dtype, device=place), format_)

        def entry(
            name: str,
            inputs: tuple[str, ...],
            own: Sequence[Tensor],
            run: Callable[..., Tensor],
        ) -> BlockBytes:
            """Go forward and backward through one block; what it writes stays."""
            leaves = [detached(tensors[name]).requires_grad_(name != "image") for name in inputs]
            known = {storage_key(tensor): name for name, tensor in tensors.items()}
            given = {storage_key(tensor) for tensor in (tensors["image"], *own)}
            saved.clear()
            recorder.workspace_bytes.clear()
            before = recorder.peak[place] = recorder.now[place]
            made = run(*leaves)
            forward_bytes = recorder.peak[place] - before
            alive.append(made)
            tensors[name] = detached(made)
            forget_source(made)  # later readers must not keep its inputs alive
            known[storage_key(made)] = name
            kept = {
                known.get(number, f"{name} {index}"): size
                for index, (number, size) in enumerate(saved.items())
                if number not in given
            }
            wanted = [tensor for tensor in (*leaves, *own) if tensor.requires_grad]

            def work(result: Tensor, gradient: Tensor | None = None) -> int:
                before = recorder.peak[place] = recorder.now[place]
                gradients = torch.autograd.grad(result, wanted, gradient)
                del gradients
                return recorder.peak[place] - before

            gradient = torch.empty_like(made)  # before the count, because the sender owns it
            work_bytes = work(made, gradient) + gradient.untyped_storage().nbytes()
            del gradient
            passing_work_bytes = work(_GradientFromWithin.apply(run(*leaves), tensors[name]))  # type: ignore[no-untyped-call]
            own_bytes = sum(tensor.numel() * tensor.element_size() for tensor in own)
            shape = tuple(made.shape)
            return BlockBytes(
                name=name,
                inputs=inputs,
                shape=shape,
                dtype=made.dtype,
                parameters_bytes=own_bytes,
                kept=kept,
                forward_bytes=forward_bytes,
                work_bytes=work_bytes,
                passing_work_bytes=passing_work_bytes,
                workspace_bytes=recorder.workspace_bytes[place],
            )

        tensors = {"image": fake((num_samples, model.topology.in_channels, *size), dtype)}
        target = fake((num_samples, *size), torch.uint8)
        for block in model.blocks():
            own = {
                name: fake(value.shape, value.dtype).requires_grad_(value.requires_grad)
                for name, value in (*block.module.named_parameters(), *block.module.named_buffers())
            }

            def run(*inputs: Tensor, block: Block = block, own: Any = own) -> Tensor:
                with lowering(place, autocast):
                    made: Tensor = torch.func.functional_call(block.module, own, inputs)
                return made

            entries.append(entry(block.name, block.inputs, tuple(own.values()), run))
        entries.append(entry(LOSS, model.outputs(), (), lambda *logits: _loss(logits, target)))
    return tuple(entries)


class _GradientFromWithin(torch.autograd.Function):
    """Ends a graph where the gradient is made in backward, so that nothing else holds it."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, like: Tensor) -> Tensor:
        ctx.like = like
        return made.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(ctx.like), None


def block_seconds(
    model: UNet3d,
    device: torch.device,
    size: Shape,
    num_samples: int,
    autocast: torch.dtype | None,
    folder: Path,
) -> tuple[float, ...]:
    """Measure forward and backward of each block on a device, or recall what was measured.

    Args:
        model: The network; copies of its blocks are measured.
        device: The device; each block runs there alone.
        size: Voxels of the image along X, Y, Z; multiples of the total stride.
        num_samples: Number of samples in one micro-batch.
        autocast: Lower precision where the device has it, or None.
        folder: Where the times are remembered, under a key of everything that they depend on.

    Returns:
        Seconds for each block, and for the loss.

    Raises:
        CacheError: The cache folder cannot be written to.
    """
    remembered = known_seconds(model, device, size, num_samples, autocast, folder)
    if remembered is not None:
        return remembered
    dtype = next(model.parameters()).dtype
    logger.info("measuring the time of each block on %s", device)
    entries = block_bytes(model, size, num_samples, autocast, device)
    made = {entry.name: (entry.shape, entry.dtype) for entry in entries}
    made["image"] = ((num_samples, model.topology.in_channels, *size), dtype)
    format_ = memory_format(device, lowered_on(device, autocast) or dtype)
    generator = torch.Generator(device).manual_seed(0)  # not the generator that training draws from

    def random(name: str) -> Tensor:
        shape, dtype = made[name]
        values = torch.randn(shape, dtype=dtype, device=device, generator=generator)
        return laid_out(values, format_)

    def timed(run: Callable[[], None]) -> float:
        return median_seconds(recorded(run, device), (device,))

    seconds = [timed(_pass(block, random, device, autocast, format_)) for block in model.blocks()]
    seconds.append(timed(_loss_pass(model, random, (num_samples, *size))))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    description = _description(model, device, size, num_samples, autocast)
    remember(folder / f"{key_of(description)}.json", {**description, "seconds": seconds})
    return tuple(seconds)


def known_seconds(
    model: UNet3d,
    device: torch.device,
    size: Shape,
    num_samples: int,
    autocast: torch.dtype | None,
    folder: Path,
) -> tuple[float, ...] | None:
    """Return what :func:`block_seconds` has measured for the same arguments, or None.

    Args:
        model: The network, which may be on the meta device.
        device: The device.
        size: Voxels of the image along X, Y, Z.
        num_samples: Number of samples in one micro-batch.
        autocast: Lower precision where the device has it, or None.
        folder: Where the times are remembered.
    """
    description = _description(model, device, size, num_samples, autocast)

    def read(content: Any) -> tuple[float, ...]:
        known = validated(Times, content["seconds"])
        if len(known) != len(model.blocks()) + 1:
            raise ValueError("of another network")
        return known

    return recall(folder / f"{key_of(description)}.json", read)


def _description(
    model: UNet3d, device: torch.device, size: Shape, num_samples: int, autocast: torch.dtype | None
) -> dict[str, Any]:
    """Return all that the times of blocks depend on."""
    precision = [next(model.parameters()).dtype, lowered_on(device, autocast)]
    return {
        "topology": asdict(model.topology),
        "size": size,
        "num_samples": num_samples,
        "device": hardware(device),
        "precision": list(map(str, precision)),
        "versions": versions(),
    }


def _pass(
    block: Block,
    random: Callable[[str], Tensor],
    device: torch.device,
    autocast: torch.dtype | None,
    format_: torch.memory_format,
) -> Callable[[], None]:
    """Return a function that runs one block forward and backward on tensors of its own."""
    module = copy.deepcopy(block.module).to(device, memory_format=format_)  # type: ignore[call-overload]
    inputs = [random(name).requires_grad_(name != "image") for name in block.inputs]
    gradient = random(block.name)
    wanted = [value for value in (*inputs, *module.parameters()) if value.requires_grad]

    def run() -> None:
        with lowering(device, autocast):
            made = module(*inputs)
        torch.autograd.grad(made, wanted, gradient)

    return run


def _loss_pass(
    model: UNet3d, random: Callable[[str], Tensor], shape: tuple[int, ...]
) -> Callable[[], None]:
    logits = [random(name).requires_grad_() for name in model.outputs()]
    target = torch.zeros(shape, dtype=torch.uint8, device=logits[0].device)

    def run() -> None:
        torch.autograd.grad(_loss(logits, target), logits)

    return run


def _loss(logits: Sequence[Tensor], target: Tensor) -> Tensor:
    return dice_cross_entropy(logits if len(logits) > 1 else logits[0], target).total


@contextmanager
def _kept_bytes() -> Iterator[dict[int, int]]:
    """Note what autograd keeps in the context: bytes by storage."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> None:
        kept[storage_key(tensor)] = tensor.untyped_storage().nbytes()

    with handling(note):
        yield kept
