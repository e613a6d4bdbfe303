"""What the first worker says and writes at the end, and how it ends."""

import io
import json
import re
import sys

import pytest
from rich.console import Console

from fleetx.applications.digits import default_strategy
from fleetx.demo.checks import Check
from fleetx.demo.job import Job, Run, checks_table, what_it_shows
from fleetx.demo.settings import Settings

SETTINGS = Settings(2, 512, 1, 0, True, True, True, "fleetx train")
METRICS = [{"seconds": 1.0, "epoch": 0, "window": 3, "loss": 0.5, "samples": 512, "accuracy": 0.975}]


@pytest.fixture
def job(tmp_path, monkeypatch):
    job = Job(tmp_path, SETTINGS, default_strategy())
    job.console = Console(file=io.StringIO(), width=80)
    return job


def report(job, *checks):
    code = job._report([Run("FleetX, LARS, batch 512", 512, "blue", "metrics.jsonl", METRICS)], checks)
    return code, job.console.file.getvalue()


def test_a_check_that_failed_is_shown_and_ends_with_an_error(job, tmp_path):
    code, shown = report(job, Check("merge", True, "fine"), Check("resume", False, "3 of 87 tensors differ"))
    assert code == 1
    assert "FAILED" in shown
    assert "1 of 2 checks FAILED: resume" in shown
    saved = json.loads((tmp_path / "checks.json").read_text())
    assert [check["held"] for check in saved["checks"]] == [True, False]
    assert saved["machine"]["cores"]


def test_checks_that_promise_nothing_cannot_fail(job):
    code, shown = report(job, Check("merge", True, "fine"), Check("workers", None, "one worker"))
    assert code == 0
    assert "FAILED" not in shown


def test_a_file_that_is_not_where_it_belongs_ends_with_an_error(job):
    job.files.complete = False
    code, shown = report(job)
    assert code == 1
    assert "What there was room for is in" in shown


def test_without_matplotlib_there_is_no_picture_and_a_hint(job, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, shown = report(job)
    assert code == 0
    assert "pip install 'fleetx[plots]'" in shown
    assert not (tmp_path / "run.png").exists()
    assert (tmp_path / "summary.json").exists()


def test_tables_fit_into_80_columns_with_whole_paths():
    path = "/a/long/folder/for/runs/digits-20261119-143245/with/a/checkpoint/in/it"
    console = Console(file=io.StringIO(), width=80)
    console.print(checks_table([Check("merge with BatchNorm", False, f"no room in {path} for it")]))
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    cells = "".join(line.split("│")[2].strip() for line in lines if line.count("│") > 3)
    assert path.replace("/", "") in cells.replace("/", "")


@pytest.mark.parametrize("width", [80, 40])
def test_what_is_said_fits_into_the_terminal_and_commands_stay_whole(job, width):
    job.console = Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True)
    job.say(job.strategy.overview(job.console.width))
    job.say(what_it_shows(0.99, 359))
    report(job, Check("merge with BatchNorm", None, "it sees 64 samples at a time, not 512: the update differs by 17%"))
    command = f"Go on with: fleetx train --resume {'runs/' * 10}"
    job.say(command, whole=True)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", job.console.file.getvalue()).splitlines()
    assert command in lines
    assert "DistributedStrategy Overview" in lines[2 if width == 80 else 0]
    assert [line for line in lines if len(line) > width and line != command and str(job.folder) not in line] == []


@pytest.mark.parametrize(("accuracy", "digits", "points"), [(0.99, 359, "1.1"), (1.0, 359, "0.6"), (0.9, 100, "6.0")])
def test_chance_is_named(accuracy, digits, points):
    """Two standard errors, sqrt(p (1 - p) / n): 2 * sqrt(0.9 * 0.1 / 100) is 6 points."""
    assert f"+-{points} points" in what_it_shows(accuracy, digits)
