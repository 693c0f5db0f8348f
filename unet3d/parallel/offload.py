"""Offloads skips to host memory while nothing on their device reads them.

A skip is produced early in forward and read last in backward. At the peak of a step, while the
decoder works at full resolution, all skips exist and none is in use::

    forward    encoder.0.1 ─ encoder.1.0 … decoder.1.1 ─ decoder.0.0 … head ─ loss
                    └─ copy out ─────────────────────┘ free the memory
    backward   head … decoder.0.0 ─ decoder.1.1 … decoder.0.skip ─ encoder.1.0 ─ encoder.0.1
                                      └─ copy in ──────┘

What is offloaded is memory, not a tensor: it is freed and filled again underneath every tensor
that shares it, whether a stage still passes that tensor on or autograd has saved it. So backward
does the same as without offloading, on the same values. Where a skip is not kept but recomputed
(:mod:`unet3d.kernels.recompute`), the tensors it is recomputed from are offloaded instead.

A copy runs on a stream of its own, beside the work at coarse resolution: only what that takes less
than the copies do is lost. But memory is allocated and freed on the compute stream, in the
order of its work. So no event of another stream decides when memory is free, and the predicted peak
is the measured one.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cache
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from unet3d.kernels import kept_for
from unet3d.kernels.padding import is_padded, with_padding
from unet3d.memory.fake_devices import is_gpu
from unet3d.model import Block

Resized = Callable[[Tensor], None]
"""Receives a tensor whose memory was freed or allocated again."""


def supports_offload(device: torch.device) -> bool:
    """Return whether a device has memory of its own, which is scarcer than the host's."""
    return is_gpu(device)


def skip_names(blocks: Sequence[Block]) -> frozenset[str]:
    """Return the tensors that both the encoder and the decoder read after the encoder wrote them.

    Args:
        blocks: The blocks of the whole network.
    """
    path = {block.name: block.path for block in blocks}
    readers: dict[str, set[str]] = {}
    for block in blocks:
        for name in block.inputs:
            readers.setdefault(name, set()).add(block.path)
    return frozenset(
        name
        for name, paths in readers.items()
        if path.get(name) == "encoder" and paths >= {"encoder", "decoder"}
    )


class OffloadedMemory:
    """The memory of one skip on one device, and its copy in the host's memory."""

    def __init__(self, tensor: Tensor, resized: Resized) -> None:
        """Start the copy to host memory.

        Args:
            tensor: A tensor that covers its memory; work that is queued already computes it.
            resized: Is called when the memory is freed or allocated again.
        """
        # Its data has a version of its own: filling the memory again changes no saved tensor.
        self._tensor = tensor.data
        self._resized = resized
        self._num_bytes = tensor.untyped_storage().nbytes()
        # PyTorch keeps pinned memory for later, and knows which copies still read it.
        pinned = tensor.device.type == "cuda"
        self._host = torch.empty_like(self._tensor, device="cpu", pin_memory=pinned)
        self._is_here = True
        self._is_filling = False
        self._copied = self._copy(self._host, self._tensor, direction="out")

    def release(self) -> None:
        """Free the memory, once the copy to the host is complete."""
        if self._is_here:
            self._wait()
            self._resize(0)
            self._is_here = False

    def fetch(self) -> None:
        """Start to fill the memory again, if it was freed."""
        if not self._is_here:
            self._resize(self._num_bytes)
            self._is_here = True
            self._copied = self._copy(self._tensor, self._host, direction="in")
            self._is_filling = True

    def use(self) -> None:
        """Make work that is queued from now on see the values."""
        self.fetch()
        if self._is_filling:  # a copy to the host reads them too, and need not be waited for
            self._wait()
            self._is_filling = False

    def _wait(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._tensor.device).wait_event(self._copied)
            self._copied = None

    def _resize(self, num_bytes: int) -> None:
        self._tensor.untyped_storage().resize_(num_bytes)
        self._resized(self._tensor)

    def _copy(self, target: Tensor, source: Tensor, direction: str) -> torch.cuda.Event | None:
        device = self._tensor.device
        if device.type != "cuda":
            target.copy_(source)
            return None
        stream = _copy_stream(device, direction)
        # The source is still being computed, or the target's memory is still used otherwise.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event: torch.cuda.Event = stream.record_event()
        return event


class StepOffload:
    """Offloads the skips of all micro-batches of a step, whichever stages produce and read them."""

    def __init__(self, blocks: Sequence[Block], resized: Resized) -> None:
        """Find the skips.

        Args:
            blocks: The blocks of the whole network.
            resized: Is called when memory is freed or allocated again.
        """
        self._skips = skip_names(blocks)
        self._resized = resized
        self._memory: dict[int, WeakValueDictionary[int, OffloadedMemory]] = defaultdict(
            WeakValueDictionary
        )

    def of_stage(
        self,
        device: torch.device,
        blocks: Sequence[Block],
        micro_batch: int,
        leaves: Mapping[str, Tensor],
    ) -> "SkipOffloader | None":
        """Return the offloader of the skips of one micro-batch in one stage.

        Args:
            device: The stage's device.
            blocks: The stage's blocks.
            micro_batch: Number of the micro-batch.
            leaves: The stage's inputs by name.

        Returns:
            None where there are no skips, or where the device's memory is the host's.
        """
        if not self._skips or not supports_offload(device):
            return None
        memory = self._memory[micro_batch]
        offloader = SkipOffloader(blocks, self._skips, memory, self._resized)
        offloader.begin(leaves)
        return offloader


class SkipOffloader:
    """Offloads the skips of one micro-batch in one stage.

    They are away while the stage works at full resolution on its way from forward to backward: from
    the last block that is coarser, or the end of the stage, until backward comes to that block. All
    are then fetched, in the order in which they will be needed, and stay: memory is past its peak.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        skips: frozenset[str],
        offloaded: MutableMapping[int, OffloadedMemory],
        resized: Resized,
    ) -> None:
        """Find out when the stage needs which skip.

        Args:
            blocks: The stage's blocks, in the order in which they run.
            skips: Names of the skips of the whole network.
            offloaded: What other stages have offloaded of this micro-batch, by storage: two stages
                on one device share the memory of a skip.
            resized: Is called when memory is freed or allocated again.
        """
        self._skips = skips
        self._offloaded = offloaded
        self._resized = resized
        self._held: dict[str, OffloadedMemory] = {}
        self._index = {block.name: index for index, block in enumerate(blocks)}
        self._needs = [
            [name for name in (block.name, *block.inputs) if name in skips] for block in blocks
        ]
        self._last_reader = {name: i for i, needs in enumerate(self._needs) for name in needs}
        finest = min(block.level for block in blocks)
        coarse = (index for index, block in enumerate(blocks) if block.level > finest)
        self._last_coarse = max(coarse, default=len(blocks) - 1)

    def begin(self, leaves: Mapping[str, Tensor]) -> None:
        """Offload the skips that other stages produced.

        Args:
            leaves: The stage's inputs.
        """
        for name, leaf in leaves.items():
            self._hold(name, leaf)

    def before(self, block: Block) -> None:
        """Fetch a block's inputs, in forward."""
        for name in block.inputs:
            if name in self._held:
                self._held[name].use()

    def after(self, block: Block, made: Tensor) -> None:
        """Offload what a block produced, or free all that is offloaded, in forward.

        Args:
            block: The block that has run.
            made: Its result.
        """
        index = self._index[block.name]
        self._hold(block.name, kept_for(made))
        if made.requires_grad:
            made.register_hook(lambda _: self._before_backward(index))  # type: ignore[no-untyped-call]
        if index >= self._last_coarse:
            for name, memory in self._held.items():
                if index >= self._last_reader.get(name, 0):
                    memory.release()

    def end_forward(self) -> None:
        """Free all skips that remain; what other stages read has been sent."""
        for memory in self._held.values():
            memory.release()

    def end_backward(self) -> None:
        """Free what another stage on this device will need, and let go of everything."""
        for memory in self._held.values():
            memory.release()
        self._held.clear()

    def _hold(self, name: str, tensor: Tensor) -> None:
        if name not in self._skips:
            return
        if is_padded(tensor):
            tensor = with_padding(tensor.detach())
        storage = tensor.untyped_storage()
        is_all = storage.nbytes() == tensor.numel() * tensor.element_size()
        memory = self._offloaded.get(storage._cdata)
        if memory is None and is_all:
            memory = OffloadedMemory(tensor, self._resized)
            self._offloaded[storage._cdata] = memory
        if memory is not None:
            self._held[name] = memory

    def _before_backward(self, index: int) -> None:
        """Fetch what a block needs, and from the last coarse block on all that will be needed.

        Autograd goes through the blocks in the reverse of the order in which they ran.
        """
        if index <= self._last_coarse:
            for needs in reversed(self._needs[:index]):
                for name in needs:
                    if name in self._held:
                        self._held[name].fetch()
        for name in self._needs[index]:
            if name in self._held:
                self._held[name].use()
                if self._index.get(name) == index:  # its producer comes last; autograd frees it
                    del self._held[name]


@cache
def _copy_stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    """Return the stream of one direction: a link to the host carries both at once."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
