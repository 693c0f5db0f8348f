from unet3d.segmenter import Segmenter as Segmenter
from unet3d.segmenter import load as load
from unet3d.trainer import TrainedRun as TrainedRun
from unet3d.trainer import train as train

__version__: str
