import os
import signal
import threading

import pytest

from fleetx.comm import beats, stopping
from fleetx.comm.beats import BeatReader, Manner, _Beats


@pytest.fixture
def noted(tmp_path, monkeypatch):
    """A worker that nobody has asked yet; what it tells its launcher. The signals' handlers are put back."""
    reader, worker = BeatReader(tmp_path / "beats", 1), _Beats()
    worker.open(reader.place(0))
    monkeypatch.setattr(stopping, "_state", stopping._State())
    monkeypatch.setattr(beats, "note_signal", worker.note_signal)
    monkeypatch.setattr(beats, "note_manner", worker.note_manner)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: reader.read(0)
    for number, handler in before.items():
        signal.signal(number, handler)


def in_a_thread(action):
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def test_a_request_of_any_thread_counts_as_a_signal(noted):
    stopping.listen()
    in_a_thread(stopping.request)
    assert stopping.is_wanted()
    assert noted().signal == signal.SIGTERM


def test_a_request_before_the_script_asks_is_not_lost(noted):
    stopping.request()
    stopping.listen()
    assert stopping.is_wanted()


def test_a_handler_of_the_scripts_own_may_request(noted):
    before = signal.signal(signal.SIGUSR1, lambda *_: stopping.request())
    stopping.listen()
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    assert stopping.is_wanted()


def test_a_forked_process_cannot_ask_for_its_worker(noted, monkeypatch):
    stopping.listen()
    worker = os.getpid()
    monkeypatch.setattr(stopping.os, "getpid", lambda: worker + 1)
    with pytest.raises(RuntimeError, match=rf"a process that the worker \({worker}\) has forked \({worker + 1}\)"):
        stopping.request()
    assert not stopping.is_wanted()


def test_outside_the_main_thread_signals_end_the_process_as_before_and_this_is_said(noted, monkeypatch):
    said = []
    monkeypatch.setattr(stopping, "tell_once", lambda _topic, message: said.append(message))
    in_a_thread(stopping.listen)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert noted().manner == Manner.NEVER_ASKS  # the launcher waits for nobody who would die of its signal
    assert "or fleet.request_stop() when the engine asks to stop" in said[0]
    stopping.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stopping.is_wanted()
    assert noted().manner == Manner.ASKS
    assert len(said) == 1
