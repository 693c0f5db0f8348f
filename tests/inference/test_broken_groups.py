"""Freeing a rank that waits for another; groups of gloo are broken in ``test_shared_executor``."""

import time
from unittest.mock import Mock

import pytest

from tests.rank_threads import store_of_all
from unet3d.inference import shared_executor
from unet3d.inference.shared_executor import aborted_with_others


@pytest.fixture
def groups(monkeypatch):
    found = [Mock(), Mock()]
    # Private, because groups can be aborted only where NCCL and GPUs are.
    monkeypatch.setattr(shared_executor, "groups_besides_default", lambda: found)
    monkeypatch.setattr(shared_executor, "POLL_SECONDS", 0.01)
    return found


def test_groups_are_aborted_as_soon_as_another_rank_says_that_it_failed(groups):
    store = store_of_all()
    store.set("broken/1", "")
    deadline = time.monotonic() + 10
    with aborted_with_others(store, "broken/1"):
        while not all(group.abort.called for group in groups):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert [group.abort.call_count for group in groups] == [1, 1]


def test_groups_stay_where_no_rank_fails_or_only_later(groups):
    store = store_of_all()
    store.set("broken/1", "")  # of groups that were made anew since
    with aborted_with_others(store, "broken/2"):
        time.sleep(0.1)
    store.set("broken/2", "")
    time.sleep(0.1)
    assert not any(group.abort.called for group in groups)
