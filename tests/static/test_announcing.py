"""What is seen while a program compiles."""

import io
import sys

import pytest

from fleetx import static
from fleetx.notices import quiet
from fleetx.static import announcing
from fleetx.static.announcing import Announcement
from tests.static.making import feeds, program


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown_for(monkeypatch, stream, *seconds):
    """What an announcement writes that is shown after these seconds, and ends after the last."""
    monkeypatch.setattr(sys, "stderr", stream)
    clock = iter([0.0, *seconds])
    one = Announcement("the forward", lambda: next(clock))
    for _ in seconds[:-1]:
        one.show()
    one.end()
    return stream.getvalue()


def test_a_terminal_has_one_line_that_counts(monkeypatch):
    shown = shown_for(monkeypatch, Terminal(), 2.0, 3.0, 84.4)
    assert shown == "\rcompiling the forward ... 2 s\rcompiling the forward ... 3 s\rcompiled the forward in 84 s    \n"
    assert all(len(line) < 40 for line in shown.split("\r"))


def test_elsewhere_there_are_lines_that_become_rare(monkeypatch):
    shown = shown_for(monkeypatch, io.StringIO(), 2.0, 6.0, 84.4)
    assert shown.splitlines() == [
        "compiling the forward ... 2 s",
        "compiling the forward ... 6 s",
        "compiled the forward in 84 s",
    ]
    assert Announcement("the forward").next_after(2.0) == 4.0


def test_what_is_compiled_at_once_and_a_closed_stderr_need_no_line(monkeypatch):
    assert shown_for(monkeypatch, io.StringIO(), 1.0) == ""
    monkeypatch.setattr(sys, "stderr", None)
    Announcement("the forward").show()


@pytest.mark.middle
def test_a_program_announces_each_compilation_and_no_other_run(monkeypatch):
    """Each announcement begins when torch begins to compile, and is ended."""
    told = []

    class Noted(announcing._Announcer):
        def begin(self, what):
            told.append(self._what)
            super().begin(what)

    monkeypatch.setattr(announcing, "_Announcer", Noted)
    main, exe = program(compile=True), static.Executor()
    for feed in feeds(3):
        exe.run(main, feed, ["loss"])
    assert told[0] == "the forward"
    assert set(told) <= {"the forward", "backward and update"}  # torch may compile the backward when it first runs
    del told[:]
    exe.run(main, feeds(1)[0], ["loss"])  # the first update
    assert set(told) == {"backward and update"}
    del told[:]
    for feed in feeds(3):
        exe.run(main, feed, ["loss"])
    assert told == []
    with quiet():
        exe.run(program(compile=True), feeds(1)[0], ["loss"])
    monkeypatch.setenv("RANK", "1")
    exe.run(program(compile=True), feeds(1)[0], ["loss"])
    assert told == []
