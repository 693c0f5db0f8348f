"""The networks of one prediction: checked to match, and read ahead."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from unet3d.distributed.group import Group
from unet3d.errors import CheckpointError
from unet3d.inference.windows import window_of
from unet3d.inputs.ahead import each_ahead
from unet3d.inputs.plain_data import is_close, shown
from unet3d.nnunet.loading import load_network, network_from_first
from unet3d.nnunet.model_files import known_as
from unet3d.preparation.transform import Preprocessing
from unet3d.runs.checkpoint import Checkpoint, explained


class Networks:
    """Trained networks of an ensemble, with the same preparation.

    Each network predicts with the ``inference`` settings of its own ``config``. At first, only the
    descriptions are read; the first use of a network starts a thread that reads the weights of all,
    in order.
    """

    def __init__(
        self,
        names: Sequence[str],
        described: Sequence[Checkpoint],
        load: Callable[[int], Checkpoint],
    ) -> None:
        """Take descriptions, and a function that loads a network.

        Raises CheckpointError if the networks do not match.
        """
        self.names = tuple(names)
        self.described = tuple(described)
        self._load = load
        self._loaded: list[Future[Checkpoint]] = []
        for name, other in zip(self.names[1:], self.described[1:], strict=True):
            preparations = self.described[0].preprocessing, other.preprocessing
            differences = _differences(*preparations)
            if differences:
                advice = (
                    "name networks of the same channels, labels and spacing, or predict with each "
                    "of them alone"
                )
                if len({one.interpolation.clips for one in preparations}) == 2:
                    differences = ["one of them resamples as nnU-Net does"]
                    advice = "turn the other into a model of nnU-Net: unet3d convert --to nnunet"
                raise CheckpointError(
                    f"{name} cannot be averaged with {self.names[0]}: {'; '.join(differences)}; "
                    f"{advice}"
                )
            wanted, found = (one.config.inference.averaging for one in (self.described[0], other))
            if wanted != found:
                raise CheckpointError(
                    f"{name} cannot be averaged with {self.names[0]}: its inference.averaging is "
                    f"{found} instead of {wanted}; name networks of one kind"
                )

    @classmethod
    def of(cls, *checkpoints: Checkpoint) -> "Networks":
        """Return the networks of checkpoints that are already in memory."""
        names = [f"network {number}" for number in range(1, len(checkpoints) + 1)]
        return cls(names, checkpoints, checkpoints.__getitem__)

    @classmethod
    def read(
        cls, paths: Sequence[Path], group: Group, changes: Mapping[str, Any] | None = None
    ) -> "Networks":
        """Return the networks of files that the first rank names; a collective call.

        Ranks on one machine all read the files; with several machines, the first rank sends them.
        The networks predict with their own settings, except for ``changes`` by dotted key.
        """
        named = group.from_first(lambda: [[str(path), str(known_as(path))] for path in paths])
        paths, names = [Path(path) for path, _ in named], [name for _, name in named]

        def changed(network: Checkpoint) -> Checkpoint:
            return replace(network, config=network.config.with_values(changes or {}))

        if group.ranks.local_world_size < group.size:
            loaded = [changed(network_from_first(path, group)) for path in paths]
            return cls(names, loaded, loaded.__getitem__)
        states = group.from_first(lambda: list(map(_state, paths)))
        described = [changed(load_network(path, "description")) for path in paths]

        def load(index: int) -> Checkpoint:
            loaded = changed(load_network(paths[index]))
            # A model of nnU-Net has more files, which its description is made of.
            is_same = replace(loaded, model={}) == replace(described[index], model={})
            if not is_same or _state(paths[index]) != states[index]:
                raise CheckpointError(
                    f"{names[index]} was replaced while it was in use; give the same command again"
                )
            return loaded

        return cls(names, described, load)

    def with_settings(self, changes: Mapping[str, Any]) -> "Networks":
        """Return the same networks with other settings, by dotted key."""

        def changed(network: Checkpoint) -> Checkpoint:
            return replace(network, config=network.config.with_values(changes))

        described = [changed(network) for network in self.described]
        return Networks(self.names, described, lambda index: changed(self._load(index)))

    @property
    def preprocessing(self) -> Preprocessing:
        """How all networks prepare an image."""
        return self.described[0].preprocessing

    @property
    def add_up(self) -> bool:
        """Whether the networks' logits can be added up window by window, as if from one network.

        True if logits are averaged and all networks have the same windows.
        """
        first, *others = map(_computing, self.described)
        of_logits = self.described[0].config.inference.averaging == "logits"
        return not others or (of_logits and all(one == first for one in others))

    def __len__(self) -> int:
        """Return the number of networks."""
        return len(self.described)

    def __getitem__(self, index: int) -> Checkpoint:
        """Return a network with its weights, once they are read; CheckpointError if that fails."""
        if not self._loaded:
            self._loaded = each_ahead(self._load, range(len(self)))
        return self._loaded[index].result()


def _state(path: Path) -> list[int]:
    """Return numbers that change when a file is replaced or written."""
    with explained(known_as(path)):
        found = path.stat()
    # Some network file systems number a file anew while it is in use.
    return [found.st_size, found.st_mtime_ns]


def _computing(network: Checkpoint) -> tuple[Any, ...]:
    settings = network.config.inference
    windows = window_of(network), settings.overlap, settings.batch_size
    return network.topology, network.dtype, network.mirrored_axes, windows


def _differences(first: Preprocessing, other: Preprocessing) -> list[str]:
    """Return how a preparation differs from the first network's, in words.

    The ignore label does not matter, because no network predicts it. Neither does ``least_std``,
    because the first network's is used.
    """
    wanted, found = _compared(first), _compared(other)
    return [
        f"its {name} is {shown(found[name])} instead of {shown(wanted[name])}"
        for name in wanted
        if not is_close(wanted[name], found[name])
    ]


def _compared(preprocessing: Preprocessing) -> dict[str, Any]:
    return replace(preprocessing.without_least_std(), ignore_value=None).to_dict()
