"""Metadata of OME-Zarr 0.4 and 0.5: groups, arrays, and the levels of pyramids."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BaseModel, Field

from unet3d.images.store_files import StoreFiles, joined
from unet3d.inputs.plain_data import printable, shown, validated
from unet3d.inputs.reading import plain_json

COMPLETE = "is_complete"
"""Attribute, in the group ``unet3d``, of stores that are written here: no file may be missing."""

Number = Annotated[float, Field(ge=-1e12, le=1e12)]
Length = Annotated[float, Field(gt=0, le=1e12)]


class Axis(BaseModel):
    """An axis, such as x in micrometres."""

    name: str
    unit: str | None = None


class Transform(BaseModel):
    """A scale or a translation along all axes."""

    type: str
    scale: list[Length] | None = None
    translation: list[Number] | None = None


def _inside(path: str) -> str:
    if ".." in Path(path).parts or Path(path).is_absolute():
        raise ValueError(f"{shown(path)} leads out of the store")
    return path


class Level(BaseModel):
    """A level of a pyramid."""

    path: Annotated[str, AfterValidator(_inside)]
    coordinateTransformations: list[Transform] = []


class Multiscale(BaseModel):
    """A pyramid, whose levels are listed from the finest on."""

    axes: Annotated[list[Axis], Field(min_length=2, max_length=5)]
    datasets: Annotated[list[Level], Field(min_length=1, max_length=64)]
    coordinateTransformations: list[Transform] = []

    def placed(self, level: Level) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the scale and translation along each axis, in the units of the axes."""
        num_axes = len(self.axes)
        scale, translation = np.ones(num_axes), np.zeros(num_axes)
        for one in (*level.coordinateTransformations, *self.coordinateTransformations):
            values = {"scale": one.scale, "translation": one.translation, "identity": []}
            found = values.get(one.type)
            if found is None or len(found) not in (num_axes, 0):
                raise ValueError(
                    f"a transformation of type {shown(one.type)} has no {num_axes} numbers"
                )
            if one.type == "scale":
                scale, translation = scale * found, translation * found
            elif one.type == "translation":
                translation = translation + found
        return scale, translation


@dataclass(frozen=True, kw_only=True)
class Node:
    """A group or an array of a store, as its metadata describe it."""

    files: StoreFiles
    name: str
    """Name of its folder."""
    zarr_format: int
    attributes: Mapping[str, Any]
    array: Mapping[str, Any] | None
    """The description of an array; None for a group."""

    @classmethod
    def of(cls, files: StoreFiles, name: str) -> "Node | None":
        """Read the metadata of a node; None if there is none."""

        def content(file: str) -> Any:
            found = files.metadata(joined(name, file))
            try:
                return None if found is None else json_object(plain_json(found))
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from error

        described = content("zarr.json")
        if described is not None:
            attributes = described.get("attributes", {})
            array = described if described.get("node_type") == "array" else None
        else:
            array = content(".zarray")
            if array is None and content(".zgroup") is None:
                return None
            attributes = content(".zattrs") or {}
        return cls(
            files=files,
            name=name,
            zarr_format=2 if described is None else 3,
            attributes=json_object(attributes),
            array=array,
        )

    def child(self, name: str) -> "Node | None":
        """Return a node in this group; None if there is none."""
        return Node.of(self.files, joined(self.name, name))

    @property
    def ome(self) -> Mapping[str, Any]:
        """The metadata of OME-Zarr 0.5, or of 0.4, which are not in a group of their own."""
        ome = self.attributes.get("ome", self.attributes)
        return ome if isinstance(ome, dict) else {}

    @property
    def pyramid(self) -> Multiscale | None:
        """The first pyramid of a group; None if it has none."""
        listed = self.ome.get("multiscales")
        if listed is None:
            return None
        first = listed[0] if isinstance(listed, list) and listed else listed
        axes = first.get("axes") if isinstance(first, dict) else None
        if not isinstance(axes, list) or not all(isinstance(one, dict) for one in axes):
            raise ValueError("axes have no names and units as in versions 0.4 and 0.5")
        return validated(Multiscale, first)

    @property
    def channel_names(self) -> tuple[str, ...]:
        """The labels of channels, or none."""
        with suppress(LookupError, TypeError):
            return tuple(printable(one["label"]) for one in self.ome["omero"]["channels"])
        return ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an array; empty for a group, or if it is not one of integers."""
        shape = None if self.array is None else self.array.get("shape")
        if isinstance(shape, list) and all(isinstance(size, int) for size in shape):
            return tuple(shape)
        return ()

    def levels(self, pyramid: Multiscale) -> list["Node"]:
        """Return the arrays of a pyramid, up to one that is missing."""
        found: list[Node] = []
        for level in pyramid.datasets:
            node = self.child(level.path)
            if node is None or len(node.shape) != len(pyramid.axes):
                break
            found.append(node)
        return found

    @property
    def is_complete(self) -> bool | None:
        """Whether a store that is written here has all of its files; None for other stores."""
        ours = self.attributes.get("unet3d")
        found = ours.get(COMPLETE) if isinstance(ours, dict) else None
        return found if isinstance(found, bool) else None


def json_object(found: Any) -> Any:
    """Return an object of JSON; ValueError for anything else."""
    if not isinstance(found, dict):
        raise ValueError(f"it is {shown(found)}")
    return found
