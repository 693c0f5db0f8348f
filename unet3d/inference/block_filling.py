"""Fills a store of labels block by block, together with any number of other processes.

A block is a file or object of the store, so no two processes write to one. A folder in the store
holds the claims of processes (:mod:`unet3d.inference.tasks`), and is deleted when the store is
complete. It is in the store so that it cannot survive it: what is done is said of the files around
it. The store is valid from the beginning; voxels that nobody has segmented yet are background.
"""

import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt

from unet3d.errors import VolumeError, counted
from unet3d.images.files import url_of
from unet3d.images.image import Box
from unet3d.images.label_store import LabelStore
from unet3d.images.objects import WORK, Objects
from unet3d.inference.sliding_window import WindowsDone
from unet3d.inference.tasks import Claim, Tasks
from unet3d.inputs.ahead import ahead

FIRST_POLL_SECONDS, POLL_SECONDS = 0.05, 2.0
"""How soon and, after twice that time and so on, how often to look whether other processes have
finished, or gave tasks back. A level is often finished within a second."""

LabelsOf = Callable[[], npt.NDArray[Any] | None]
"""Returns the labels of a box of the store; None: all of it is background."""

Begin = Callable[[Box, Callable[[], object]], LabelsOf]
"""Begins to read a box of the store, and returns a function that returns its labels. This function
calls the one that was given shortly before it returns, unless it returns at once."""


class Part(NamedTuple):
    """A fixed share of the blocks: part ``number`` of ``total``, counted from 1."""

    number: int = 1
    total: int = 1

    def of(self, names: Sequence[str]) -> Sequence[str]:
        """Return the share of some tasks."""
        return names[self.number - 1 :: self.total]


WHOLE = Part()


def work_folder(store: Path) -> Path:
    """Return the folder or URL of the claims of a store."""
    return store / WORK


def fill(
    path: Path,
    begin: Begin,
    part: Part = WHOLE,
    blocks_done: WindowsDone = lambda done, total: None,
) -> bool:
    """Segment the blocks of a store until none is left, then make its coarser levels.

    Other processes may do the same. Returns whether the store is complete: it is not if this
    process does only a part, and others are not finished. ``blocks_done`` gets the number of blocks
    that are done, and of all.

    Raises VolumeError if blocks could not be segmented, after all others are.
    """
    store = LabelStore(path)
    tasks = Tasks(work_folder(path))
    try:
        for level in range(store.num_levels):
            # A process that starts late may have made the folder of claims again.
            if LabelStore(path).is_complete:
                break
            if level == 0:
                blocks, share = _Level(tasks, store, level, begin), part
            else:
                blocks, share = _Level(tasks, store, level, partial(_halving, store, level)), WHOLE
            if not blocks.do(share, blocks_done):
                return False
        store.complete()
    except FileNotFoundError:  # another process has finished, and deleted what it does not need
        if not LabelStore(path).is_complete:
            raise
    if url_of(path):
        Objects(path).clear(WORK)
    else:
        shutil.rmtree(work_folder(path), ignore_errors=True)
    return True


def _halving(store: LabelStore, level: int, box: Box, soon: Callable[[], object]) -> LabelsOf:
    return lambda: store.halved(level, box)


class _Level:
    """The blocks of a level, of which this process computes some.

    A block is read and written while others are computed.
    """

    def __init__(self, tasks: Tasks, store: LabelStore, level: int, begin: Begin) -> None:
        self._tasks, self._store, self._level, self._begin = tasks, store, level, begin
        self._boxes = {f"{level}-{number}": box for number, box in enumerate(store.blocks(level))}
        self._names: Sequence[str] = ()
        self._failures: dict[str, VolumeError] = {}
        self._claims: Iterator[Claim] = iter(())
        self._begun: tuple[Claim, LabelsOf] | None = None
        """The next block, which is being read."""
        self._written: Future[None] | None = None
        """Waits for the last block, which is being written."""

    def do(self, part: Part, blocks_done: WindowsDone) -> bool:
        """Do a part of the tasks, and return whether all are done."""
        names = part.of(list(self._boxes))
        # Processes that start at one time begin at different blocks.
        first = random.randrange(max(1, len(names)))
        self._names = [*names[first:], *names[:first]]
        try:
            self._do(blocks_done)
        finally:
            if self._begun is not None:  # an error, or an interruption
                self._begun[0].give_back()
            self._finish()  # nothing is noted after all notes are deleted
        if self._failures:
            name, error = next(iter(self._failures.items()))
            raise VolumeError(
                f"{counted(len(self._failures), 'block')} of {len(self._boxes)} could not be "
                f"segmented, such as {_in_words(self._boxes[name])}: {error}"
            )
        return self._boxes.keys() <= self._tasks.done()

    def _do(self, blocks_done: WindowsDone) -> None:
        """Compute blocks until none is left."""
        pause = FIRST_POLL_SECONDS
        while True:
            if self._level == 0:
                done = self._tasks.done() & self._boxes.keys()
                blocks_done(len(done), len(self._boxes))
            self._begin_next()
            if self._begun is not None:
                self._compute()
                pause = FIRST_POLL_SECONDS
            elif self._written is not None:
                self._finish()
            elif self._left():
                time.sleep(pause)  # other processes work on these
                pause = min(2 * pause, POLL_SECONDS * self._tasks.patience)
            else:
                break

    def _left(self) -> list[str]:
        ended = self._tasks.done() | self._failures.keys()
        return [name for name in self._names if name not in ended]

    def _begin_next(self) -> None:
        """Claim a block and begin to read it, unless one is begun."""
        if self._begun is None:
            claim = next(self._claims, None)
            if claim is None:  # perhaps blocks that were given back are left
                self._claims = self._tasks.claims(self._left())
                claim = next(self._claims, None)
            if claim is not None:
                with ExitStack() as stack:
                    stack.callback(claim.give_back)
                    self._begun = claim, self._begin(self._boxes[claim.name], self._begin_next)
                    stack.pop_all()

    def _compute(self) -> None:
        """Compute the block that is begun, and begin to write it."""
        assert self._begun is not None
        (claim, labels_of), self._begun = self._begun, None
        with ExitStack() as stack:
            stack.callback(claim.give_back)
            try:
                labels = labels_of()
            except VolumeError as error:  # one damaged block must not stop the others
                self._failures[claim.name] = error
                return
            self._finish()
            stack.pop_all()
        self._written = ahead(lambda: self._write(claim, self._boxes[claim.name], labels))

    def _write(self, claim: Claim, box: Box, labels: npt.NDArray[Any] | None) -> None:
        try:
            self._store.write(self._level, box, labels)
            claim.finish()
        finally:
            claim.give_back()

    def _finish(self) -> None:
        """Wait until the last block is written."""
        written, self._written = self._written, None
        if written is not None:
            written.result()


def _in_words(box: Box) -> str:
    lines = zip("xyz", box, strict=True)
    return ", ".join(f"{axis} {part.start} to {part.stop}" for axis, part in lines)
