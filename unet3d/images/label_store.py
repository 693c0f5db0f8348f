"""A label map as OME-Zarr 0.5, made of blocks that several processes write; needs the package zarr.

A store is a pyramid in which each level has every second voxel. A block is a file of it, called a
shard, which has several chunks. Boxes are along X, Y, Z; arrays of the store are (Z, Y, X).
"""

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.storage import LocalStore

from unet3d.atomic import write_atomically
from unet3d.images.image import Box
