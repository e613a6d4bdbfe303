"""Commands whose output nobody reads, or cannot be written, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetx import standard_streams

# The module alone: it imports nothing of FleetX, and torch would take seconds.
PROGRAM = f"""
import importlib.util, io, sys
spec = importlib.util.spec_from_file_location("standard_streams", {standard_streams.__file__!r})
streams = importlib.util.module_from_spec(spec)
spec.loader.exec_module(streams)
def command():
{{body}}
streams.run_command("prog", command)
"""


def program(body):
    return PROGRAM.format(body="".join(f"    {line}\n" for line in body.splitlines()))


def run(body, how="", **environment):
    """Run a command's body under a shell's redirections; gives the exit code, and what was on both streams."""
    done = subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" {how}', sys.executable, program(body)],
        capture_output=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout, done.stderr


PRINTS = "print('text')"


def test_a_command_exits_as_it_does():
    assert run(PRINTS) == (0, b"text\n", b"")
    assert run("print('text'); sys.exit(3)") == (3, b"text\n", b"")
    assert run("sys.exit('why')") == (1, b"", b"why\n")
    code, _, errors = run("open('/no/such/file')")
    assert code == 1
    assert b"FileNotFoundError" in errors


@pytest.mark.parametrize(
    ("how", "reason"), [(">&-", b"Bad file descriptor"), ("> /dev/full", b"No space left on device")]
)
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (PRINTS, 2),
        ("print('text', flush=True)", 2),
        ("try: print('text', flush=True)\nexcept OSError: sys.exit(1)", 1),  # as libraries do
    ],
)
def test_output_that_is_lost_is_an_error_in_one_line(body, expected, how, reason):
    code, _, errors = run(body, how)
    assert (code, errors) == (expected, b"prog: the standard output could not be written: " + reason + b".\n")


@pytest.mark.parametrize(
    "body", [PRINTS, "print('text', flush=True)", "try: print(flush=True)\nexcept OSError: sys.exit(1)"]
)
def test_a_reader_who_has_seen_enough_ends_a_command_quietly(body):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", program(body)], stdout=writing, stderr=subprocess.PIPE, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_messages_that_are_lost_change_nothing():
    body = f"print('message', file=sys.stderr, flush=True); {PRINTS}"
    for how in ("2>&-", "2>/dev/full"):
        assert run(body, how) == (0, b"text\n", b"")


def test_files_do_not_get_the_numbers_of_closed_streams():
    body = "print([open('/dev/null').fileno() > 2 for _ in range(3)], file=open('/dev/fd/9', 'w'))"
    assert run(body, "<&- 2>&- 9>&1 >&-") == (0, b"[True, True, True]\n", b"")


@pytest.mark.parametrize(
    "environment", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_characters_that_the_console_does_not_have_are_escaped(environment):
    body = "print('caf\\u00e9 \\udcff'); print('\\u2026', file=sys.stderr)"
    assert run(body, **environment) == (0, b"caf\\xe9 \\udcff\n", b"\\u2026\n")


def test_what_is_silenced_is_no_error():
    body = "try: print('text', flush=True)\nexcept OSError: streams.silence(sys.stdout)\nprint('more', flush=True)"
    assert run(body, "> /dev/full") == (0, b"", b"")


@pytest.mark.middle
@pytest.mark.parametrize("command", ["fleetx.__main__ import main", "fleetx.launch.__main__ import main"])
def test_the_commands_are_run_so(command):
    entry = f"import sys; sys.argv[1:] = ['--help']; from {command}; main()"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", entry], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 2
    assert b": the standard output could not be written: No space left on device.\n" in done.stderr
    assert done.stderr.count(b"\n") == 1
