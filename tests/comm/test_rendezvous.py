"""Only workers that are alive meet, whatever earlier attempts have left in the store."""

import re
import threading

import pytest
import torch.distributed as dist

from fleetx.comm.rendezvous import agree
from tests.waiting import GUARD, wait_for


class Worker(threading.Thread):
    """Meets the others in a thread of its own."""

    def __init__(self, store, rank, workers):
        super().__init__(daemon=True)
        self.name_of_attempt = None
        self.arguments = store, rank, workers, GUARD
        self.start()

    def run(self):
        self.name_of_attempt = agree(*self.arguments)


def attempt(store, workers):
    """What all of them agree on."""
    running = [Worker(store, rank, workers) for rank in reversed(range(workers))]
    for worker in running:
        worker.join(GUARD)
    (name,) = {worker.name_of_attempt for worker in running}
    return name


@pytest.mark.parametrize("workers", [2, 3])
def test_each_attempt_in_one_store_has_a_name_of_its_own(workers):
    store = dist.HashStore()
    names = [attempt(store, workers) for _ in range(3)]
    assert None not in names
    assert len(set(names)) == 3


def test_a_worker_of_an_attempt_before_does_not_count():
    store = dist.HashStore()
    store.set("worker 1", "dead")  # it ended before the first worker came
    first = Worker(store, 0, 3)
    third = Worker(store, 2, 3)
    wait_for(lambda: store.check(["asks dead"]), "question to the worker that has ended")
    assert first.name_of_attempt is third.name_of_attempt is None
    second = Worker(store, 1, 3)
    for worker in (first, second, third):
        worker.join(GUARD)
    assert first.name_of_attempt == second.name_of_attempt == third.name_of_attempt is not None


def test_a_first_worker_that_ended_while_it_asked_is_replaced():
    store = dist.HashStore()
    second = Worker(store, 1, 2)
    wait_for(lambda: store.check(["worker 1"]), "name of the second worker")
    store.set(f"asks {store.get('worker 1').decode()}", "dead")
    wait_for(lambda: store.check(["dead has 1"]), "answer of the second worker")
    first = Worker(store, 0, 2)
    for worker in (first, second):
        worker.join(GUARD)
    assert first.name_of_attempt == second.name_of_attempt is not None


@pytest.mark.parametrize(("rank", "missing"), [(0, "1, 2"), (1, "0")])
def test_workers_that_do_not_come_are_named(rank, missing):
    message = (
        f"all workers that the launcher has started must call fleet.init(), and within 0 s these have not: {missing}."
    )
    with pytest.raises(TimeoutError, match=re.escape(message)):
        agree(dist.HashStore(), rank, 3, 0.0)
