"""The effects of the allocators' settings on a process."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from unet3d.memory.allocator import keep_host_memory
if "keep" in sys.argv:
    keep_host_memory()
import numpy as np

def touch():
    for _ in range(10):
        np.ones(8 * 2**20)  # 64 MiB: more than glibc ever keeps of its own accord

touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(*arguments: str, **variables: str) -> int:
    """Return the page faults for ten large tensors, after ten others were freed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    process = subprocess.run(
        [sys.executable, "-c", FAULTS, *arguments],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(process.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
@pytest.mark.nightly
def test_freed_memory_is_used_again():
    by_default = page_faults()
    assert by_default > 300  # 64 MiB are 16,384 pages, or 32 huge ones
    assert page_faults("keep") < by_default / 10
    # Variables that the user has set are kept.
    assert page_faults("keep", MALLOC_MMAP_THRESHOLD_="65536") > 300  # pages of either size
