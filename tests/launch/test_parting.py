import subprocess
import sys

from fleetx.launch.parting import children, end_children

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_all_children_are_ended_but_those_of_others():
    before = children()
    with subprocess.Popen(SLEEPS) as theirs, subprocess.Popen(SLEEPS) as ours:
        assert children() == before | {theirs.pid, ours.pid}
        assert end_children(before | {theirs.pid}) == set()
        assert children() == before | {theirs.pid}
        theirs.kill()


def test_a_child_that_cannot_be_ended_is_given_back(monkeypatch):
    monkeypatch.setattr("fleetx.launch.parting._DYING", 0.0)
    before = children()
    with subprocess.Popen(SLEEPS) as child:
        with monkeypatch.context() as patched:
            patched.setattr("fleetx.launch.parting.os.kill", refuse)
            assert end_children(before) == {child.pid}
        child.kill()


def refuse(*_):
    raise PermissionError(1, "Operation not permitted")
