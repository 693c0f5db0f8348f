"""``python -m unet3d`` is the command line."""

from unet3d.cli import main

if __name__ == "__main__":
    main()
