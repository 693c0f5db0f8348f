"""Lengths and volumes in the unit that suits a volume: mm, µm or nm; mL or µm³."""

from collections.abc import Sequence
from dataclasses import dataclass

SMALL_MM = 0.05
"""Images with a finer spacing are from microscopes: they use µm, and nm below 0.05 µm."""

UM3_PER_ML = 1e12

MM_PER_UNIT = {
    **dict.fromkeys(("m", "meter", "metre"), 1000.0),
    **dict.fromkeys(("cm", "centimeter", "centimetre"), 10.0),
    **dict.fromkeys(("mm", "millimeter", "millimetre", "millimeters"), 1.0),
    **dict.fromkeys(("um", "µm", "μm", "micron", "microns"), 1e-3),
    **dict.fromkeys(("micrometer", "micrometre", "micrometers"), 1e-3),
    **dict.fromkeys(("nm", "nanometer", "nanometre"), 1e-6),
    **dict.fromkeys(("pm", "picometer", "picometre"), 1e-9),
    **dict.fromkeys(("Å", "\u212b", "angstrom"), 1e-7),
    **dict.fromkeys(("in", "inch"), 25.4),
}
"""Units of length by their names in files, in mm."""


def unit_mm(name: object) -> float | None:
    """Return the millimetres in a unit of length; None if the name is unknown."""
    text = str(name).strip()
    return MM_PER_UNIT.get(text) or MM_PER_UNIT.get(text.lower())


@dataclass(frozen=True, kw_only=True)
class Units:
    """The units in which lengths and volumes of an image are shown."""

    length: str = "mm"
    mm: float = 1.0
    """Millimetres in one unit of length."""
    volume: str = "mL"
    ml: float = 1.0
    """Millilitres in one unit of volume."""

    @classmethod
    def of(cls, spacing_mm: Sequence[float]) -> "Units":
        """Return the units for an image with a spacing along X, Y, Z."""
        finest = min(spacing_mm, default=1.0)
        if finest >= SMALL_MM:
            return cls()
        length, mm = ("µm", 1e-3) if finest >= SMALL_MM / 1000 else ("nm", 1e-6)
        return cls(length=length, mm=mm, volume="µm³", ml=1 / UM3_PER_ML)

    def spacing_text(self, spacing_mm: Sequence[float]) -> str:
        """Return a spacing, such as ``1 x 1 x 2.5 mm``."""
        return " x ".join(f"{mm / self.mm:.4g}" for mm in spacing_mm) + f" {self.length}"

    def length_text(self, length_mm: float) -> str:
        """Return a length, such as ``1.5 mm`` or ``20 nm``."""
        return f"{length_mm / self.mm:.4g} {self.length}"

    def volume_text(self, volume_ml: float) -> str:
        """Return a volume with three digits or more, such as ``1,234 mL`` or ``0.0120 µm³``."""
        volume = volume_ml / self.ml
        if volume >= 99.95:
            return f"{volume:,.0f} {self.volume}"
        return f"{volume:#.3g} {self.volume}" if volume else f"0 {self.volume}"


MILLIMETRES = Units()


def default_tolerance_mm(spacing_mm: Sequence[float]) -> float:
    """Return the default distance up to which surfaces agree in NSD.

    It is 1 mm; for images from microscopes, in which 1 mm is larger than a cell, it is twice the
    finest spacing.
    """
    return 1.0 if Units.of(spacing_mm) == MILLIMETRES else 2 * min(spacing_mm)
