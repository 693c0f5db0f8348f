"""``unet3d config``."""

from pathlib import Path

import click

from unet3d.cli.options import config_options


@click.command()
@config_options
def config(config_path: Path | None, presets: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    """Print every setting with its meaning, as YAML that --config of train takes.

    The values are the defaults, or those of --config, --preset and --set.
    """
    from unet3d.config import load_config, preset_changes
    from unet3d.config.configuration import commented_yaml

    changes = (*preset_changes(presets), *overrides)
    click.echo(commented_yaml(load_config(config_path, changes)), nl=False)
