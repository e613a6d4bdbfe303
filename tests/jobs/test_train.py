"""`fleetx train` as a user runs it, shortened."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from fleetx.cli import app
from fleetx.demo import command
from fleetx.strategy import DistributedStrategy
from tests.jobs.starting import ROOT

FLEETX = str(Path(sys.executable).with_name("fleetx"))
SHORT = ("--no-baseline", "--no-checks")


def train(out, *options, env=None, **streams):
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.run(
        [FLEETX, "train", *(["--out", str(out)] if out else []), *options],
        text=True,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        **given,
    )


def accuracies(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["accuracy"] for line in lines if "accuracy" in line]


@pytest.mark.middle
@pytest.mark.timeout(900)
def test_a_run_trains_compares_checks_and_leaves_its_folder(tmp_path):
    done = train(tmp_path, "--epochs", "12")
    assert done.returncode == 0, done.stderr[-3000:]
    (folder,) = tmp_path.iterdir()
    assert {path.name for path in folder.iterdir()} == {
        "checkpoints",
        "checks.json",
        "metrics.jsonl",
        "plain-32.jsonl",
        "plain-512.jsonl",
        "run.png",
        "settings.json",
        "strategy.toml",
        "summary.json",
        "weights.safetensors",
    }

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["command"] == "fleetx train --epochs 12"
    assert list(summary["runs"]) == ["FleetX, LARS, batch 512", "SGD, batch 512", "SGD, batch 32"]
    for name, run in summary["runs"].items():
        assert run["accuracy"] > 0.9, name
        assert run["accuracy"] == accuracies(folder / run["metrics"])[-1]
        assert f"{run['accuracy']:.2%}" in done.stdout
    assert (folder / "run.png").read_bytes().startswith(b"\x89PNG")

    strategy = DistributedStrategy.load(folder / "strategy.toml")
    assert (strategy.amp, strategy.lars, strategy.gradient_merge_configs.k_steps) == (True, True, 4)
    assert "head.weight" in load_file(folder / "weights.safetensors")

    windows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    windows = [line for line in windows if "loss" in line]
    assert [line["samples"] for line in windows[:3]] == [512, 512, 413]
    assert len(windows) == 36
    assert all(line["updated"] and line["samples_per_s"] > 0 and 0 <= line["comm_hidden"] <= 1 for line in windows)
    assert windows[-1]["loss"] < 0.3 * windows[0]["loss"]

    checks = {check["name"]: check for check in json.loads((folder / "checks.json").read_text())["checks"]}
    assert {name: check["held"] for name, check in checks.items()} == {
        "activations kept": True,
        "recompute": True,
        "merge": True,
        "merge with BatchNorm": None,
        "workers": True,
        "resume": True,
    }
    assert checks["workers"]["figures"]["workers"] == 2
    assert "on 2 workers" in checks["merge"]["found"]

    order = ["DistributedStrategy Overview", "FleetX, LARS", "checks", "SGD, batch 512", "100%", "test accuracy"]
    positions = [done.stdout.index(text) for text in order]
    assert positions == sorted(positions)
    assert max(len(line) for line in done.stdout.splitlines() if str(folder) not in line) <= 80
    assert "Configuration Arguments" not in done.stdout  # the guide's blocks are fleetrun's
    assert "Distributed Envs" not in done.stdout


def interrupted(out, *options):
    """What a run and its launcher say that get Ctrl-C after the first window, and the exit code."""
    with subprocess.Popen(
        [FLEETX, "train", "--out", str(out), *options],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as job:
        end = time.monotonic() + 120
        while not any(path.stat().st_size for path in out.glob("*/metrics.jsonl")):
            assert job.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        job.send_signal(signal.SIGINT)
        said, by_launcher = job.communicate(timeout=120)
    return said, by_launcher, job.returncode


@pytest.mark.middle
def test_ctrl_c_saves_and_resume_ends_with_the_bits_of_a_run_that_was_not_stopped(tmp_path):
    options = ("--epochs", "30", *SHORT)
    said, by_launcher, code = interrupted(tmp_path / "stopped", *options)
    assert code == 130
    assert "SIGINT: the workers are asked to save and leave" in by_launcher
    assert max(len(f"^C{line}") for line in by_launcher.splitlines()) <= 80
    (folder,) = (tmp_path / "stopped").iterdir()
    assert "Stopped after update" in said
    assert f"The weights are in {folder / 'weights.safetensors'}" in said
    assert f"--resume {folder}" in said
    assert load_file(folder / "weights.safetensors")
    before = (folder / "metrics.jsonl").read_text()
    assert 1 <= before.count('"loss"') < 90

    resumed = train(None, "--resume", str(folder))
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert train(tmp_path / "through", *options).returncode == 0
    (through,) = (tmp_path / "through").iterdir()
    assert (folder / "metrics.jsonl").read_text().startswith(before)
    assert accuracies(folder / "metrics.jsonl") == accuracies(through / "metrics.jsonl")
    assert (folder / "weights.safetensors").read_bytes() == (through / "weights.safetensors").read_bytes()


@pytest.mark.middle
def test_ctrl_c_before_the_first_update_says_that_there_is_nothing_to_save(tmp_path):
    with subprocess.Popen(
        [FLEETX, "train", "--out", str(tmp_path)], cwd=ROOT, text=True, stdout=subprocess.PIPE
    ) as job:
        assert "Ctrl-C saves" in job.stdout.readline()
        job.send_signal(signal.SIGINT)
        said, _ = job.communicate(timeout=120)
    assert job.returncode == 130
    assert said.endswith("No update had been made: there is nothing to save.\n")


@pytest.mark.middle
@pytest.mark.parametrize("output", ["ascii", "C locale", "full disk", "reader that left", "closed"])
def test_a_run_is_complete_whatever_takes_its_output(output, tmp_path):
    env, streams, options = {}, {}, ["--epochs", "1", *SHORT]
    if output == "ascii":
        env = {"PYTHONIOENCODING": "ascii"}
        options = ["--epochs", "1"]
    elif output == "C locale":
        env = {"LC_ALL": "C", "PYTHONUTF8": "0"}
    elif output == "full disk":
        streams = {"stdout": os.open("/dev/full", os.O_WRONLY)}
    elif output == "reader that left":
        reader, writer = os.pipe()
        os.close(reader)
        streams = {"stdout": writer}
    else:
        streams = {"preexec_fn": lambda: os.close(1), "stdout": None}
    done = train(tmp_path, *options, env=env, **streams)
    for descriptor in filter(None, streams.values()):
        if isinstance(descriptor, int):
            os.close(descriptor)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr
    (folder,) = tmp_path.iterdir()
    assert {"metrics.jsonl", "run.png", "summary.json", "weights.safetensors"} <= {p.name for p in folder.iterdir()}
    if output in ("ascii", "C locale"):
        assert done.stdout.isascii()
        assert "test accuracy" in done.stdout


@pytest.mark.full
def test_a_strategy_file_and_a_single_worker(tmp_path):
    file = tmp_path / "mine.toml"
    DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2}).save(file)
    out = tmp_path / "runs"
    done = train(out, "--epochs", "1", "--workers", "1", "--strategy", str(file), "--no-baseline")
    assert done.returncode == 0, done.stderr[-3000:]
    (folder,) = out.iterdir()
    assert DistributedStrategy.load(folder / "strategy.toml") == DistributedStrategy.load(file)
    assert not list(folder.glob("plain-*"))
    checks = {check["name"]: check["held"] for check in json.loads((folder / "checks.json").read_text())["checks"]}
    assert checks["workers"] is None
    assert checks["resume"]


def refused(*options):
    """What is said about options that cannot work; no worker may be started."""
    done = CliRunner().invoke(app, ["train", *map(str, options)], env={"COLUMNS": "1000"})
    assert done.exit_code == 2, done.output
    return " ".join(done.output.replace("│", " ").split())


@pytest.fixture
def _no_workers(monkeypatch):
    monkeypatch.setattr(command, "launch", lambda *_, **__: pytest.fail("workers were started"))


@pytest.mark.usefixtures("_no_workers")
class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--strategy", "missing.toml"], "missing.toml"),
            pytest.param(["--workers", "0"], "workers", marks=pytest.mark.full),
            pytest.param(["--epochs", "many"], "epochs", marks=pytest.mark.full),
            pytest.param(["--global-batch", "7"], "need at least 8 samples", marks=pytest.mark.middle),
            pytest.param(["--global-batch", "1438"], "there are 1,437 digits", marks=pytest.mark.middle),
        ],
    )
    def test_wrong_options_end_with_a_message(self, tmp_path, options, message):
        assert message in refused("--out", tmp_path, *options)
        assert list(tmp_path.iterdir()) == []

    def test_an_out_that_cannot_be_written_to_is_named(self, tmp_path):
        (tmp_path / "file").write_text("")
        assert f"--out {tmp_path}/file must be a folder to write to: Not a directory" in refused(
            "--out", tmp_path / "file"
        )

    def test_a_disk_without_room_is_found_before_training(self, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        said = refused("--out", tmp_path / "runs")
        assert "a run writes up to" in said
        assert "(No space left on device)" in said
        assert list((tmp_path / "runs").iterdir()) == []

    def test_resume_takes_a_folder_and_nothing_else(self, tmp_path):
        assert "there is no settings.json" in refused("--resume", tmp_path)
        said = refused("--resume", tmp_path, "--epochs", 3, "--no-checks")
        assert "leave out --epochs, --checks" in said


def test_installing_is_announced_first(tmp_path):
    done = subprocess.run(
        ["make", "-n", "run", f"VENV={tmp_path}/venv"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.index("Installing into") < done.stdout.index("-m venv") < done.stdout.index("pip install")
