"""The request of a prediction: the options of ``unet3d predict`` and of ``unet3d.predict``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from unet3d.config import Config, ParallelSettings, Reading, Spacing
from unet3d.errors import ConfigError
from unet3d.inputs.plain_data import explained

End = Annotated[int, Field(ge=0)] | None
Crop = tuple[tuple[End, End], tuple[End, End], tuple[End, End]]
"""First voxel and end along X, Y, Z; None: those of the image."""


def _counted_from_1(part: tuple[int, int]) -> tuple[int, int]:
    number, total = part
    if not 1 <= number <= total:
        raise ValueError(f"must be a number from 1 to the total, but is {number}/{total}")
    return part


class PredictionRequest(BaseModel):
    """Scans, checkpoints, settings and outputs of a prediction."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    images: tuple[Path, ...] = ()
    """Files, folders of files, or folders of DICOM slices."""
    checkpoints: tuple[Path, ...] = ()
    """The networks' files; several are averaged."""
    output: Path | None = None
    """File or folder of the segmentations; None: beside each image."""
    in_folder: bool = False
    """Whether ``output`` is a folder even if its name has an ending; set if the output is text that
    ends in /."""
    settings: Mapping[str, Any] = {}
    """Settings of windows, devices and reading, dotted key to value; others are as in training."""
    statistics: bool = False
    """Whether volume and intensity of each label are written, as JSON."""
    preview: bool = False
    """Whether a picture of each segmentation is drawn, as PNG."""
    probabilities: bool = False
    """Whether the probability of each class is written, as a NumPy file in float16."""
    skip_background: bool = False
    """Whether windows of constant intensity are skipped, such as air."""
    scratch: Path | None = None
    """Folder for unpacked scans and labels during prediction; None: they are in memory."""
    block: Annotated[int, Field(ge=128, multiple_of=128)] | None = None
    """Voxels along each side of a block of a large image; None: 512."""
    part: Annotated[tuple[int, int], AfterValidator(_counted_from_1)] | None = None
    """A fixed share of the blocks, as number and total, counted from 1; None: any that are left."""
    crop: Crop | None = None
    """Part of a large image that is segmented, first voxel and end along X, Y, Z; None: all."""
    mask: Path | None = None
    """Volume of the image's extent; where it is zero, voxels become background."""
    goes_on: bool = False
    """Whether complete results are kept, also of a single scan, and incomplete ones replaced."""
    overwrite: bool = False
    """Whether results are replaced."""

    @model_validator(mode="before")
    @classmethod
    def _with_folder(cls, values: Any) -> Any:
        """Note the / at the end of the output, which a path does not keep."""
        output = values.get("output") if isinstance(values, dict) else None
        if isinstance(output, str) and output.endswith("/"):
            return {**values, "in_folder": True}
        return values

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "PredictionRequest":
        """Return the request that plain values describe, or raise ConfigError."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(explained(error)) from error

    @property
    def inference(self) -> dict[str, Any]:
        """Return the requested settings of inference, dotted key to value."""
        return {key: value for key, value in self.settings.items() if key.startswith("inference.")}

    @property
    def placement(self) -> ParallelSettings:
        """Return devices and mode of prediction, which may differ from the ones of training."""
        return Config().with_values(self.settings).parallel

    def reading(self, near_mm: Spacing | None = None) -> Reading:
        """Return how scans are read: by default at the level nearest to a network's spacing."""
        asked = Config().with_values(self.settings).data.reading
        return asked.model_copy(update={"near_mm": asked.near_mm or near_mm})
