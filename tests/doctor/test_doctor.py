"""`fleetx doctor`: says what is there, and notices what does not work."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fleetx
from fleetx.cli import app
from fleetx.cores import Cores
from fleetx.doctor import allocator, clashes, devices, examining, space, trials
from fleetx.doctor.command import as_text
from fleetx.doctor.finding import Check, Report, tried
from tests.jobs.starting import ROOT

runner = CliRunner()
OWN = Path(fleetx.__file__).parent


@pytest.fixture
def no_job(monkeypatch):
    """Without the two workers, which take seconds to start."""
    monkeypatch.setattr(trials, "two_workers", lambda: Check("two workers over gloo", True))


@pytest.mark.middle
def test_a_healthy_machine_is_said_to_be_so():
    done = runner.invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["healthy"]
    assert report["facts"]["versions"]["torch"] == torch.__version__
    assert set(report["facts"]) == {"versions", "devices", "links", "settings", "names", "room"}
    names = [check["name"] for check in report["checks"]]
    assert {"a step on cpu", "two workers over gloo", "safetensors", "Pillow", "matplotlib"} <= set(names)
    assert all(check["passed"] for check in report["checks"])


def test_a_check_that_fails_is_shown_with_its_remedy_and_the_exit_code_is_one(no_job, monkeypatch):
    monkeypatch.setattr(trials, "_pillow", lambda: (_ for _ in ()).throw(OSError("decoder jpeg not available")))
    done = runner.invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "FAILED  Pillow" in done.output
    assert "OSError: decoder jpeg not available" in done.output
    assert "pip install --force-reinstall pillow" in done.output
    assert "1 of 10 checks failed" in done.output


def test_another_module_of_the_same_name_is_found(tmp_path, monkeypatch):
    (tmp_path / "fleetx.py").write_text("")
    (tmp_path / "deeper" / "fleetx").mkdir(parents=True)
    (tmp_path / "deeper" / "fleetx" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(OWN.parent), str(tmp_path), str(tmp_path / "deeper")])
    assert clashes.others() == [tmp_path / "fleetx.py", tmp_path / "deeper" / "fleetx" / "__init__.py"]
    first, _ = clashes.check_clashes()
    assert not first.passed
    assert "rename or remove it" in first.remedy


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """Another FleetX on the path, after the one that runs."""
    package = tmp_path / "clone" / "src" / "fleetx"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(OWN.parent), str(package.parent)])
    return tmp_path / "clone"


def installed(monkeypatch, origin, site=ROOT):
    """As if pip had FleetX installed so."""

    class Distribution:
        def read_text(self, name):
            return None if origin is None else json.dumps(origin)

        def locate_file(self, path):
            return site / path

    monkeypatch.setattr(clashes.importlib.metadata, "distribution", lambda name: Distribution())


def test_a_clone_that_hides_an_editable_installation_is_no_stranger_but_said(clone, monkeypatch):
    installed(monkeypatch, {"dir_info": {"editable": True}, "url": clone.as_uri()})
    first, _ = clashes.check_clashes()
    assert first.passed
    assert re.fullmatch(
        "FleetX twice: imported from .*fleetx, which is first on the path, and not from .*clone/src/fleetx, where pip "
        "has it installed; to use that one take the first off PYTHONPATH",
        first.detail,
    )
    assert clashes.clashes()["others"] == [str(clone / "src" / "fleetx" / "__init__.py")]


def test_so_is_one_that_hides_a_plain_installation(clone, monkeypatch):
    installed(monkeypatch, None, site=clone / "src")
    assert clashes.check_clashes()[0].passed


def test_a_clone_that_is_not_the_installed_one_is_a_clash(clone, monkeypatch):
    installed(monkeypatch, {"dir_info": {"editable": True}, "url": ROOT.as_uri()})
    (clone / "src" / "fleetx.py").write_text("")  # nor is this one, where that is installed from the clone
    first, _ = clashes.check_clashes()
    assert not first.passed
    assert first.detail.count("clone/src/fleetx") == 2
    installed(monkeypatch, {"dir_info": {"editable": True}, "url": clone.as_uri()})
    first, _ = clashes.check_clashes()
    assert not first.passed
    assert first.detail == str(clone / "src" / "fleetx.py")


def test_the_same_files_by_another_way_are_no_clash(tmp_path, monkeypatch):
    (tmp_path / "linked").symlink_to(OWN.parent)
    hard = tmp_path / "mounted" / "fleetx"
    hard.mkdir(parents=True)
    try:
        (hard / "__init__.py").hardlink_to(OWN / "__init__.py")  # as a folder that is mounted twice
    except OSError:
        pytest.skip("another file system")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "linked"), str(tmp_path / "mounted"), str(OWN.parent)])
    assert clashes.others() == []
    assert clashes.check_clashes()[0].detail == "nothing else"


def test_another_distribution_in_our_folder_is_found(monkeypatch):
    monkeypatch.setattr(clashes.importlib.metadata, "packages_distributions", lambda: {"fleetx": ["fleet-x"]})
    _, second = clashes.check_clashes()
    assert not second.passed
    assert "pip uninstall fleet-x" in second.remedy


@pytest.mark.parametrize(
    ("origin", "said"),
    [
        ({"dir_info": {"editable": True}, "url": OWN.parents[1].as_uri()}, "fleetx, installed editable from .+"),
        ({"dir_info": {"editable": True}, "url": "file:///elsewhere"}, "imported from .+, though .+ from /elsewhere"),
        ({"dir_info": {}, "url": "file:///elsewhere"}, "not installed, imported from a folder"),
    ],
)
def test_an_editable_installation_is_recognised(monkeypatch, origin, said):
    installed(monkeypatch, origin)
    monkeypatch.setattr(clashes.importlib.metadata, "packages_distributions", dict)
    _, second = clashes.check_clashes()
    assert second.passed
    assert re.fullmatch(said, second.detail)


def test_a_step_that_does_not_learn_or_cannot_run_fails(monkeypatch):
    assert trials.step_on(torch.device("cpu")).passed
    check = trials.step_on(torch.device("meta"))
    assert not check.passed


@pytest.mark.middle
def test_a_diagnosis_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert trials.two_workers().passed
    assert not list(tmp_path.iterdir())


@pytest.mark.middle
def test_workers_that_cannot_find_each_other_fail(monkeypatch):
    monkeypatch.setattr(trials.Path, "with_name", lambda self, name: ROOT / "tests" / "no_such_script.py")
    check = trials.two_workers()
    assert not check.passed
    assert "exit code" in check.detail
    assert "127.0.0.1" in check.remedy


def test_a_full_disk_and_a_small_shared_memory_fail(monkeypatch):
    usage = type("Usage", (), {"free": 10 * 2**20, "total": 2**30})
    monkeypatch.setattr(space.shutil, "disk_usage", lambda path: usage)
    checks = {check.name: check for check in space.check_space()}
    assert not any(check.passed for check in checks.values())
    assert "room in the present folder" in checks


def test_settings_that_change_memory_are_shown(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert allocator.allocator()["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_the_cores_of_a_pinned_job_are_shown_with_what_workers_get(monkeypatch):
    monkeypatch.setattr(devices, "cores", lambda: Cores(machine=64, affinity=8, quota=4.5))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = devices.devices()
    assert found["usable cores"] == "4 of 64 (8 in the CPU set, a quota of 4.5)"
    assert devices.worker_threads(2) == "4 for one worker, 2 for each of 2"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert devices.devices()["fleetrun's threads"] == "7 for each worker (OMP_NUM_THREADS is set)"


def test_a_containers_limit_of_memory_is_shown(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(devices, "group_folders", lambda _: [[tmp_path]])
    assert "limited" not in devices.host_memory()
    (tmp_path / "memory.max").write_text(f"{2**20}\n")
    assert devices.host_memory().endswith("available, limited to 1 MiB by a control group")


def test_facts_that_cannot_be_had_do_not_end_the_examination(no_job, monkeypatch):
    def broken():
        raise RuntimeError("the driver is too old")

    monkeypatch.setitem(examining.FACTS, "links", broken)
    report = examining.examine()
    assert not report.is_healthy
    assert any("the driver is too old" in check.detail for check in report.checks)


@pytest.mark.parametrize("module", [clashes, space, trials])
def test_checks_that_cannot_be_made_do_not_end_the_examination(module, no_job, monkeypatch):
    def broken(*_):
        raise OSError("this folder was deleted")

    name = {clashes: "check_clashes", space: "check_space", trials: "packages"}[module]
    monkeypatch.setattr(module, name, broken)
    report = examining.examine()
    failed = [check for check in report.checks if not check.passed]
    assert [check.detail for check in failed] == ["OSError: this folder was deleted"]
    assert any(check.name == "a step on cpu" and check.passed for check in report.checks)


def test_a_package_that_pictures_need_is_missed(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (check,) = [one for one in trials.packages() if one.name == "matplotlib"]
    assert not check.passed


def test_an_extra_that_is_not_installed_is_named_and_no_failure(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    (check,) = [one for one in trials.packages() if one.name == "Pillow"]
    assert check.passed
    assert check.detail == "not installed; its features need: pip install 'fleetx[images]'"


def test_without_a_gpu_there_is_no_link():
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert devices.links() == {}
    assert devices.all_devices() == [torch.device("cpu")]
    assert "available" in devices.host_memory() or devices.host_memory() == "unknown"


def test_the_report_as_text():
    report = Report({"names": {"others": ["a", "b"], "none": None}}, [tried("x", lambda: "fine", "")])
    assert as_text(report).splitlines() == [
        "names",
        "  others  a, b",
        "",
        "checks",
        "  ok      x  fine",
        "",
        "all is well",
    ]
