import multiprocessing

import pytest


@pytest.fixture
def forked_workers(monkeypatch):
    """Fork workers from a server that has imported all, where nothing depends on how they start.

    The package spawns those that prepare cases, and each of them then imports PyTorch.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["unet3d.patches.loading_server", "unet3d.patches.loader"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: context)
