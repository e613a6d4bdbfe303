"""Shards and recorded runs, tried on a small suite of their own in processes of pytest."""

import itertools
import os
import subprocess
import sys

import pytest

from tests.selection import ROOT, SHARDS, read_sessions, shard_of

SUITE = """
import os, pytest

@pytest.mark.parametrize("number", range(30))
def test_most_pass(number):
    assert number != int(os.environ.get("FAILS", -1))

@pytest.mark.skip(reason="it never runs")
def test_skipped():
    pass
"""

pytestmark = pytest.mark.middle


@pytest.fixture
def play(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_suite.py").write_text(SUITE)
    (tmp_path / "tests" / "conftest.py").write_text("pytest_plugins = ['tests.selection']\n")

    def run(*options, **environment):
        command = [sys.executable, "-m", "pytest", "tests", "-q", "-p", "no:cacheprovider", *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


def counts(done):
    words = done.stdout.splitlines()[-1].replace(",", "").split()
    return {what: int(number) for number, what in itertools.pairwise(words) if number.isdecimal()}


def test_shards_take_each_test_once(play):
    passed = [counts(play("--shard", f"commit {number}")) for number in range(3)]
    for number, found in enumerate(passed):
        names = [f"tests/test_suite.py::test_most_pass[{index}]" for index in range(30)]
        expected = sum(shard_of(name) == shard_of(f"commit {number}") for name in names)
        assert found.get("passed", 0) == expected
    assert {shard_of(f"commit {number}") for number in range(200)} == set(range(SHARDS))


def test_a_recorded_run_goes_on_with_what_has_not_passed(play, tmp_path):
    record = tmp_path / "record.jsonl"
    options = ("--record", str(record), "-n", "2")
    first = play(*options, FAILS="7")
    assert counts(first) == {"failed": 1, "passed": 29, "skipped": 1}
    again = play(*options)
    assert counts(again)["passed"] == 1
    assert play(*options).returncode == 5  # nothing is left
    sessions = list(read_sessions(record))
    assert [len(lines) for _, lines in sessions] == [31, 1, 0]
    assert len({code for code, _ in sessions}) == 1


def test_other_code_is_tested_again(play, tmp_path):
    record = tmp_path / "record.jsonl"
    play("--record", str(record))
    text = record.read_text()
    code = next(read_sessions(record))[0]
    record.write_text(text.replace(code, "other"))
    assert counts(play("--record", str(record)))["passed"] == 30


GROUPED = """
import os, pytest

@pytest.mark.parametrize("number", range(8))
@pytest.mark.xdist_group("one")
def test_in_one_process(number):
    with open(os.environ["SEEN"], "a") as file:
        file.write(os.environ["PYTEST_XDIST_WORKER"] + " ")
"""


def test_tests_that_share_a_job_run_in_one_process(play, tmp_path):
    (tmp_path / "tests" / "test_suite.py").write_text(GROUPED)
    done = play("-n", "2", "--dist", "loadgroup", SEEN=str(tmp_path / "seen"))
    assert counts(done) == {"passed": 8}
    assert len(set((tmp_path / "seen").read_text().split())) == 1
