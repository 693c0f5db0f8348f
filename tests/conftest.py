import gc
import logging
import multiprocessing
import os
import resource
from pathlib import Path

import pytest

from unet3d.memory.allocator import use_expandable_segments

use_expandable_segments()  # as the command line does
gc.disable()  # until all tests are collected

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch  # not at the top: pytest-xdist's main process does not need PyTorch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for marker, needed in (("gpu", 1), ("multigpu", 2)):
        if num_gpus < needed:
            skip = pytest.mark.skip(
                reason=f"needs {needed} CUDA GPU(s), this machine has {num_gpus}"
            )
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(skip)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude the half million objects that imports have made from later garbage collections."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def bounded_memory(request):
    """Let no property test take more than 2 GB with any of its inputs."""
    if request.node.get_closest_marker("hypothesis") is None:
        yield
        return
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 2 * 2**20, f"it took {grown_kib} KiB"


@pytest.fixture(scope="session")
def test_data():
    """Folder of the real volumes, which are not in the repository."""
    folder = Path(os.environ.get("UNET3D_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real volumes at {folder}; set UNET3D_TEST_DATA to their folder")
    return folder


@pytest.fixture(autouse=True)
def log_levels():
    """Undo changes of log levels, as by ``--debug``, also those of a wider fixture."""
    reset_log_levels()
    yield
    reset_log_levels()


def reset_log_levels():
    logging.getLogger("unet3d").setLevel(logging.NOTSET)
    logging.getLogger().setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Cache folder that trainings on the same phantoms share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def forked_workers(monkeypatch):
    """Fork loading processes from a server that has imported everything.

    For tests that do not depend on how these start. The package spawns processes that prepare
    cases, and each of them then imports PyTorch.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["unet3d.patches.loading_server", "unet3d.patches.loader"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: context)
