import signal

import pytest

from fleetx.launch.stopping import STOPPING, Stopping


@pytest.mark.parametrize("is_nohup", [False, True])
def test_a_terminal_that_is_closed_stops_a_job_unless_nohup_was_asked_for(is_nohup):
    before = {number: signal.getsignal(number) for number in STOPPING}
    try:
        heeded = signal.SIG_IGN if is_nohup else signal.SIG_DFL
        signal.signal(signal.SIGHUP, heeded)
        with Stopping().listening() as stopping:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)
        assert stopping.numbers == ([signal.SIGTERM] if is_nohup else [signal.SIGTERM, signal.SIGHUP])
        assert signal.getsignal(signal.SIGHUP) == heeded
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
