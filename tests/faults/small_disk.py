"""Run a command in a file system of its own, of a given size."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

from tests.warm import run_command

NEW_USERS, NEW_MOUNTS = 0x10000000, 0x00020000  # linux/sched.h


def mount(disk, options):
    """Mount a file system in memory that only this process sees; it must have one thread."""
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_USERS | NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "no namespaces")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", disk], check=True)


def run(words, disk, size_kib, read_only, after):
    """Run ``unet3d WORDS`` in a folder as a small disk, with its files; copy the result."""
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
