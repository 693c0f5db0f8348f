"""The command line from a checkout: ``python cli.py train ...``, ``torchrun cli.py ...``."""

from unet3d.cli import main

if __name__ == "__main__":
    main()
