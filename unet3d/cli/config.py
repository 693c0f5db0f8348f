"""``unet3d config``."""

import click

from unet3d.cli.command import GivenSettings, command
from unet3d.cli.options import common_options


@command("unet3d config > mine.yaml", "unet3d config --preset full")
@common_options
def config(settings: GivenSettings) -> None:
    """Print every setting with its meaning, as YAML.

    Save the output to a file, edit it, and give it to unet3d train --config. The
    printed values are the defaults, changed by --config, --preset and --set.
    """
    from unet3d.config.configuration import commented_yaml

    click.echo(commented_yaml(settings.config), nl=False)
