"""Which cases a run trains and validates on, with digests of their files."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import ConfigDict, Field

from unet3d.errors import counted, some
from unet3d.inputs.plain_data import at_most, key_of, printable

if TYPE_CHECKING:  # prediction reads a checkpoint with a split, but needs no data set
    from unet3d.datasets.dataset import Case
    from unet3d.preparation.cache import Cache

MAX_NAMED = 3
"""Most cases that a message names for each kind of difference."""

MAX_CASES = 1_000_000

Text = Annotated[str, Field(max_length=4096, strict=True)]
"""A digest, or the name of a case, which is part of a path."""
Contents = Annotated[dict[Text, Text], at_most(MAX_CASES)]


@dataclass(frozen=True, kw_only=True)
class CaseSplit:
    """The cases of a run by name, each with a digest of the bytes of its files.

    So a data set may be moved, but a changed file makes it a different data set.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="ignore")  # data.json has more

    training: Contents
    """The cases that are trained on."""
    validation: Contents
    """The cases that are validated on."""

    @classmethod
    def of(
        cls, training: "Sequence[Case]", validation: "Sequence[Case]", cache: "Cache"
    ) -> "CaseSplit":
        """Return the split of cases; digests of known files come from the cache."""
        return cls(
            training={case.name: content_of(case, cache) for case in training},
            validation={case.name: content_of(case, cache) for case in validation},
        )

    @property
    def fingerprint(self) -> str:
        """One digest of the names and contents of all cases."""
        return key_of(asdict(self))

    @property
    def twins(self) -> list[str]:
        """Validation cases with the same files as a training case: copies, or links."""
        trained = set(self.training.values())
        return [name for name, content in self.validation.items() if content in trained]

    def changes_since(self, before: "CaseSplit") -> list[str]:
        """Return how this split differs from an earlier one, a phrase for each kind of change."""
        then = {**before.training, **before.validation}
        now = {**self.training, **self.validation}
        both = then.keys() & now.keys()
        moved_back = before.training.keys() & self.validation.keys()
        moved = before.validation.keys() & self.training.keys()
        return [
            _phrase(names, words)
            for names, words in (
                (self.training.keys() - then.keys(), "new in training"),
                (self.validation.keys() - then.keys(), "new in validation"),
                (then.keys() - now.keys(), "missing now"),
                (moved_back, "in training before, in validation now"),
                (moved, "in validation before, in training now"),
                ({name for name in both if then[name] != now[name]}, "with changed contents"),
            )
            if names
        ]


def content_of(case: "Case", cache: "Cache") -> str:
    """Return a digest of the content of a case's files."""
    return key_of([cache.digest(path) for path in (*case.images, case.label)])[:32]


def _phrase(names: set[str], words: str) -> str:
    listed = some([*map(printable, sorted(names))], MAX_NAMED)
    return f"{counted(len(names), 'case')} {words} ({listed})"
