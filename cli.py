"""The command line from a checkout: ``python cli.py train ...``, ``torchrun cli.py ...``."""

from unet3d.__main__ import main

if __name__ == "__main__":
    main()
