"""How lines of the log look on a terminal."""

import logging

from unet3d.cli.command import is_debugging


class OneLineFormatter(logging.Formatter):
    """Makes each message one line without control characters, which names of files may hold.

    Tracebacks, which only ``--debug`` shows, keep their lines.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the line of a message; with ``--debug`` it says where it comes from."""
        from unet3d.inputs.plain_data import printable

        line = super().formatMessage(record)
        if is_debugging():
            line = f"{record.levelname} {record.name}: {line}"
        return printable(line, max_length=len(line))
