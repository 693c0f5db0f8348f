"""Running the command line inside the tests' process, where warnings are errors."""

from unet3d.cli.app import main


def run(*arguments: object) -> int:
    """Return the exit status of ``unet3d ARGUMENTS``."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as ending:
        assert isinstance(ending.code, int)
        return ending.code


def error_line(errors: str) -> str:
    """Return the one line of stderr, having seen that it is an explained error and the only one."""
    (line,) = errors.splitlines()
    assert line.startswith("Error: "), line
    return line
