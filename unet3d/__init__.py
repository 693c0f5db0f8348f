"""unet3d: 3D U-Net segmentation of volumes that outgrow one GPU."""

__version__ = "0.1.0"
