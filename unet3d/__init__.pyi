from unet3d.segmenter import Segmenter as Segmenter
from unet3d.segmenter import load as load

__version__: str
