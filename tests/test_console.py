"""What is printed fits, and is printed on any kind of output."""

import io
import os

import pytest
from rich.console import Console

from fleetx.console import JobProgress, SteadyStream, broken_between_words, open_console

NUMBERS = "57,520/180,120 5,752/s 0:00:22"


class Clock:
    seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


def shown(width, clock, terminal=True):
    """What a terminal of that width, or a log, has got when a third of a job is done, at 10 seconds."""
    written = io.StringIO()
    console = Console(file=written, width=width, force_terminal=terminal, color_system=None, highlight=False)
    clock.seconds = 0.0
    with JobProgress(180_120, console=console, clock=clock) as progress:
        progress.begin("FleetX, LARS, batch 512")
        for second in range(10):
            clock.seconds = second
            progress.advance(5_752, "accuracy 99.2%")
    return written.getvalue()


def lines_of(written):
    return [line.partition("\x1b[2K")[2].rstrip() for line in written.replace("\r", "\n").splitlines()]


@pytest.mark.parametrize("width", [120, 80, 60, 40])
def test_the_live_line_fits_and_keeps_its_numbers(width, clock):
    last = [line for line in lines_of(shown(width, clock)) if "57,520" in line][-1]
    assert len(last) <= width
    assert NUMBERS in last
    assert ("━" in last) == (width >= 80)
    assert ("LARS" in last) == (width >= 60)
    assert ("accuracy" in last) == (width >= 80)


def test_rate_and_time_left_follow_from_the_clock(clock):
    progress = JobProgress(1000, console=Console(file=io.StringIO(), width=80), clock=clock)
    written = progress._console.file
    progress.begin("part")
    progress.advance(100)  # where the job goes on from counts for nothing
    clock.seconds = 10.0
    progress.advance(400)
    assert written.getvalue() == " 50%  part  40/s  0:00:13 left\n"


def test_a_log_gets_a_line_now_and_then(clock):
    written = io.StringIO()
    with JobProgress(1000, console=Console(file=written, width=80), clock=clock) as progress:
        progress.begin("FleetX, LARS, batch 512")
        for second in range(1000):
            clock.seconds = second
            progress.advance(1, "accuracy 100.0%")
    lines = written.getvalue().splitlines()
    assert len(lines) == 20
    assert all(len(line) <= 80 for line in lines)
    assert lines[-1] == "100%  FleetX, LARS, batch 512  1/s  0:00:00 left  accuracy 100.0%"


def test_workers_but_the_first_show_nothing(clock):
    written = io.StringIO()
    with JobProgress(10, enabled=False, console=Console(file=written), clock=clock) as progress:
        progress.advance(10)
    assert written.getvalue() == ""


def test_what_an_output_cannot_encode_is_replaced():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    SteadyStream(stream).write("a … b\n")
    assert raw.getvalue() == b"a ? b\n"


def test_tables_and_bars_of_ascii_consoles_need_no_replacement(monkeypatch, clock):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    console = open_console()
    console._force_terminal = True
    with JobProgress(10, console=console, clock=clock) as progress:
        progress.advance(10)
    assert b"10/10" in raw.getvalue()
    assert b"?" not in raw.getvalue().replace(b"\x1b[?", b"")


@pytest.mark.parametrize("output", ["/dev/full", "closed reader"])
def test_an_output_that_takes_nothing_is_no_error(output):
    if output == "/dev/full":
        descriptor = os.open(output, os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        steady = SteadyStream(stream)
        assert steady.write("lost\n") == 5
        assert steady.write("lost too\n") == 9


def test_lines_are_broken_between_words_and_paths_stay_whole():
    path = "/a/folder-that-is/longer-than/any/line-of-forty/columns"
    text = f"Stopped. The run with FleetX is complete: {path}\n  pattern  12  bn.weight, bn.bias, stages.0.bn1, more"
    assert broken_between_words(text, 40).split("\n") == [
        "Stopped. The run with FleetX is",
        "complete:",
        path,
        "  pattern  12  bn.weight, bn.bias,",
        "  stages.0.bn1, more",
    ]
    box = "+====+\n|    |\n|a  b|\n\n+====+"
    assert broken_between_words(box, 6) == box
