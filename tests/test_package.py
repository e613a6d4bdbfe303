"""The package as a user gets it: what it imports, what it exports, how it installs."""

import doctest
import importlib
import os
import pkgutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

import fleetx

ROOT = Path(__file__).parent.parent
needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the checkout: git knows its files")
MODULES = [module.name for module in pkgutil.walk_packages(fleetx.__path__, "fleetx.")]


def python(*arguments, executable=sys.executable, **options):
    return subprocess.run(
        [str(executable), *arguments], capture_output=True, text=True, check=True, timeout=600, **options
    )


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    outcome = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert outcome.failed == 0


def test_public_names_are_few_and_all_there():
    assert len(fleetx.__all__) <= 15
    assert all(hasattr(fleetx, name) for name in fleetx.__all__)


@pytest.mark.middle
def test_the_planner_is_there_though_it_is_not_imported_before_it_is_asked_for():
    assert fleetx.plan is importlib.import_module("fleetx.planner").plan
    assert fleetx.Plan.__name__ == "Plan"
    assert {"Plan", "plan"} <= set(dir(fleetx))
    with pytest.raises(AttributeError, match="module 'fleetx' has no attribute 'plann'"):
        _ = fleetx.plann


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_another_system_is_named_before_anything_else_fails(system):
    """Not even torch is imported before, which may not be there either."""
    elsewhere = (
        f"import sys; sys.platform = {system!r}; sys.modules['torch'] = sys.modules['fcntl'] = None; import fleetx"
    )
    done = subprocess.run([sys.executable, "-c", elsewhere], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: FleetX runs on Linux only, and this is {system}: use a Linux machine, a container or WSL 2."
    )


IMPORT = """
import sys
import torch
before, calls = set(sys.modules), 0
def count(_frame, event, _arg):
    global calls
    calls += event in ("call", "c_call")
sys.setprofile(count)
import fleetx
sys.setprofile(None)
print(calls, *(set(sys.modules) - before))
"""
NOT_ASKED_FOR = {"applications", "cli", "compat", "data", "doctor", "launch", "planner", "static"}


@pytest.mark.middle
def test_the_import_brings_little_beside_torch():
    """No other package, no part that is not asked for; about 120 modules, and 60,000 calls meanwhile."""
    calls, *brought = python("-c", IMPORT).stdout.split()
    ours = {name for name in brought if name.partition(".")[0] == "fleetx"}
    assert {name.partition(".")[0] for name in brought if name not in ours} <= sys.stdlib_module_names
    assert not {name.split(".")[1] for name in ours if "." in name} & NOT_ASKED_FOR
    assert len(ours) < 150
    assert int(calls) < 100_000


def build_wheel(folder):
    python("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=ROOT)
    (wheel,) = folder.glob("fleetx-*.whl")
    return wheel


TRAIN_A_LITTLE = ["train", "--epochs", "1", "--no-baseline", "--out"]


def run_installed(bin_folder, tmp_path):
    """Outside the checkout, with nothing of it on the path."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    where = python(
        "-c", "import fleetx; print(fleetx.__file__)", executable=bin_folder / "python", cwd=tmp_path, env=env
    )
    assert where.stdout.startswith(str(bin_folder.parent))
    subprocess.run(
        [bin_folder / "fleetx", *TRAIN_A_LITTLE, str(tmp_path / "runs")], check=True, cwd=tmp_path, env=env, timeout=180
    )
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "weights.safetensors").exists()


@pytest.mark.middle
def test_the_wheel_runs_in_an_environment_without_the_checkout(tmp_path):
    """Dependencies are borrowed from this environment; FleetX itself comes from the wheel alone."""
    wheel = build_wheel(tmp_path)
    environment = tmp_path / "env"
    venv.create(environment, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))
    python("-m", "pip", "--python", str(environment / "bin" / "python"), "install", "--quiet", "--no-deps", str(wheel))
    # A path line adds a folder without running the .pth files in it: the editable install stays invisible.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run_installed(environment / "bin", tmp_path)


def test_the_wheel_holds_the_package_alone():
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    packed = {file.distribution_path for file in builder.recurse_included_files()}
    assert {"fleetx/py.typed", "fleetx/data/digits.csv.gz", "fleetx/__main__.py"} <= packed
    assert [path for path in packed if not path.startswith("fleetx/")] == []


@needs_git
def test_the_source_distribution_holds_all_that_the_tests_read(tmp_path):
    """All files in git: the tests read pages, saved results, scripts and examples."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = {path for path in listed.split("\0") if path and (ROOT / path).exists()}
    builder = pytest.importorskip("hatchling.builders.sdist").SdistBuilder(str(ROOT))
    (sdist,) = builder.build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/test_package.py", "benchmarks/results/step.json"} <= tracked
    assert tracked - packed == set()


@needs_git
@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_last_commit_can_be_released(tmp_path):
    """The wheel in an empty environment with its dependencies, without extras and with all."""
    python(str(ROOT / "scripts" / "release_check.py"), "--trial", "--out", str(tmp_path))
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".gz", ".whl"]
