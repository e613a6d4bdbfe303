import threading
import time

import pytest
import torch.distributed as dist

from fleetx.comm import side_store, world
from fleetx.comm.side_store import leave_together, within


@pytest.fixture
def store(monkeypatch):
    """That of worker 0 of two."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(side_store, "connect", lambda: server)
    monkeypatch.setattr(world, "size", lambda: 2)
    return server


def test_who_has_not_come_is_named(store):
    assert leave_together(0.1) == [1]


def test_the_holder_of_the_store_goes_last(store):
    store.set("leaves/1", "")
    left = []
    waits = threading.Thread(target=lambda: left.append(leave_together(60)))
    waits.start()
    while store.add("has its answer", 0) == 0:
        time.sleep(0.01)
    assert not left
    store.add("has its answer", 1)
    waits.join()
    assert left == [[]]


def test_a_store_that_is_gone_keeps_nobody(monkeypatch):
    def gone():
        raise dist.DistNetworkError("connection closed")

    monkeypatch.setattr(side_store, "connect", gone)
    assert leave_together(60) == []


def test_a_request_that_is_not_answered_is_given_up():
    stops = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        within(0.1, stops.wait)
    stops.set()
    assert within(60, lambda: 7) == 7
