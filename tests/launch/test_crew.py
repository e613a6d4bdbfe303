"""What workers are started with."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fleetx.launch import crew, hatch
from fleetx.launch.crew import Attempt, Crew, CrewSettings
from fleetx.launch.say import LaunchError
from tests.waiting import wait_for


@pytest.mark.parametrize(
    ("usable", "workers", "given", "threads"),
    [({0}, 1, None, "1"), ({0, 1, 2, 3}, 2, None, "2"), ({0}, 3, None, "1"), ({0}, 1, "5", "5")],
)
def test_workers_share_the_cores_that_the_job_may_use(monkeypatch, usable, workers, given, threads):
    started = {}

    def start(command, env, **options):
        started.update(env)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: usable)
    monkeypatch.setattr(crew.subprocess, "Popen", start)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("FLEETX_JOB_SECRET", "of another job of this shell")
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    ours = Crew(CrewSettings(["x.py"], workers, "here"), "127.0.0.1", None)
    try:
        with pytest.raises(
            LaunchError, match=r"cannot be started \(Resource temporarily unavailable\): raise the limits"
        ):
            ours._start_nursery()
    finally:
        ours.close()
    assert started["OMP_NUM_THREADS"] == threads
    assert "FLEETX_JOB_SECRET" not in started


def test_a_machine_without_a_folder_for_temporary_files_is_said_to_be_so(monkeypatch, tmp_path):
    monkeypatch.setattr(crew.tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(LaunchError, match=r"temporary files \(No such file or directory\): let TMPDIR name one"):
        Crew(CrewSettings(["x.py"], 1, "here"), "127.0.0.1", None)._start_nursery()


def test_a_launcher_that_has_not_started_its_workers_has_no_folder(monkeypatch, tmp_path):
    """It may be killed while it waits for other machines."""
    monkeypatch.setattr(crew.tempfile, "tempdir", str(tmp_path))
    ours = Crew(CrewSettings(["x.py"], 1, "here"), "127.0.0.1", None)
    assert ours.poll(0.0) == []
    assert list(tmp_path.iterdir()) == []
    ours.close()


LAUNCHER = """
import os, subprocess, sys, time
from pathlib import Path
parent = "1" if sys.argv[3] == "killed before" else str(os.getpid())
subprocess.Popen([sys.executable, sys.argv[1], parent, "0", sys.argv[2]], start_new_session=True)
time.sleep(600)
"""


@pytest.mark.middle
@pytest.mark.parametrize("when", ["killed before", "killed during imports"])
def test_a_launcher_that_is_killed_early_leaves_no_folder(tmp_path, when):
    folder, package = tmp_path / "fleetrun-1", tmp_path / "fleetx" / "launch"
    folder.mkdir()
    package.mkdir(parents=True)
    for place in (package.parent, package):
        (place / "__init__.py").touch()
    (package / "nursery.py").write_text("import pathlib, time\npathlib.Path('imports').touch()\ntime.sleep(600)")
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, hatch.__file__, folder, when], cwd=tmp_path)
    try:
        if when == "killed during imports":
            wait_for((tmp_path / "imports").exists, "import")
            assert folder.exists()
            launcher.kill()
        wait_for(lambda: not folder.exists(), "end of the folder")
    finally:
        launcher.kill()
        launcher.wait()


def test_a_nursery_that_does_not_end_its_workers_is_killed_so_that_the_kernel_does(monkeypatch):
    killed = []
    monkeypatch.setattr(crew, "is_stopped", lambda _: False)
    ours = Crew(CrewSettings(["x.py"], 1, "here"), "127.0.0.1", None)
    try:
        ours._nursery, ours._is_ready = SimpleNamespace(pid=os.getpid(), kill=lambda: killed.append(True)), True
        ours.poll(0.0)
        ours.kill()
        ours.poll(0.0)
        assert not killed
        monkeypatch.setattr(crew, "_OBEYS", 0.0)
        ours.poll(0.0)
        assert killed
    finally:
        ours._nursery = None
        ours.close()


def test_a_folder_that_somebody_has_removed_is_made_again_for_the_next_attempt(monkeypatch, tmp_path):
    """Programs that tidy /tmp remove files that are a few days old."""
    monkeypatch.setattr(crew.tempfile, "tempdir", str(tmp_path))
    ours = Crew(CrewSettings(["x.py"], 1, "here"), "127.0.0.1", None)
    ours._renew_folder()
    (first,) = tmp_path.iterdir()
    ours._renew_folder()
    assert list(tmp_path.iterdir()) == [first]
    (first / "beats").unlink()
    ours._renew_folder()
    (second,) = tmp_path.iterdir()
    assert second != first
    assert (second / "beats").exists()
    ours.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.middle
def test_a_command_that_is_too_long_for_the_system_is_an_error():
    ours = Crew(CrewSettings(["x.py", "x" * (1 << 20)], 1, "here"), "127.0.0.1", None)
    attempt = Attempt(0, 0, 1, 0, 1, "127.0.0.1", 6170, ["127.0.0.1:6170"], "a", 0)
    try:
        with pytest.raises(LaunchError, match=r"too long for the system, with 1048580 characters .* in a file"):
            ours.start(attempt)
    finally:
        ours.close()
