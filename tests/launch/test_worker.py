"""What a worker does around its script, in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

from fleetx.launch import worker
from tests.waiting import GUARD

ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}

FAILS = """
import atexit, sys
atexit.register(lambda: print("known as", type(getattr(sys, "last_value", None)).__name__))
raise KeyError("no such thing")
"""


def run(tmp_path, text, **environment):
    script = tmp_path / "script.py"
    script.write_text(text)
    command = [sys.executable, "-m", "fleetx.launch.worker", str(script)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=GUARD, env=os.environ | ENVIRONMENT | environment
    )


INTERRUPTED = """
import atexit
atexit.register(print, "exit functions")
try:
    raise KeyboardInterrupt
finally:
    print("finally")
"""


@pytest.mark.middle
def test_an_interrupted_script_cleans_up_and_leaves_without_a_traceback(tmp_path):
    done = run(tmp_path, INTERRUPTED)
    assert (done.returncode, done.stdout, done.stderr) == (130, "finally\nexit functions\n", "")


@pytest.mark.middle
def test_exit_functions_can_tell_that_the_script_has_failed(tmp_path):
    """An asynchronous save, say, which then does not wait for others for long."""
    done = run(tmp_path, FAILS)
    assert done.returncode == 1
    assert done.stdout == "known as KeyError\n"
    assert done.stderr.count("Traceback") == 1
    assert "launch" not in done.stderr


@pytest.mark.middle
def test_an_error_of_any_length_is_short_in_the_word_to_the_launcher_and_whole_in_the_log(tmp_path):
    done = run(tmp_path, "raise ValueError('x' * 1_000_000)", **{worker.REPORT: str(tmp_path / "report")})
    assert done.returncode == 1
    assert "x" * 1_000_000 in done.stderr
    word = json.loads((tmp_path / "report").read_text())
    assert word["type"] == "ValueError"
    assert 300 < len(word["message"]) <= 10_000
