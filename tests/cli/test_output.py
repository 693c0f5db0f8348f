import logging

from unet3d.cli.output import OneLineFormatter, show_error
from unet3d.errors import VolumeError

HOSTILE = "scan\n\x1b[31m\udcff.nii"


def test_messages_and_errors_are_one_line_without_control_characters(capsys, caplog):
    caplog.set_level(logging.INFO, "unet3d")
    long = "x" * 5000
    for text, shown in ((HOSTILE, r"scan\n\x1b[31m\udcff.nii"), (long, long)):
        record = logging.LogRecord("unet3d", logging.INFO, "", 1, "%s", (text,), None)
        assert OneLineFormatter("%(message)s").format(record) == shown
    show_error(VolumeError(f"{HOSTILE} is odd"))
    assert capsys.readouterr().err == "Error: scan \\x1b[31m\\udcff.nii is odd\n"
