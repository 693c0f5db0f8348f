"""What nnU-Net's plans call what is known here; each table is read in both directions."""

from collections.abc import Mapping
from typing import Literal

from unet3d.preparation.normalization import Kind

Resampling = Literal["resample_data_or_seg_to_shape"]
Network = Literal["PlainConvUNet", "ResidualEncoderUNet"]
Reader = Literal[
    "SimpleITKIO", "NibabelIO", "Tiff3DIO", "NibabelIOWithReorient", "SimpleITKIOWithReorient"
]

NETWORKS: Mapping[Network, Literal["plain", "residual"]] = {
    "PlainConvUNet": "plain",
    "ResidualEncoderUNet": "residual",
}
"""The encoder of each network."""

READERS: Mapping[Reader, Literal["stored", "ras"]] = {
    "SimpleITKIO": "stored",
    "NibabelIO": "stored",
    "Tiff3DIO": "stored",
    "NibabelIOWithReorient": "ras",
    "SimpleITKIOWithReorient": "ras",
}
"""The axes of the arrays that each of nnU-Net's readers returns, in reverse. The first reader of
some axes is written."""

SCHEMES: Mapping[tuple[str, bool], Kind] = {
    ("CTNormalization", False): "ct",
    ("ZScoreNormalization", False): "z-score",
    ("ZScoreNormalization", True): "z-score-inside",
    ("NoNormalization", False): "none",
    ("RescaleTo01Normalization", False): "rescale",
    ("RGBTo01Normalization", False): "rgb",
}
"""The normalisation that a scheme is, by its name and whether it is masked. Where there is none
that is masked, nnU-Net does without."""

THICK: Mapping[bool | None, Literal["auto", "always", "never"]] = {
    None: "auto",
    True: "always",
    False: "never",
}
"""When slices are resampled one by one, by ``force_separate_z``."""
