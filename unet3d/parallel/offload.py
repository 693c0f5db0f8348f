"""Keeps skips in host memory between the encoder's forward pass and its backward pass.

::

    forward    encoder.0.1 ─ decoder.0.skip ─ encoder.1.0 ─ copy out ─ ... ─ decoder.0.0 ─ head
    backward   head ─ decoder.0.0 ─ ... ─ copy in ─ encoder.1.0 ─ decoder.0.skip ─ encoder.0.1

Saved-tensor hooks such as ``torch.autograd.graph.save_on_cpu`` free nothing here: a skip is often
recomputed (:mod:`unet3d.kernels.recompute`), which also keeps its source alive. So the storage
itself is freed, and refilled for all tensors that share it. The copies run on the compute stream,
so they neither overlap with other work nor need synchronisation.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unet3d.kernels import is_recomputed, kept_for
from unet3d.memory.fake_devices import is_gpu
from unet3d.model import Block, in_running_order
from unet3d.parallel.partition import Stage

Resized = Callable[[Tensor], None]
"""Receives a tensor whose memory was freed or allocated again."""


def skip_names(blocks: Sequence[Block]) -> frozenset[str]:
    """Return the tensors that the encoder writes, and that both encoder and decoder read."""
    made = {block.name for block in blocks if block.path == "encoder"}
    read = {(block.path, name) for block in blocks for name in block.inputs}
    return frozenset(name for name in made if {("encoder", name), ("decoder", name)} <= read)


class SkipOffload:
    """Offloads the skips that a stage both writes and reads, one micro-batch at a time."""

    def __init__(self, stage: Stage, skips: frozenset[str], resized: Resized) -> None:
        self._sent = frozenset(stage.outputs)
        self._resized = resized
        # On a CPU, skips are in host memory already.
        own = {block.name for block in stage.blocks if is_gpu(stage.slot.device)} & skips
        self._last_reader = {
            name: block.name
            for block in in_running_order(stage.blocks)
            for name in block.inputs
            if name in own
        }
        self._held: dict[str, HostCopy] = {}

    def after(self, block: Block, made: Tensor) -> None:
        """Offload a skip after its last reader in forward, until its first reader in backward."""
        for name in self._held.keys() & set(block.inputs):
            memory = self._held[name]
            if made.requires_grad:
                made.register_hook(memory.fetch)  # type: ignore[no-untyped-call]
            if self._last_reader[name] == block.name:
                del self._held[name]
                memory.release()
        if block.name in self._last_reader:
            kept = kept_for(made)
            # Another stage on this device may read the tensor that is sent.
            may_go = kept is not made or block.name not in self._sent
            if may_go and not is_recomputed(kept):  # backward does not read a recomputed tensor
                self._held[block.name] = HostCopy(kept, self._resized)

    def forget(self) -> None:
        """Free the skips of an aborted pass."""
        self._held.clear()


class HostCopy:
    """The memory of a tensor, zeros around it included, on its device or on the host."""

    def __init__(self, tensor: Tensor, resized: Resized) -> None:
        self._num_bytes = tensor.untyped_storage().nbytes()
        # ``data`` has its own version counter, so refilling the memory modifies no saved tensor.
        self._here = tensor.data.as_strided((self._num_bytes // tensor.element_size(),), (1,), 0)
        self._host: Tensor | None = None
        self._resized = resized

    def release(self) -> None:
        """Copy the memory to the host, and free it."""
        # PyTorch reuses pinned memory only after the copies that were queued with it.
        pinned = self._here.device.type == "cuda"
        self._host = torch.empty_like(self._here, device="cpu", pin_memory=pinned)
        self._host.copy_(self._here, non_blocking=True)
        self._resize(0)

    def fetch(self, gradient: Tensor | None = None) -> None:
        """Fill the memory again, if it was freed; may be a hook of a gradient."""
        if self._host is not None:
            self._resize(self._num_bytes)
            self._here.copy_(self._host, non_blocking=True)
            self._host = None

    def _resize(self, num_bytes: int) -> None:
        self._here.untyped_storage().resize_(num_bytes)
        self._resized(self._here)
