"""fleetrun starts real processes, passes on their environment, and ends as they end."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.jobs.starting import ROOT, start

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
import sys, time
from fleetx import fleet
fleet.init()
if fleet.worker_index() == 1:
    print("about to fail", file=sys.stderr)
    sys.exit(37)
time.sleep(60)
"""

DIES = """
import os, signal, time
from fleetx import fleet
fleet.init()
if fleet.worker_index() == 0:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""

RAISES = """
from fleetx import fleet
fleet.init()
if fleet.worker_index() == 1:
    raise KeyError("what went wrong")
fleet.barrier_worker()
"""


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


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
    assert "-----------  Configuration Arguments -----------\nnproc_per_node: 2\n" in done.stdout
    assert done.stdout.count("Distributed Envs") == 1


@pytest.mark.parametrize("launcher", ["torchrun", None])
def test_scripts_run_under_torchrun_and_alone(script, tmp_path, launcher):
    workers = 2 if launcher else 1
    start(script(REPORTS), tmp_path, workers=workers, launcher=launcher)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(workers)]
    assert [report["num"] for report in reports] == [workers] * workers


def test_the_launcher_ends_with_the_failing_workers_code(script):
    began = time.monotonic()
    done = start(script(FAILS), workers=2, check=False)
    assert time.monotonic() - began < 40  # the other worker, asleep for a minute, was stopped
    assert done.returncode == 37
    assert "about to fail" in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("fleetrun: worker 1 failed with exit code 37")


def test_a_signal_is_named(script):
    done = start(script(DIES), workers=2, check=False)
    assert done.returncode == 128 + signal.SIGKILL
    assert "fleetrun: worker 0 was ended by SIGKILL." in done.stderr


def test_a_traceback_reaches_the_console(script):
    done = start(script(RAISES), workers=2, check=False)
    assert done.returncode == 1
    assert "KeyError: 'what went wrong'" in done.stderr


def test_ctrl_c_ends_the_workers(script, tmp_path):
    path = script(
        "import os, sys, time\nopen(sys.argv[1] + os.environ['RANK'], 'w').write(str(os.getpid()))\ntime.sleep(60)"
    )
    command = [sys.executable, "-m", "fleetx.launch", "--nproc_per_node", "2", str(path), str(tmp_path / "pid")]
    launcher = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pids = [tmp_path / "pid0", tmp_path / "pid1"]
    deadline = time.monotonic() + 60
    while not all(pid.exists() and pid.read_text() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGINT
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_script.py"], "the script 'no_such_script.py' does not exist"),
        (["--nproc_per_node", "0", "x.py"], "must be a whole number of at least 1, not '0'"),
        (["--nproc_per_node", "two", "x.py"], "not 'two'"),
        ([], "required: script"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    from fleetx.launch.__main__ import main

    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


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
