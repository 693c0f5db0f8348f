import os
import resource
import sys
from pathlib import Path

import pytest
import torch

from unet3d.memory.host import (
    available_bytes,
    is_out_of_gpu_memory,
    is_out_of_memory,
    readable,
    shortage_reason,
)

GIB = 2**30


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.fixture
def proc(tmp_path):
    proc = tmp_path / "proc"
    write(proc, meminfo=f"MemTotal: 9 kB\nMemAvailable: {100 * GIB // 1024} kB")
    write(proc / "self", cgroup="0::/", statm="100 50")
    return proc


def test_what_the_system_says_counts(proc, tmp_path):
    none = tmp_path / "none"
    assert available_bytes(proc, none) == 100 * GIB
    assert available_bytes(none, none) == sys.maxsize
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_bytes() <= total


@pytest.mark.parametrize(
    ("limit", "available"), [(4 * GIB, 4 * GIB - 3 * GIB + GIB), (5, 0), ("max", 100 * GIB)]
)
def test_groups_of_version_2_and_their_parents_count(proc, tmp_path, limit, available):
    groups = tmp_path / "cgroup"
    write(proc / "self", cgroup="0::/jobs/mine")
    usage = {"memory__current": 3 * GIB, "memory__stat": f"anon 5\ninactive_file {GIB}\nfile 7"}
    write(groups / "jobs/mine", memory__max="max", **usage)
    write(groups / "jobs", memory__max=limit, **usage)
    assert available_bytes(proc, groups) == available


def test_groups_of_version_1_count_where_only_the_root_is_visible(proc, tmp_path):
    groups = tmp_path / "cgroup"
    write(proc / "self", cgroup="5:cpu:/x\n4:cpuacct,memory:/docker/abc\n0::/")
    write(
        groups / "memory",
        memory__limit_in_bytes=2 * GIB,
        memory__usage_in_bytes=3 * GIB,
        memory__stat=f"cache 1\ntotal_active_file {GIB}\ntotal_inactive_file {GIB // 2}",
    )
    assert available_bytes(proc, groups) == GIB // 2


def test_a_limit_of_address_space_counts():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + GIB, before[1]))
    try:
        available = available_bytes()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert GIB / 2 < available <= GIB


CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"


@pytest.mark.parametrize(
    ("error", "on_gpu", "anywhere"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True, True),
        (RuntimeError(CUBLAS), True, True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes."), False, True),
        (MemoryError(), False, True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False, False),
        (ValueError(CUBLAS), False, False),
    ],
    ids=repr,
)
def test_memory_that_ran_out_is_known_by_its_error(error, on_gpu, anywhere):
    assert is_out_of_gpu_memory(error) == on_gpu
    assert is_out_of_memory(error) == anywhere
    assert shortage_reason(RuntimeError(CUBLAS)) == CUBLAS


def test_amounts_are_readable_however_large():
    for amount, words in ((0, "0 bytes"), (1023, "1023 bytes"), (2**30, "1 GiB")):
        assert readable(amount) == words
    assert readable(119 * 2**40 + 2**38) == "119.2 TiB"
    assert readable(10**90).endswith(" EiB")
