import logging

from unet3d.cli.log_format import OneLineFormatter
from unet3d.cli.output import show_error
from unet3d.errors import VolumeError

HOSTILE = "scan\n\x1b[31m\udcff.nii"


def test_a_message_is_one_line_without_control_characters():
    record = logging.LogRecord("unet3d", logging.INFO, "", 1, "%s is odd", (HOSTILE,), None)
    assert OneLineFormatter("%(message)s").format(record) == r"scan\n\x1b[31m\udcff.nii is odd"
    long = logging.LogRecord("unet3d", logging.INFO, "", 1, "x" * 5000, (), None)
    assert OneLineFormatter("%(message)s").format(long) == "x" * 5000


def test_so_is_an_error(capsys):
    show_error(VolumeError(f"{HOSTILE} is odd"))
    assert capsys.readouterr().err == "Error: scan \\x1b[31m\\udcff.nii is odd\n"
