"""The command line from a checkout: ``python cli.py train ...``, ``torchrun cli.py ...``."""

from unet3d.cli.app import main

if __name__ == "__main__":
    main()
