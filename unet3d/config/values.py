"""The base of all sections of settings, and the types of values with their limits."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from unet3d.inputs.plain_data import Name as PrintableName
from unet3d.inputs.plain_data import at_most

AUTO = "may be auto"
"""Marks the type of a setting that may be left open; see :meth:`Section.may_be_open`."""

Value = TypeVar("Value")
Auto = Annotated[Value, AUTO]
"""Type of a setting that is ``auto`` by default. Until training chooses a value, the setting has
the declared one; :meth:`unet3d.config.Config.is_open` tells whether it is still ``auto``."""


class Section(BaseModel):
    """A group of settings: immutable, unknown keys refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @classmethod
    def may_be_open(cls, name: str) -> bool:
        """Return whether a setting may be left open, which is written ``auto``."""
        return name in cls.model_fields and AUTO in cls.model_fields[name].metadata

    @model_validator(mode="before")
    @classmethod
    def _leave_open(cls, values: Any) -> Any:
        """Drop settings that are ``auto``; a YAML section of only comments counts as empty."""
        if isinstance(values, dict):
            return {
                name: value
                for name, value in values.items()
                if not (isinstance(value, str) and value == "auto" and cls.may_be_open(name))
            }
        return {} if values is None else values


def _few_voxels(size: Any) -> Any:
    """Refuse a size with too many voxels in all, even if each axis is allowed."""
    if not isinstance(size, str) and math.prod(size) > MAX_PATCH_VOXELS:
        raise ValueError(f"has {math.prod(size):,} voxels; give at most {MAX_PATCH_VOXELS:,}")
    return size


def _names(value: Any) -> Any:
    """Accept ``0,1`` and 0 as names, because YAML reads them as numbers."""
    value = str(value).split(",") if type(value) in (int, str) else value
    return [str(one).strip() for one in value] if isinstance(value, list | tuple) else value


def _held_by_label_maps(value: int) -> int:
    if not 0 <= value < 2**63:
        raise ValueError("a value of a label map is at least 0 and below 2^63")
    return value


MAX_PATCH_VOXELS = 2**33
"""More than a patch can have on all GPUs of a large machine: 2048^3."""

# Each upper limit is beyond every sensible value, and small enough that nothing made from it
# overflows. Integers are strict, because otherwise `yes` would be read as 1.
NUMBER = BeforeValidator(lambda value: str(value) if isinstance(value, bool) else value)
"""Refuses ``yes``, which would be read as 1. Accepts text, because YAML reads 1e-7 as text."""
OFF = BeforeValidator(lambda value: "off" if value is False else value)
"""Accepts ``off`` as a word, which YAML reads as False."""
AS_TEXT = BeforeValidator(lambda value: str(value) if type(value) is int else value)
"""Accepts a number as a name, such as of a device."""
IN_LIST = BeforeValidator(lambda value: [value] if type(value) in (int, str) else value)
"""Accepts a single value in place of a list of them."""
NAMES = BeforeValidator(_names)
FEW_VOXELS = AfterValidator(_few_voxels)
Number = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
"""An index, counted from 0."""
FilePath = Annotated[Path, AfterValidator(Path.absolute)]
Name = Annotated[PrintableName, Field(min_length=1)]
LabelName = Annotated[int, Field(strict=True), AfterValidator(_held_by_label_maps)] | Name
"""A label by its value, or by its name."""
Many = Annotated[int, Field(gt=0, le=10**6, strict=True)]
"""A number of passes or repetitions."""
Few = Annotated[int, Field(gt=0, le=2**16, strict=True)]
"""A number of things that are in memory, or run, at once."""
Channels = Annotated[int, Field(gt=0, le=2**16, strict=True)]
Voxels = Annotated[int, Field(gt=0, le=2**16, strict=True)]
Shape = tuple[Voxels, Voxels, Voxels]
"""Voxels along X, Y, Z."""
Millimetres = Annotated[float, Field(ge=1e-9, le=1e6), NUMBER]
Spacing = tuple[Millimetres, Millimetres, Millimetres]
"""Distance in mm of neighbouring voxels along X, Y, Z."""
Fraction = Annotated[float, Field(ge=0, le=1), NUMBER]
Fold = Annotated[int, Field(ge=0, lt=10_000, strict=True)] | Literal["none"]
"""Number of the fold that validates; ``none``: train on all cases."""
Recompute = Literal["norm", "level", "off"]
Normalization = Literal["auto", "ct", "percentiles", "z-score", "none"]
Offload = Literal["none", "skips"]
LabelNames = Annotated[tuple[LabelName, ...], Field(min_length=1), at_most(2**16), IN_LIST]
