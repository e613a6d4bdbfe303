"""Extras: FleetX works without their packages, and what needs one says which extra to install."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleetx import __main__ as command
from fleetx.cli import app
from fleetx.data import load_imagenet_from_file, make_idx, make_imagenet
from fleetx.extras import MissingExtraError, needs_extra

ROOT = Path(__file__).parent.parent
# The modules that are there for an extra's feature alone.
OF_EXTRAS = {
    "fleetx.cli",
    "fleetx.data.cropping",
    "fleetx.demo.command",
    "fleetx.doctor.command",
    "fleetx.planner.command",
    "fleetx.planner.picture",
}


@pytest.fixture
def without(monkeypatch):
    """Hide a package, and forget the module that has imported it."""

    def hide(package, module):
        for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, module, raising=False)

    return hide


def test_the_command_names_its_extra_in_one_line(without, capsys):
    without("typer", "fleetx.cli")
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert capsys.readouterr().err == (
        "fleetx: The fleetx command needs typer, which is not installed: pip install 'fleetx[cli]'.\n"
    )


def test_the_picture_of_a_plan_names_its_extra_before_anything_is_measured(without, tmp_path):
    without("matplotlib", "fleetx.planner.picture")
    picture = ["--picture", str(tmp_path / "plan.png")]
    done = CliRunner().invoke(app, ["plan", "--app", "resnet50", "--memory", "1GiB", *picture])
    assert isinstance(done.exception, MissingExtraError)
    assert str(done.exception).endswith("a plan needs matplotlib, which is not installed: pip install 'fleetx[plots]'.")


def test_images_name_their_extra_before_a_file_or_process_is_made(without, tmp_path):
    train = make_imagenet(tmp_path / "images", images=4, size=8)
    without("PIL", "fleetx.data.cropping")
    said = r"images needs PIL, which is not installed: pip install 'fleetx\[images\]'\."
    with pytest.raises(MissingExtraError, match=f"^Making {said}"):
        make_imagenet(tmp_path / "more")
    assert not (tmp_path / "more").exists()
    with pytest.raises(MissingExtraError, match=f"^Reading {said}"):
        load_imagenet_from_file(train)
    make_idx(tmp_path / "idx", images=10)  # no image files


def test_only_a_missing_package_is_an_extra_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match="Pictures needs matplotlib"), needs_extra("plots", "Pictures"):
        importlib.import_module("matplotlib.figure")
    with pytest.raises(ImportError, match="cannot import name") as broken, needs_extra("plots", "Pictures"):
        from matplotlib import no_such_name  # noqa: F401
    assert not isinstance(broken.value, MissingExtraError)


def test_every_extra_that_is_named_is_declared_and_all_holds_the_others():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = set()
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r'needs_extra\(\s*"(\w+)"', text)) | set(re.findall(r"fleetx\[(\w+)\]", text))
    assert named
    assert named <= set(extras)
    assert extras["all"] == [f"fleetx[{','.join(sorted(set(extras) - {'all'}))}]"]


IMPORT_THE_REST = """
import importlib, pkgutil, sys
for package in ("typer", "matplotlib", "PIL"):
    sys.modules[package] = None
import fleetx
for module in pkgutil.walk_packages(fleetx.__path__, "fleetx."):
    if module.name not in sys.argv[1:]:
        importlib.import_module(module.name)
        print(module.name)
"""


@pytest.mark.middle
def test_all_other_modules_are_imported_without_the_extras():
    done = subprocess.run([sys.executable, "-c", IMPORT_THE_REST, *OF_EXTRAS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported = done.stdout.split()
    assert {"fleetx.data", "fleetx.launch.__main__", "fleetx.planner"} <= set(imported)
