"""Parts of a network that run again in backward instead of keeping activations.

PyTorch's graph is built once, in forward, with placeholders instead of saved tensors. When backward
first needs a saved tensor of a part, the part runs again and fills its placeholders (Chen et al.,
arXiv 1604.06174). So backward is the same as without recomputing: the same gradients, added in the
same order, and each tensor is freed as soon as it has been used.

In the second run, too, normalised features are recomputed instead of being kept
(:mod:`unet3d.kernels.recompute`), as in a network without parts.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from unet3d.kernels import recomputed_in_backward
from unet3d.kernels.maps import detached, with_marks
from unet3d.kernels.recompute import (
    Recompute,
    nothing_offered,
    offer,
    recomputed,
    recomputing,
)
from unet3d.memory.saved_tensors import Handler, Kept, Saved, handling, save
from unet3d.model.network import AfterBlock, Block, run_block, run_blocks
from unet3d.torch_private import storage_key

Lowered = Callable[[], AbstractContextManager[None]]
"""Returns the context, such as autocast, that blocks run in."""


def recomputed_parts(blocks: Sequence[Block], num_alive: int) -> tuple[tuple[Block, ...], ...]:
    """Return the parts, each a group of blocks, that run again in backward one by one.

    The encoder's parts end where features are small: behind the first block of each level, which
    has reduced them. So the large features of a level, including its skip, are not kept but
    recomputed from the result of the level's first block; at full resolution, from the image.

    The decoder is not recomputed if backward follows at once: its activations would exist again
    when backward begins, at the peak of memory. Otherwise it is recomputed level by level. A
    network without encoder and decoder is always recomputed level by level. ``num_alive`` is the
    number of micro-batches whose activations exist at a time.
    """
    level_of = {block.name: block.level for block in blocks}
    parts: dict[tuple[object, ...], list[Block]] = {}
    for block in blocks:
        if block.path == "encoder":
            key: tuple[object, ...] = (
                block.path,
                *(level_of.get(name, name) for name in block.inputs),
            )
        else:
            key = block.path, block.level
        if num_alive > 1 or block.path not in ("decoder", "head"):
            parts.setdefault(key, []).append(block)
    return tuple(map(tuple, parts.values()))


class PartsOfPass:
    """The parts of one forward pass; this object itself is dropped when the pass ends."""

    def __init__(self, parts: Sequence[Sequence[Block]], lowered: Lowered) -> None:
        """Prepare a pass; the blocks of each part are in the order in which they run."""
        made = [_Part(blocks, lowered) for blocks in parts]
        self._part_of = {block.name: part for part in made for block in part.blocks}
        self._results: dict[str, _Result] = {}

    def run(self, block: Block, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run one block, of a part or of none; see :func:`~unet3d.model.run_blocks`."""
        part = self._part_of.get(block.name)
        if part is None:
            return run_block(block, inputs)
        for name, tensor in inputs.items():
            if name not in part.inputs and self._part_of.get(name) is not part:
                known = self._results.get(name)
                is_quick = known is not None and known.is_quick
                part.inputs[name] = known if known and is_quick else _Given(tensor)
        made = part.run(block, inputs)
        result = self._results[block.name] = _Result(part, block.name, made.requires_grad)
        offer(made, result)
        return made


class _Part:
    """Blocks that run again together."""

    def __init__(self, blocks: Sequence[Block], lowered: Lowered) -> None:
        self.blocks = blocks
        self.inputs: dict[str, _Given | _Result] = {}
        """Sources of the part's inputs; empty after it has run again."""
        self.results: WeakValueDictionary[str, _Result] = WeakValueDictionary()
        """Results that backward may request."""
        self._lowered = lowered
        self._places: list[weakref.ref[_Place]] = []
        self._own = frozenset(
            storage_key(tensor)
            for block in blocks
            for tensor in (*block.module.parameters(), *block.module.buffers())
        )

    def run(self, block: Block, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run a block for the first time."""
        with nothing_offered(), handling(self._leave_place):
            return run_block(block, inputs)

    def run_again(self) -> None:
        """Fill the placeholders, and hand out the results."""
        places = iter(self._places)
        self._run_all(partial(self._fill, places), after=self._after)
        if next(places, None) is not None:
            raise RuntimeError(_CHANGED)
        self.inputs.clear()

    def run_for(self, name: str) -> Tensor:
        """Run the part again to return one result; no other tensor is kept."""
        return self._run_all(lambda tensor: _NOTHING, wanted=(name,))[name]

    def _after(self, block: Block, made: Tensor) -> None:
        """Make a result available without another run."""
        result = self.results.get(block.name)
        if result is not None:
            result.again = recomputing(made)

    def _run_all(
        self,
        handler: Handler,
        wanted: Sequence[str] = (),
        after: AfterBlock | None = None,
    ) -> dict[str, Tensor]:
        with (
            torch.enable_grad(),
            self._lowered(),
            recomputed_in_backward(),
            handling(handler),
            _counted_once(self.blocks),
        ):
            inputs = {name: source.enter() for name, source in self.inputs.items()}
            made = run_blocks(self.blocks, inputs, wanted, after)
            return {name: detached(tensor) for name, tensor in made.items()}

    def _leave_place(self, tensor: Tensor) -> Saved | None:
        if self._is_own(tensor):
            return None
        place = _Place(self)
        self._places.append(weakref.ref(place))
        return place

    def _fill(self, places: Iterator["weakref.ref[_Place]"], tensor: Tensor) -> Saved:
        if not self._is_own(tensor):
            reference = next(places, None)
            if reference is None:
                raise RuntimeError(_CHANGED)
            place = reference()
            if place is not None:  # else backward does not need it any more
                place.fill(recomputed(tensor) or Kept(tensor.detach()))  # without the graph
        return _NOTHING

    def _is_own(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter or a buffer, which exists anyway."""
        return storage_key(tensor) in self._own


class _Place:
    """Stands for a tensor that a part saves, before and after it has run again."""

    def __init__(self, part: _Part) -> None:
        self._part: _Part | None = part
        self._content: Saved | None = None

    def fill(self, content: Saved) -> None:
        self._part, self._content = None, content

    def restore(self) -> Tensor:
        if self._part is not None:
            self._part.run_again()
        assert self._content is not None  # it has been filled
        return self._content.restore()


class _Nothing:
    """Stands for tensors that the graph of a second run would save; that graph has no backward."""

    def restore(self) -> Tensor:
        raise AssertionError(_NO_BACKWARD)


_NO_BACKWARD = "no backward goes through the graph of a second run"
_NOTHING = _Nothing()
_CHANGED = (
    "a part of the network saved other tensors for backward when it ran again; a module that does "
    "not do the same each time needs memory.recompute=norm or off"
)


class _Given:
    """An input that is kept."""

    def __init__(self, tensor: Tensor) -> None:
        with nothing_offered():
            self._saved = save(detached(tensor))
        self._requires_grad = tensor.requires_grad

    def enter(self) -> Tensor:
        """Return the tensor; if it needs a gradient, as the start of a graph for the second run."""
        tensor = self._saved.restore()
        return _at_start_of_graph(tensor) if self._requires_grad else tensor


class _Result:
    """Gives the result of a block in backward, by running its part again."""

    def __init__(self, part: _Part, name: str, requires_grad: bool) -> None:
        self.again: Recompute | None = None
        """Computes the result, once the part has run again."""
        self._part = part
        self._name = name
        self._requires_grad = requires_grad
        part.results[name] = self

    @property
    def is_quick(self) -> bool:
        """Whether its part is cheap to run: an encoder's first block, which reads few channels."""
        return all(
            block.path == "encoder" and block.inputs == ("image",) for block in self._part.blocks
        )

    def __call__(self) -> Tensor:
        """Return the result, which backward needs again."""
        if self.again is None:
            self._part.run_again()
        assert self.again is not None  # the second run has set it
        return self.again()

    def enter(self) -> Tensor:
        """Return the result as an input for the second run of another part."""
        tensor = self._part.run_for(self._name) if self.again is None else self.again()
        if self._requires_grad:
            tensor = _at_start_of_graph(tensor)
        offer(tensor, self)
        return tensor


def _at_start_of_graph(tensor: Tensor) -> Tensor:
    """Return a tensor that requires a gradient but is no leaf; a graph keeps its leaves alive."""
    leaf = torch.empty(0, device=tensor.device, requires_grad=True)
    entered: Tensor = _Start.apply(leaf, tensor)  # type: ignore[no-untyped-call]
    return with_marks(entered, tensor)


class _Start(torch.autograd.Function):
    """Gives a tensor a graph that has no backward."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise AssertionError(_NO_BACKWARD)


@contextmanager
def _counted_once(blocks: Sequence[Block]) -> Iterator[None]:
    """Keep batch normalisations from counting the same samples twice in their running means."""
    norms = [
        module
        for block in blocks
        for module in block.module.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module.training
        and module.track_running_stats
    ]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True
