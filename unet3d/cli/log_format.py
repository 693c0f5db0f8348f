"""How lines of the log look on a terminal."""

import logging


class OneLineFormatter(logging.Formatter):
    """Makes each message one line without control characters, which names of files may hold.

    Tracebacks, which only ``--debug`` shows, keep their lines.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the line of a message.

        Args:
            record: What is logged.
        """
        from unet3d.plain_data import printable

        line = super().formatMessage(record)
        return printable(line, max_length=len(line))
