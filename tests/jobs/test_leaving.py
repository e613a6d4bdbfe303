"""Workers that leave before the job is done, where no fleetrun knows it: their exit code says so."""

import signal

import pytest

from tests.jobs.bare import Bare

pytestmark = [pytest.mark.middle, pytest.mark.xdist_group("leaving")]

TRAINS = """
import atexit, itertools, os, sys, threading, time
import torch
import fleetx as X
from fleetx import fleet
note, way = sys.argv[1:]
fleet.init()
rank = fleet.worker_index()
model = fleet.distributed_model(torch.nn.Linear(2, 2))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
checkpoints = X.Checkpoints(os.path.join(os.path.dirname(note), "saved"), model=model, optimizer=optimizer)
def at_exit():
    with open(note[:-1] + "0") as file:
        print("at exit, worker 0 has", file.read(), flush=True)
atexit.register(at_exit)
def say(text):
    with open(note + ".new", "w") as file:
        file.write(text)
    os.replace(note + ".new", note)
def train():
    for number in itertools.count():
        optimizer.minimize(model(torch.ones(2)).sum())
        if fleet.stop_requested():
            print("leaves after", number, flush=True)
            checkpoints.save(number, asynchronous=True)
            if rank == 0:
                time.sleep(1)
                say("saved a file of its own")
            fleet.leave()
        if number == 3:
            say(str(os.getpid()))
        if way == "request" and number == 9 and rank == 1:
            threading.Thread(target=fleet.request_stop).start()
        time.sleep(0.01)
if way == "thread":
    trains = threading.Thread(target=train)
    trains.start()
    while True:  # until the thread ends the process
        time.sleep(0.1)
        if os.path.exists(os.path.join(os.path.dirname(note), "stop")):
            fleet.request_stop()
train()
"""


@pytest.fixture
def begin(tmp_path):
    jobs = []

    def begin(script, way):
        path = tmp_path / "script.py"
        path.write_text(script)
        jobs.append(Bare(path, tmp_path, way))
        return jobs[0]

    yield begin
    jobs[0].kill()


@pytest.mark.parametrize(
    ("way", "codes"),
    [
        ("request", [143, 143]),
        pytest.param("SIGINT", [143, 130], marks=pytest.mark.full),  # the code is that of the worker's own signal
        pytest.param("thread", [143, 143], marks=pytest.mark.full),
    ],
)
def test_all_workers_save_and_leave_at_the_same_update_as_processes_that_are_not_done(begin, tmp_path, way, codes):
    job = begin(TRAINS, way)
    for rank in range(2):
        job.note(rank)
    if way == "SIGINT":
        job.workers[1].send_signal(signal.SIGINT)
    elif way == "thread":
        (tmp_path / "stop").touch()
    ended, logs = job.ends()
    assert ended == codes, logs
    (left,) = {line for log in logs for line in log.splitlines() if line.startswith("leaves after")}
    assert all(log.rstrip().endswith("at exit, worker 0 has saved a file of its own") for log in logs), logs
    assert list((tmp_path / "saved").glob(f"*{left.split()[-1]}*")), list((tmp_path / "saved").iterdir())
