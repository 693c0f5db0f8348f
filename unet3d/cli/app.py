"""The entry point of the command line: the group of commands, errors, exit statuses.

Heavy imports are inside the commands, so that ``--help`` is instant.
"""

import io
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from unet3d import __version__
from unet3d.cli.check import check
from unet3d.cli.command import Commands, debug_option, is_debugging
from unet3d.cli.config import config
from unet3d.cli.convert import convert
from unet3d.cli.evaluate import evaluate
from unet3d.cli.output import log_to_terminal, show_error
from unet3d.cli.plan import plan
from unet3d.cli.predict import predict, predict_as_rank, predict_when_told
from unet3d.cli.report import report
from unet3d.cli.train import train
from unet3d.errors import Unet3dError, reason_of
from unet3d.memory.allocator import keep_host_memory, use_expandable_segments


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, by default with the arguments of the process, and exit.

    Exit status: 0 done; 1 an explained problem; 2 wrong usage; 130, 143 and 129 after Ctrl-C,
    SIGTERM and SIGHUP.
    """
    from unet3d.distributed import is_launched, is_started
    from unet3d.distributed.ranks import die_with_launcher, leave, report_end, wait_passively
    from unet3d.interruption import Interrupted, interruptible

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # File and label names may hold lone surrogates, or letters that the encoding lacks.
            stream.reconfigure(errors="backslashreplace")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    log_to_terminal()
    try:
        with interruptible():
            die_with_launcher()
            use_expandable_segments()
            keep_host_memory()
            wait_passively()
            sys.exit(commands.main(arguments, prog_name="unet3d", standalone_mode=False) or 0)
    except click.exceptions.Exit as ending:
        sys.exit(ending.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (Unet3dError, OSError) as error:
        explained = error if isinstance(error, Unet3dError) else _of_system(error)
        report_end(explained)
        if is_debugging():
            raise
        if not is_launched():  # else the process that started the ranks shows it, once
            show_error(explained)
        leave(1)
    except Interrupted as interruption:
        report_end(interruption)
        if not is_started():
            advice = "; continue with --resume" if interruption.can_resume else ""
            click.echo(f"Stopped by {interruption}{advice}", err=True)
        leave(interruption.exit_status)
    except (click.Abort, KeyboardInterrupt):
        stopped = Interrupted(signal.SIGINT)
        report_end(stopped)
        if not is_launched():
            click.echo("Stopped", err=True)
        leave(stopped.exit_status)
    except Exception as error:
        report_end(error)
        if is_debugging() or not is_launched():
            raise
        leave(1)


def _of_system(error: OSError) -> Unet3dError:
    """Return the error for a system error in the middle of a run, such as a full disk."""
    place = f"{error.filename}: " if error.filename else ""
    return Unet3dError(f"{place}{reason_of(error)}; --debug shows where")


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"]}, params=[debug_option()]
)
@click.version_option(__version__, message="unet3d %(version)s")
def commands() -> None:
    """Train 3D U-Nets, even on volumes that do not fit on one GPU, and segment scans."""


for _command in (
    *(check, plan, train, predict, evaluate, report, convert, config),
    *(predict_as_rank, predict_when_told),
):
    commands.add_command(_command)
