"""`fleetx train` as a user runs it, shortened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fleetx.strategy import DistributedStrategy
from tests.jobs.starting import ROOT

FLEETX = str(Path(sys.executable).with_name("fleetx"))


def train(tmp_path, *options, **env):
    return subprocess.run(
        [FLEETX, "train", "--out", str(tmp_path), *options],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
        env={**os.environ, **env},
    )


@pytest.mark.middle
def test_a_run_trains_and_leaves_its_folder(tmp_path):
    done = train(tmp_path, "--epochs", "12")
    assert done.returncode == 0, done.stderr[-3000:]
    (folder,) = tmp_path.iterdir()
    files = {path.name for path in folder.iterdir()}
    assert files == {"metrics.jsonl", "plain.jsonl", "run.png", "strategy.toml", "summary.json", "weights.safetensors"}

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["accuracy"] > 0.95
    assert summary["plain_accuracy"] > 0.9
    assert (folder / "run.png").read_bytes().startswith(b"\x89PNG")

    strategy = DistributedStrategy.load(folder / "strategy.toml")
    assert (strategy.amp, strategy.lars, strategy.gradient_merge_configs.k_steps) == (True, True, 4)
    assert "head.weight" in load_file(folder / "weights.safetensors")

    windows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    windows = [line for line in windows if "loss" in line]
    assert [line["samples"] for line in windows[:3]] == [512, 512, 414]
    assert len(windows) == 36
    assert all(line["updated"] and line["samples_per_s"] > 0 for line in windows)
    assert windows[-1]["loss"] < 0.3 * windows[0]["loss"]

    order = [
        "Configuration Arguments",
        "Distributed Envs",
        "DistributedStrategy Overview",
        "window 36/36",
        "test accuracy",
    ]
    positions = [done.stdout.index(text) for text in order]
    assert positions == sorted(positions)


@pytest.mark.full
def test_a_strategy_file_and_a_single_worker(tmp_path):
    file = tmp_path / "mine.toml"
    DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2}).save(file)
    out = tmp_path / "runs"
    done = train(out, "--epochs", "1", "--workers", "1", "--strategy", str(file), "--no-baseline")
    assert done.returncode == 0, done.stderr[-3000:]
    (folder,) = out.iterdir()
    assert DistributedStrategy.load(folder / "strategy.toml") == DistributedStrategy.load(file)
    assert not (folder / "plain.jsonl").exists()


@pytest.mark.middle
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--strategy", "missing.toml"], "missing.toml"),
        pytest.param(["--workers", "0"], "workers", marks=pytest.mark.full),
        pytest.param(["--epochs", "many"], "epochs", marks=pytest.mark.full),
    ],
)
def test_wrong_options_end_with_a_message(tmp_path, options, message):
    done = train(tmp_path, *options)
    assert done.returncode != 0
    assert message in done.stderr
