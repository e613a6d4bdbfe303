"""fleetrun starts real processes, passes on their environment, and ends as they end.

Workers that fleetrun must end sleep for ten minutes: longer than `start` and `Running` wait for a job.
"""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fleetx.comm.stopping import SILENT_WINDOWS
from tests.jobs.running import STUBBORN
from tests.jobs.starting import ROOT, start
from tests.waiting import GUARD, wait_for

REPORTS = """
import json, os, sys
from pathlib import Path
from fleetx import fleet
fleet.init()
fleet.barrier_worker()
keys = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS", "PADDLE_TRAINER_ID",
        "PADDLE_TRAINERS_NUM", "PADDLE_CURRENT_ENDPOINT", "PADDLE_TRAINER_ENDPOINTS", "FLAGS_selected_gpus"]
report = {key: os.environ.get(key) for key in keys} | {"argv": sys.argv, "main": __name__, "path": sys.path[0]}
report |= {"index": fleet.worker_index(), "num": fleet.worker_num(), "first": fleet.is_first_worker()}
Path(sys.argv[1], f"{fleet.worker_index()}.json").write_text(json.dumps(report))
"""

FAILS = """
import atexit, sys, time
atexit.register(time.sleep, 2)  # the last of the exit functions: connections are closed by then
from fleetx import fleet
fleet.init()
if fleet.worker_index() == 1:
    print("about to fail", file=sys.stderr)
    sys.exit(37)
fleet.barrier_worker()
"""

DIES = """
import os, signal, time
from fleetx import fleet
fleet.init()
if fleet.worker_index() == 0:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


@pytest.mark.middle
def test_workers_know_each_other_and_their_arguments(script, tmp_path):
    path = script(REPORTS)
    done = start(path, tmp_path, "--lr", "0.1", workers=2)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, report in enumerate(reports):
        assert (report["index"], report["num"], report["first"]) == (rank, 2, rank == 0)
        assert (report["RANK"], report["LOCAL_RANK"], report["PADDLE_TRAINER_ID"]) == (str(rank),) * 3
        assert report["WORLD_SIZE"] == report["PADDLE_TRAINERS_NUM"] == "2"
        assert report["PADDLE_TRAINER_ENDPOINTS"].split(",")[rank] == report["PADDLE_CURRENT_ENDPOINT"]
        assert report["FLAGS_selected_gpus"] == str(rank)
        assert report["argv"] == [str(path), str(tmp_path), "--lr", "0.1"]
        assert (report["main"], report["path"]) == ("__main__", str(tmp_path))
    assert done.stdout.startswith(
        "-----------  Configuration Arguments -----------\ngpus: None\nheter_worker_num: None\n"
    )
    assert "\nnproc_per_node: 2\n" in done.stdout
    assert done.stdout.count("Distributed Envs") == 1


@pytest.mark.middle
@pytest.mark.parametrize("launcher", ["torchrun", None])
def test_scripts_run_under_torchrun_and_alone(script, tmp_path, launcher):
    workers = 2 if launcher else 1
    start(script(REPORTS), tmp_path, workers=workers, launcher=launcher)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(workers)]
    assert [report["num"] for report in reports] == [workers] * workers


AS_TORCHRUN = """
import json, os, sys
from pathlib import Path
names = [name for name in os.environ if name.startswith(("ROLE_", "GROUP_", "LOCAL_", "TORCHELASTIC_"))]
place = Path(sys.argv[1], os.environ["ROLE_RANK"] + ".json")
place.write_text(json.dumps({name: os.environ[name] for name in [*names, "RANK", "WORLD_SIZE"]}))
"""


@pytest.mark.middle
def test_workers_find_the_variables_of_torchrun(script, tmp_path):
    path, found = script(AS_TORCHRUN), {}
    for launcher in ("fleetrun", "torchrun"):
        start(path, tmp_path, workers=2, launcher=launcher)
        found[launcher] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
        for worker in found[launcher]:
            for of_this_job in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"):
                assert worker.pop(of_this_job, "") or of_this_job == "TORCHELASTIC_SIGNALS_TO_HANDLE"
    assert found["fleetrun"] == found["torchrun"]


RECORDS = """
import os, sys
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    if os.environ["RANK"] == sys.argv[1]:
        raise ValueError("no such sample: 7")

main()
"""


@pytest.mark.middle
def test_what_a_program_records_in_torchs_way_is_the_named_cause(script):
    path = script(f"#!{sys.executable}{RECORDS}")
    path.chmod(0o700)
    assert start(path, "none", workers=2, options=["--no_python"]).returncode == 0
    done = start(path, "1", workers=2, options=["--no_python"], check=False)
    assert done.returncode == 1
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith("fleetrun: worker 1 failed with exit code 1 (host ")
    assert "): ValueError: no such sample: 7. Its log: " in last
    path.write_text("#!/no/such/interpreter\n")
    done = start(path, workers=1, options=["--no_python"], check=False)
    assert f"FileNotFoundError: {path}: No such file or directory" in done.stderr.rstrip().splitlines()[-1]


def test_the_launcher_ends_with_the_failing_workers_code(script):
    done = start(script(FAILS), workers=2, check=False)
    assert done.returncode == 37
    assert "about to fail" in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("fleetrun: worker 1 failed with exit code 37")


LEAVES = """
import atexit, time
from fleetx import fleet
fleet.init()
import torch
if fleet.worker_index() == 1:
    atexit._run_exitfuncs()  # connections are closed now
    atexit.register(time.sleep, 600)  # and the process takes its time
else:
    torch.distributed.all_reduce(torch.ones(1))
"""


@pytest.mark.middle
def test_a_worker_that_leaves_while_others_are_at_work_is_the_cause(script):
    done = start(script(LEAVES), workers=2, check=False)
    assert done.returncode == 1
    lines = done.stderr.rstrip().splitlines()
    assert lines[-2] == "fleetrun: worker 0 failed because it lost worker 1."
    assert lines[-1].startswith("fleetrun: worker 1 left with exit code 0 while others were still at work (host ")


@pytest.mark.middle
def test_a_signal_is_named(script):
    done = start(script(DIES), workers=2, check=False)
    assert done.returncode == 128 + signal.SIGKILL
    assert "fleetrun: worker 0 was ended by SIGKILL (host " in done.stderr


POLITE = """
import os, sys, time
open(sys.argv[1] + os.environ["RANK"], "w").write(f"{os.getpid()}")
time.sleep(600)
"""


ASKED_TO_LEAVE = "the workers are asked to save and leave"


def test_ctrl_c_ends_the_workers(script, running):
    job = running(script(POLITE))
    job.wait_for_workers()
    job.launcher.send_signal(signal.SIGINT)
    assert job.end() == 128 + signal.SIGINT
    assert job.errors.rstrip().endswith("fleetrun: stopped by SIGINT.")
    job.wait_for_the_end_of_all()


@pytest.mark.middle
def test_a_second_signal_ends_workers_that_will_not_go_with_all_they_have_started(script, running):
    job = running(script(STUBBORN))
    job.wait_for_workers()
    job.launcher.send_signal(signal.SIGTERM)
    job.wait_until_said(ASKED_TO_LEAVE)
    job.launcher.send_signal(signal.SIGTERM)
    assert job.end() == 128 + signal.SIGTERM
    assert "workers 0, 1 had not left at the second signal (SIGTERM) and were ended; what they had" in job.errors
    job.wait_for_the_end_of_all()


# Python runs this first: the process that becomes the workers does not get through its imports.
STILL_IMPORTS = """
import sys, time
if any(word.endswith("hatch.py") for word in sys.orig_argv):
    open(__file__ + ".reached", "w").close()
    time.sleep(200)
"""


@pytest.mark.middle
def test_a_signal_before_there_are_workers_is_not_lost(script, tmp_path, running):
    (tmp_path / "sitecustomize.py").write_text(STILL_IMPORTS)
    job = running(script(POLITE), PYTHONPATH=str(tmp_path))
    wait_for((tmp_path / "sitecustomize.py.reached").exists, "process for the workers")
    job.launcher.send_signal(signal.SIGTERM)
    assert job.end() == 128 + signal.SIGTERM
    assert not any(file.exists() for file in job.files)


@pytest.mark.middle
def test_nothing_outlives_a_launcher_that_is_killed(script, running):
    job = running(script(STUBBORN))
    job.wait_for_workers()
    job.launcher.kill()
    job.end()
    job.wait_for_the_end_of_all()


RESTARTED = """
import os, sys, time
from pathlib import Path
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
print(f"attempt {attempt} of worker {rank}")
if attempt == "0" and rank == "1":
    import atexit
    atexit.register(time.sleep, 600)
    raise OSError("the first attempt fails")
if attempt == "0":
    time.sleep(600)
print("half a line", end="", flush=True)
said = Path(sys.argv[1])
if rank == "0":
    said.touch()
    sys.exit()
while not said.exists():  # else the other one may be stopped before it has said so
    time.sleep(0.01)
sys.exit(7)
"""


@pytest.mark.middle
def test_restarts_keep_all_logs_and_end_with_the_last_cause(script, tmp_path):
    options = ["--max_restart", "1", "--log_dir", tmp_path / "log"]
    done = start(
        script(RESTARTED), tmp_path / "said", workers=2, check=False, options=options, env={"HIDDEN": "xyzzy42"}
    )
    assert done.returncode == 7
    lines = done.stderr.splitlines()
    restart = next(line for line in lines if line.endswith("This is restart 1 of 1."))
    assert "worker 1 failed with exit code 1 (host " in restart
    assert "OSError: the first attempt fails" in restart
    assert lines[-1].startswith("fleetrun: worker 1 failed with exit code 7 (host ")
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "launch" not in done.stderr.split("Traceback")[1].split("OSError")[0]  # only the script's own frames
    for rank in range(2):
        log = (tmp_path / "log" / f"workerlog.{rank}").read_text()
        assert (
            log.index(f"attempt 0 of worker {rank}")
            < log.index("===== job ")
            < log.index(f"attempt 1 of worker {rank}")
        )
    shown = [line for line in done.stdout.splitlines() if line.startswith("[worker 0] ")]
    assert "[worker 0] attempt 0 of worker 0" in shown
    assert shown[-1] == "[worker 0] half a line"
    assert "worker 1" not in done.stdout
    assert all("xyzzy42" not in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


FRESH = """
import os, sys, numpy, random
from pathlib import Path
file = Path(sys.argv[1], os.environ["RANK"]).open("w")  # and never closed
file.write(f"{numpy.random.rand()} {random.random()}")
def a_function_keeps_the_module_alive(): pass
"""


@pytest.mark.middle
@pytest.mark.parametrize(
    "options",
    [[], pytest.param(["--fresh_workers"], marks=pytest.mark.full)],
    ids=["forked", "fresh"],
)
def test_workers_draw_random_numbers_of_their_own(script, tmp_path, options):
    start(script(FRESH), tmp_path, workers=2, options=options)
    first, second = ((tmp_path / str(rank)).read_text().split() for rank in range(2))
    assert not set(first) & set(second)


@pytest.mark.middle
def test_a_worker_of_slurm_joins_by_its_environment(script, tmp_path):
    environment = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    environment |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_TASKS_PER_NODE": "2"}
    tasks = [
        subprocess.Popen(
            [sys.executable, str(script(REPORTS)), str(tmp_path)],
            env={**os.environ, **environment, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]
    assert [task.wait(GUARD) for task in tasks] == [0, 0]
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [(report["index"], report["num"], report["LOCAL_RANK"]) for report in reports] == [(0, 2, "0"), (1, 2, "1")]


@pytest.mark.middle
def test_different_models_on_the_workers_are_refused(script):
    done = start(
        script(
            "import torch\nfrom fleetx import fleet\nfleet.init()\n"
            "fleet.distributed_model(torch.nn.Linear(2, 2 + fleet.worker_index()))\n"
        ),
        workers=2,
        check=False,
    )
    assert done.returncode == 1
    assert "the workers differ in their models" in done.stderr


JOINS = """
import os, sys, time
import torch
from fleetx import fleet
place = sys.argv[1]
if os.environ["RANK"] == "1" and place == "imports":
    time.sleep(600)
fleet.init()
if place == "prepares":
    time.sleep(15)  # as long as it likes: no worker waits for another one
    sys.exit(0)
if os.environ["RANK"] == "1" and place == "data":
    time.sleep(600)
fleet.distributed_model(torch.nn.Linear(2, 2))
time.sleep(600)
"""


@pytest.mark.middle
@pytest.mark.parametrize(
    ("place", "workers", "stuck"),
    [
        ("data", 2, "worker 1"),
        pytest.param("first step", 1, "worker 0", marks=pytest.mark.full),
        pytest.param("imports", 2, "worker 1", marks=pytest.mark.full),
        pytest.param("prepares", 2, None, marks=pytest.mark.full),
    ],
)
def test_a_worker_that_hangs_before_its_first_step_is_named(script, place, workers, stuck):
    done = start(script(JOINS), place, workers=workers, check=False, options=["--start_timeout", "10"])
    if stuck is None:
        assert done.returncode == 0
        return
    assert done.returncode == 124
    said = done.stderr.rstrip().splitlines()[-1]
    reason = "it has not joined the others, who have waited for " if place == "imports" else "no first step for "
    assert said.startswith(f"fleetrun: {stuck} made no progress: {reason}")
    assert "the limit is 10 s (--start_timeout); its process is sleeping, in File " in said
    assert "script.py" in said


STANDS_STILL = """
import os, sys, time
import torch
import fleetx as X
from fleetx import fleet
fleet.init()
place, folder, rank = sys.argv[1], sys.argv[2], int(os.environ["RANK"])
model = fleet.distributed_model(torch.nn.Linear(2, 2))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
step = X.Step(model, optimizer, compute=lambda model, batch: model(batch).sum())
checkpoints = X.Checkpoints(folder, model=model, optimizer=optimizer)
def train():
    if place == "minimize":
        optimizer.minimize(model(torch.ones(2)).sum())
    else:
        step(torch.ones(4, 2))
train()
def read():
    while rank == 1:  # worker 0 has the same number of steps, and comes first
        time.sleep(1)
if place == "another thread":  # waits, and the main one does not go on
    checkpoints.save(1, asynchronous=rank == 1)
    if rank == 1:
        checkpoints.save(2, asynchronous=True)
    read()
    train()
elif place == "asynchronous":
    checkpoints.save(1, asynchronous=True)
    read()
    checkpoints.wait()
    train()
else:
    read()
    if place in ("minimize", "Step"):
        train()
    elif place == "save":
        checkpoints.save(1)
    elif place == "evenly":
        list(fleet.evenly([1, 2]))
    elif place == "barrier":
        fleet.barrier_worker()
    elif place == "agreement":
        fleet.distributed_model(torch.nn.Linear(2, 2))
    elif place == "own message":
        torch.distributed.all_reduce(torch.ones(1))
"""


@pytest.mark.middle
@pytest.mark.parametrize(
    "place",
    [
        "Step",
        "minimize",
        *(
            pytest.param(place, marks=pytest.mark.full)
            for place in ("save", "asynchronous", "another thread", "evenly", "barrier", "agreement", "own message")
        ),
    ],
)
def test_of_workers_that_stand_still_it_is_not_one_that_waits_for_the_others(script, tmp_path, place):
    options = ["--progress_timeout", "10"]
    done = start(script(STANDS_STILL), place, tmp_path / "saved", workers=2, check=False, options=options)
    assert done.returncode == 124
    said = done.stderr.rstrip().splitlines()[-1]
    assert said.startswith("fleetrun: worker 1 made no progress: no step for "), done.stderr
    assert re.search(r'its process is sleeping, in File ".*script\.py", line \d+ in read \(host ', said)


ASKED = """
import os, sys, time
import torch
from fleetx import fleet
fleet.init()
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
model = fleet.distributed_model(torch.nn.Linear(2, 2))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
fleet.stop_requested()
open(sys.argv[1] + rank, "w").write(str(os.getpid()))
for number in range(10**6 if attempt == "0" else 3):
    optimizer.minimize(model(torch.ones(2)).sum())
    time.sleep(0.01)
    if fleet.stop_requested():
        print("saves and leaves")
        fleet.leave()
"""


@pytest.mark.middle
@pytest.mark.parametrize(
    ("restarts", "code"), [("0", 128 + signal.SIGTERM), pytest.param("1", 0, marks=pytest.mark.full)]
)
def test_a_job_whose_worker_somebody_else_asks_to_leave_is_not_taken_for_done(
    script, tmp_path, running, restarts, code
):
    job = running(script(ASKED), "--max_restart", restarts)
    job.wait_for_workers()
    os.kill(int(job.files[1].read_text()), signal.SIGTERM)
    assert job.end() == code
    assert "worker 1 was asked to stop (SIGTERM) by somebody other than fleetrun, and left (host " in job.errors
    assert ("This is restart 1 of 1." in job.errors) == (restarts == "1")
    assert all("saves and leaves" in (tmp_path / "log" / f"workerlog.{rank}").read_text() for rank in range(2))


TRAINS = """
import itertools, os, sys, time
import torch
from fleetx import fleet
fleet.init()
strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={{"k_steps": 2}})
model = fleet.distributed_model(torch.nn.Linear(2, 2), strategy)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy)
rank = os.environ["RANK"]
def is_here():
    open(sys.argv[1] + rank, "w").write(str(os.getpid()))
{before}
for number in itertools.count():
    optimizer.minimize(model(torch.ones(2)).sum())
    time.sleep(0.01)
    {then}
"""

# Worker 0 is in the middle of its first window, whose end waits for the other one.
LATE = """
if rank == "1":
    is_here()
    while not os.path.exists(sys.argv[1] + "go"):
        time.sleep(0.01)
"""
ASKS = """
    if rank == "0" and number == 0:
        is_here()
    if number and fleet.stop_requested():
        print("saves and leaves")
        fleet.leave()
"""
# After so many windows it is taken to be a script that never asks.
NEVER_ASKS = "if number == 2 * SILENT_WINDOWS: is_here()"


@pytest.mark.full
def test_a_signal_waits_for_a_worker_that_is_late_in_its_first_step(script, tmp_path, running):
    """It has not asked yet, and would die of the signal; then the others could not save."""
    job = running(script(TRAINS.format(before=LATE, then=ASKS)))
    job.wait_for_workers()
    job.launcher.send_signal(signal.SIGTERM)
    job.wait_until_said(ASKED_TO_LEAVE)
    (tmp_path / "pidgo").touch()
    assert job.end() == 128 + signal.SIGTERM
    assert all("saves and leaves" in (tmp_path / "log" / f"workerlog.{rank}").read_text() for rank in range(2))


@pytest.mark.middle
def test_a_script_that_never_asks_does_not_keep_a_signal_waiting(script, running):
    job = running(script(TRAINS.format(before=f"SILENT_WINDOWS = {SILENT_WINDOWS}", then=NEVER_ASKS)))
    job.wait_for_workers()
    job.launcher.send_signal(signal.SIGTERM)
    assert job.end() == 128 + signal.SIGTERM


SAVES = """
import os, sys, signal, time
def save(*_):
    open(sys.argv[1] + os.environ["RANK"], "a").write(" 0")
    sys.exit()
signal.signal(signal.SIGTERM, save)
open(sys.argv[1] + os.environ["RANK"], "w").write(str(os.getpid()))
while True:
    print("goes on")
    time.sleep(0.02)
"""


@pytest.mark.middle
def test_workers_can_save_when_the_terminal_is_closed(script, tmp_path):
    """The launcher then gets SIGHUP, and has nobody to talk to."""
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    command = [sys.executable, "-m", "fleetx.launch", "--nproc_per_node", "2", "--log_dir", str(tmp_path / "log")]
    launcher, terminal = pty.fork()
    if launcher == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, [*command, str(script(SAVES)), str(tmp_path / "pid")])
    while not all(file.exists() and file.read_text() for file in files):
        os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1]) == 128 + signal.SIGHUP
    assert all(file.read_text().endswith(" 0") for file in files)


@pytest.mark.middle
def test_the_log_folder_of_a_job_is_its_own_until_it_ends_or_its_launcher_is_killed(script, running, tmp_path):
    path = script(POLITE)
    job = running(path, "--job_id", "first")
    job.wait_for_workers()
    refused = start(path, tmp_path / "other", check=False, options=["--log_dir", tmp_path / "log"])
    assert refused.returncode == 1
    assert f"is in use by another job (job first, process {job.launcher.pid} on " in refused.stderr
    assert not list(tmp_path.glob("other*"))
    job.launcher.kill()
    job.end()
    path.write_text("print('runs')")
    assert "[worker 0] runs" in start(path, options=["--log_dir", tmp_path / "log"]).stdout


@pytest.mark.middle
def test_what_workers_have_started_ends_with_a_nursery_that_is_killed(script, running):
    job = running(script(STUBBORN))
    job.wait_for_workers()
    (nursery,) = Path(f"/proc/{job.launcher.pid}/task/{job.launcher.pid}/children").read_text().split()
    os.kill(int(nursery), signal.SIGKILL)
    assert job.end() == 128 + signal.SIGKILL
    job.wait_for_the_end_of_all()


POOL = """
import multiprocessing, os, sys, time
from fleetx import fleet
def work():
    open(sys.argv[1], "w").close()
    time.sleep(600)
fleet.stop_requested()
with multiprocessing.get_context("fork").Pool(2) as pool:
    pool.map(abs, [1, 2])
    pool.apply_async(work)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
"""


@pytest.mark.full
def test_processes_that_a_script_forks_still_die_of_signals(script, tmp_path):
    done = start(script(POOL), tmp_path / "works")
    assert done.returncode == 0  # and nobody is said to have been asked to leave


SPEAKS = """
print("caf\\u00e9")
raise SystemExit(3)
"""


@pytest.mark.middle
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("| true; exit ${PIPESTATUS[0]}", None),
        (">&-", "fleetrun: the standard output cannot be written (Bad file descriptor): nothing more is shown, the"),
        ("> /dev/full", "fleetrun: the standard output cannot be written (No space left on device): nothing more is"),
    ],
)
def test_a_job_goes_on_when_nobody_can_see_it(script, tmp_path, how, said):
    command = [sys.executable, "-m", "fleetx.launch", "--log_dir", str(tmp_path / "log")]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {how}', "bash", *command, str(script(SPEAKS))],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 3
    lines = done.stderr.splitlines()
    assert [line.startswith(said) for line in lines[:1]] == [True] if said else "standard output" not in done.stderr
    assert lines[-1].startswith("fleetrun: worker 0 failed with exit code 3 (host ")
    assert "Traceback" not in done.stderr
    assert (tmp_path / "log" / "workerlog.0").read_text() == "caf\\xe9\n"
