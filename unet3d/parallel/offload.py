"""Parks skips in host memory while nothing on their device reads them.

A skip is made early in forward and read late, and in backward the other way round. At the peak of
a step, between the two, all skips are there and none is in use::

    forward    encoder.0.1 ─ encoder.1.0 … decoder.0.0 ─ … head ─ loss
                    └─ copy out ─────────────┘ give the memory back
    backward   … decoder.0.1 ─ decoder.0.0 ─ … ─ encoder.1.0 ─ encoder.0.1
                    └─ copy in ─┘ give back    copy in ─┘

What is offloaded is memory, not a tensor: it is emptied and filled again below every tensor that
shares it, be it one that a stage still hands on or one that autograd has saved, by whichever
operation. So backward does the same as without, on the same values. Where a skip is not kept but
made again (:mod:`unet3d.kernels.recompute`), what it is made from is offloaded in its place.

A copy runs on a stream of its own, but memory is taken and given back on the stream that computes,
in the order of its work: no event of another stream decides when memory is free, and a prediction
finds the peak that is measured.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cache
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from unet3d.kernels import kept_for
from unet3d.memory.fake_devices import is_gpu
from unet3d.model import Block

Resized = Callable[[Tensor], None]
"""Is told of a tensor whose memory was given back or taken again."""


def supports_offload(device: torch.device) -> bool:
    """Return whether a device has memory that is worth more than the host's."""
    return is_gpu(device)


def skip_names(blocks: Sequence[Block]) -> frozenset[str]:
    """Return the tensors that both the encoder and the decoder read after the encoder made them.

    Args:
        blocks: Of the whole network.
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
        """Start the copy to the host.

        Args:
            tensor: All of its memory; work that is queued already makes it.
            resized: Is told when the memory comes and goes.
        """
        # Its data has a version of its own: filling the memory again changes no saved tensor.
        self._tensor = tensor.data
        self._resized = resized
        self._num_bytes = tensor.untyped_storage().nbytes()
        # PyTorch keeps pinned memory for later, and knows which copies still read it.
        pinned = tensor.device.type == "cuda"
        self._host = torch.empty_like(self._tensor, device="cpu", pin_memory=pinned)
        self._is_here = True
        self._copied = self._copy(self._host, self._tensor, direction="out")

    def release(self) -> None:
        """Give the memory back, once the copy to the host is there."""
        if self._is_here:
            self.wait()
            self._resize(0)
            self._is_here = False

    def fetch(self) -> None:
        """Start to fill the memory again, if it was given back."""
        if not self._is_here:
            self._resize(self._num_bytes)
            self._is_here = True
            self._copied = self._copy(self._tensor, self._host, direction="in")

    def wait(self) -> None:
        """Make work that is queued from now on see the values."""
        self.fetch()
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
        # The source is being made, or the target's memory is still used for something else.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event: torch.cuda.Event = stream.record_event()
        return event


class StepOffload:
    """Offloads the skips of all micro-batches of a step, whichever stages make and read them."""

    def __init__(self, blocks: Sequence[Block], resized: Resized) -> None:
        """Find the skips.

        Args:
            blocks: Of the whole network.
            resized: Is told when memory comes and goes.
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
        """Return what offloads the skips of one micro-batch in one stage.

        Args:
            device: The stage's.
            blocks: The stage's.
            micro_batch: Its number.
            leaves: The stage's inputs by name.

        Returns:
            None where the device has no memory that is worth more than the host's.
        """
        if not self._skips or not supports_offload(device):
            return None
        memory = self._memory[micro_batch]
        offloader = SkipOffloader(blocks, self._skips, memory, self._resized)
        offloader.begin(leaves)
        return offloader


class SkipOffloader:
    """Offloads the skips of one micro-batch in one stage, block by block.

    In forward a skip is given back after its last reader; where only the next level reads it
    here, at the end of the stage, by when its copy has had time. In backward it is fetched for each
    reader and given back in between. While one is in use the next is on its way.
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
            blocks: The stage's.
            skips: Names, of the whole network.
            offloaded: What other stages have offloaded of this micro-batch, by storage: two stages
                on one device share the memory of a skip.
            resized: Is told when memory comes and goes.
        """
        self._skips = skips
        self._offloaded = offloaded
        self._resized = resized
        self._held: dict[str, OffloadedMemory] = {}
        self._index = {block.name: index for index, block in enumerate(blocks)}
        self._needs = [
            {name for name in (block.name, *block.inputs) if name in skips} for block in blocks
        ]
        self._last_reader = {name: block.name for block in blocks for name in block.inputs}

    def begin(self, leaves: Mapping[str, Tensor]) -> None:
        """Take hold of the skips that other stages made.

        Args:
            leaves: The stage's inputs.
        """
        for name, leaf in leaves.items():
            self._hold(name, leaf)

    def before(self, block: Block) -> None:
        """Have a block's inputs there, in forward."""
        for name in block.inputs:
            if name in self._held:
                self._held[name].wait()

    def after(self, block: Block, made: Tensor) -> None:
        """Park what a block made, and give back what it was the last to read, in forward.

        Args:
            block: Which has run.
            made: Its result.
        """
        index = self._index[block.name]
        self._hold(block.name, kept_for(made))
        made.register_hook(lambda _: self._before_backward(index))  # type: ignore[no-untyped-call]
        for name in block.inputs:
            follows_maker = self._index.get(name) == index - 1
            is_last = self._last_reader[name] == block.name
            if name in self._held and is_last and not follows_maker:
                self._held[name].release()

    def end_forward(self) -> None:
        """Give back all that is still there; what other stages read has been sent."""
        for memory in self._held.values():
            memory.release()

    def begin_backward(self) -> None:
        """Start to fetch what the last block needs."""
        for name in self._needs[-1]:
            if name in self._held:
                self._held[name].fetch()

    def end_backward(self) -> None:
        """Let go of everything."""
        for memory in self._held.values():
            memory.release()
        self._held.clear()

    def _hold(self, name: str, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        is_all = storage.nbytes() == tensor.numel() * tensor.element_size()
        if name not in self._skips:
            return
        memory = self._offloaded.get(storage._cdata)
        if memory is None and is_all:
            memory = OffloadedMemory(tensor, self._resized)
            self._offloaded[storage._cdata] = memory
        if memory is not None:
            self._held[name] = memory

    def _before_backward(self, index: int) -> None:
        """Fetch what a block needs, and soon the next; give back what neither does.

        Autograd goes through the blocks in the reverse of the order in which they ran.
        """
        earlier = [number for number in range(index) if self._needs[number]]
        following = self._needs[earlier[-1]] if earlier else set()
        # The first one comes just in time, for memory is at its peak when backward starts.
        is_soon = bool(self._needs[index]) or bool(self._needs[index - 1] if index else ())
        for name in list(self._held):
            memory = self._held[name]
            if name in self._needs[index]:
                memory.wait()
                if self._index.get(name) == index:  # its maker is the last; autograd frees it
                    del self._held[name]
            elif name in following:
                if is_soon:
                    memory.fetch()
            else:
                memory.release()


@cache
def _copy_stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    """Return the stream of one direction: a link to the host carries both at once."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
