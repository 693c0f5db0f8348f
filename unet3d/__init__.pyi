from unet3d.api import Segmenter as Segmenter
from unet3d.api import TrainedRun as TrainedRun
from unet3d.api import load as load
from unet3d.api import predict as predict
from unet3d.api import train as train

__version__: str
