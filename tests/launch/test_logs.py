import io
import tracemalloc

import pytest

from fleetx.launch.logs import Relay, WorkerLog, last_lines


def test_a_restart_adds_to_the_log_and_deletes_nothing(tmp_path):
    first = WorkerLog(tmp_path / "log", 2, "job a, attempt 0")
    assert first.path == tmp_path / "log" / "workerlog.2"
    first.path.write_text("one\n")
    second = WorkerLog(tmp_path / "log", 2, "job a, attempt 1")
    with second.path.open("a") as file:
        file.write("two\n")
    text = second.path.read_text()
    assert text.startswith("one\n\n===== job a, attempt 1, ")
    assert second.end() == ["two"]


def test_each_later_attempt_has_its_header_even_if_nothing_was_printed(tmp_path):
    for number in range(3):
        log = WorkerLog(tmp_path, 1, f"job a, attempt {number}", first=number == 0)
    lines = [line for line in log.path.read_text().splitlines() if line]
    assert [line.split(", ")[1] for line in lines] == ["attempt 1", "attempt 2"]
    assert log.path.read_text().startswith("===== job a, attempt 1, ")
    assert log.end() == []


def test_the_console_shows_whole_lines_with_a_name(tmp_path):
    log = WorkerLog(tmp_path, 0, "")
    console = io.StringIO()
    relay = Relay(log, "[worker 0] ", console)
    relay.pump()  # nothing is there yet
    with log.path.open("ab") as file:
        for part, shown in ((b"hel", ""), (b"lo\nwor", "[worker 0] hello\n"), (b"ld", "[worker 0] hello\n")):
            file.write(part)
            file.flush()
            relay.pump()
            assert console.getvalue() == shown
    relay.pump(whole=False)
    assert console.getvalue() == "[worker 0] hello\n[worker 0] world\n"


def test_of_a_bar_that_redraws_its_line_the_last_state_is_shown(tmp_path):
    log = WorkerLog(tmp_path, 0, "")
    console = io.StringIO()
    relay = Relay(log, "", console)
    log.path.write_bytes(b"10%\r50%\r100%\nnot utf-8: \xff\nof another system\r\n10%\r")
    relay.pump()
    assert console.getvalue() == "100%\nnot utf-8: \ufffd\nof another system\n"
    assert log.end()[-2:] == ["of another system", "10%"]
    with log.path.open("ab") as file:
        file.write(b"20%\r" * 10_000)
    relay.pump()
    assert relay._rest == b"20%\r"
    relay.pump(whole=False)
    assert console.getvalue().endswith("system\n20%\n")


class Counting(io.StringIO):
    """A console that remembers how much was shown, and how much of it at once."""

    shown = most = lines = 0

    def write(self, text):
        self.shown += len(text)
        self.lines += text.count("\n")
        self.most = max(self.most, len(text))
        return len(text)


@pytest.mark.parametrize("line", [b"x" * (1 << 20), b"x" * 1023 + b"\n"], ids=["one line", "many lines"])
def test_a_worker_that_prints_without_end_takes_no_memory_of_the_launcher(tmp_path, line):
    log = WorkerLog(tmp_path, 0, "")
    console = Counting()
    relay = Relay(log, "", console)
    size = 16 << 20
    log.path.write_bytes(line * (size // len(line)))
    tracemalloc.start()
    try:
        relay.pump()
        assert 0 < console.shown < size // 2  # the launcher has other things to do
        relay.pump(whole=False)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert console.shown == size + (0 if b"\n" in line else console.lines)
    assert console.most < 1 << 20


def test_the_end_of_a_log_has_the_whole_traceback():
    before = [f"line {number}" for number in range(100)]
    trace = ["[rank1]: Traceback (most recent call last):", *(f"  frame {n}" for n in range(40)), "ValueError: x"]
    lines = last_lines("\n".join([*before, *trace, ""]))
    assert lines == [*before[-5:], *trace]
    assert last_lines("\n".join(before)) == before[-20:]
    assert last_lines("\n\n") == []


def test_a_log_that_is_a_link_to_a_device_is_not_read(tmp_path):
    (tmp_path / "workerlog.0").symlink_to("/dev/full")
    log = WorkerLog(tmp_path, 0, "job", first=True)
    shown = io.StringIO()
    Relay(log, "[worker 0] ", shown).pump(whole=False)
    assert not shown.getvalue()
    assert log.end() == []


def test_a_folder_of_logs_that_is_gone_is_no_reason_to_give_up_a_job(tmp_path):
    (tmp_path / "log").touch()
    log = WorkerLog(tmp_path / "log", 0, "job a, attempt 1", first=False)
    assert (log.start, log.end()) == (0, [])
