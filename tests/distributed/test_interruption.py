import signal
from collections.abc import Iterator

import pytest

from unet3d.distributed.interruption import deferred_interruption

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """All signals act as Ctrl-C does at a terminal."""
    before = [signal.signal(number, signal.default_int_handler) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_a_request_and_the_second_acts(number: int) -> None:
    with deferred_interruption() as request:
        assert request.signal_number is None
        signal.raise_signal(number)
        assert request.signal_number == number
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_rank_is_told_more_than_once(number: int) -> None:
    with deferred_interruption(is_rank=True) as request:
        for _ in range(3):
            signal.raise_signal(number)
        assert request.signal_number == number
    with pytest.raises(KeyboardInterrupt):  # as before
        signal.raise_signal(number)


def test_what_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with deferred_interruption() as request:
        signal.raise_signal(signal.SIGHUP)
        assert request.signal_number is None
