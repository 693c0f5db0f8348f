"""``python -m unet3d`` is the command line."""

from unet3d.cli.app import main

if __name__ == "__main__":
    main()
