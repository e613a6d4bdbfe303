"""What workers are started with."""

import os

import pytest

from fleetx.launch import crew
from fleetx.launch.crew import Crew, CrewSettings
from fleetx.launch.say import LaunchError


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


def test_a_machine_without_a_folder_for_temporary_files_is_said_to_be_so(monkeypatch, tmp_path):
    monkeypatch.setattr(crew.tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(LaunchError, match=r"temporary files \(No such file or directory\): let TMPDIR name one"):
        Crew(CrewSettings(["x.py"], 1, "here"), "127.0.0.1", None)
