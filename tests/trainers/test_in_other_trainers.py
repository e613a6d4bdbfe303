"""What docs/in-other-trainers.md shows, inside the trainers themselves."""

import contextlib
import importlib.util
import io
import os
import subprocess
import sys

import pytest

from tests.jobs.starting import ROOT
from tests.trainers.inside import blocks

pytestmark = pytest.mark.middle

MISSING = [name for name in ("transformers", "accelerate", "lightning") if importlib.util.find_spec(name) is None]
IN_TRAINERS = ("transformers' Trainer", "Accelerate", "Lightning Fabric", "Lightning")


@pytest.mark.skipif(
    bool(MISSING),
    reason=f"without {', '.join(MISSING)}: pip install -r requirements/trainers.txt, as make test-middle does",
)
@pytest.mark.parametrize("title", IN_TRAINERS)
def test_recompute_plans_lars_and_lamb_have_the_same_bits_inside(title, tmp_path):
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainers.inside", title],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    compared = [line for line in done.stdout.splitlines() if line.endswith(": equal bits")]
    assert len(compared) == 6, compared  # of LARS and LAMB each: a plain loop, recompute, a plan


def test_each_trainer_has_a_block_and_the_plan_is_what_the_page_says(work_clock, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = blocks()
    assert {title for title, code in found.items() if code} == {"In other trainers", "A plan", *IN_TRAINERS}
    page = {}
    exec(found["In other trainers"], page)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(found["A plan"], page)
    (expected,) = [line.partition("# ")[2] for line in found["A plan"].splitlines() if line.startswith("print(")]
    assert printed.getvalue() == expected + "\n"


def test_what_ci_runs_installs_the_trainers_first_and_keeps_torch(tmp_path):
    done = subprocess.run(
        ["make", "-n", "test-middle", f"VENV={tmp_path}/venv"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "make test-middle" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert done.stdout.index("requirements/trainers.txt") < done.stdout.index("bin/pytest")
    listed = (ROOT / "requirements" / "trainers.txt").read_text(encoding="utf-8").splitlines()
    assert "--constraint run.txt" in listed  # which pins torch
    assert all("==" in line for line in listed if not line.startswith(("#", "--")))
