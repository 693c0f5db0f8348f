"""A command in a file system of its own, of some size."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

from tests.warm import run_command

NEW_USERS, NEW_MOUNTS = 0x10000000, 0x00020000  # linux/sched.h


def mount(disk, options):
    """Mount a file system in memory that only this process, which has one thread, sees."""
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_USERS | NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "no namespaces")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {user} 1"),
        ("gid_map", f"0 {group} 1"),
    ):
        Path("/proc/self", name).write_text(text)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", disk], check=True)


def run(words, disk, size_kib, read_only, after):
    """Run ``unet3d WORDS`` in a folder that is a disk, with what is in it.

    Args:
        words: Arguments.
        disk: The folder.
        size_kib: Of the disk.
        read_only: Whether nothing more can be written there.
        after: Where what the disk then holds is copied to.
    """
    before = after.with_name("before")
    shutil.copytree(disk, before)
    mount(disk, f"size={size_kib}k")
    shutil.copytree(before, disk, dirs_exist_ok=True)
    if read_only:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    os.chdir(disk)
    try:
        run_command(words)
    finally:
        os.chdir("/")
        shutil.copytree(disk, after)
