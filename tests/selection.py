"""Choose among the tests of a tier: a shard of them, or those that have not passed yet.

`--shard TEXT` runs one part of many, chosen by the text (a commit's hash, so that parts rotate). `--record FILE` writes
down what came out of each test, and leaves out those that passed on the same code before.
"""

import json
import re
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SHARDS = 30
ROOT = Path(__file__).parent.parent


def pytest_addoption(parser):
    group = parser.getgroup("selection")
    group.addoption("--shard", metavar="TEXT", help=f"run one of {SHARDS} parts of the tests, chosen by this text")
    group.addoption("--record", metavar="FILE", type=Path, help="write down outcomes; leave out what passed before")


def pytest_configure(config):
    file = config.getoption("record")
    if file is not None and not hasattr(config, "workerinput"):  # the one process that hears of all outcomes
        config.pluginmanager.register(Recorder(file))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    shard, file = config.getoption("shard"), config.getoption("record")
    kept = [item for item in items if shard is None or shard_of(item.nodeid) == shard_of(shard)]
    if file is not None:
        passed = passed_before(file)
        kept = [item for item in kept if item.nodeid not in passed]
    left = set(items) - set(kept)
    if left:
        config.hook.pytest_deselected(items=list(left))
        items[:] = kept


def shard_of(text: str) -> int:
    return zlib.crc32(text.encode()) % SHARDS


class Recorder:
    """Appends a line for each test that has ended; a session begins with a line that says which code it tests."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.outcomes: dict[str, tuple[str, float]] = {}
        file.parent.mkdir(parents=True, exist_ok=True)
        self._write(code=code_under_test())

    def pytest_runtest_logreport(self, report):
        outcome, seconds = self.outcomes.get(report.nodeid, ("passed", 0.0))
        outcome = report.outcome if outcome == "passed" else outcome
        self.outcomes[report.nodeid] = (outcome, seconds + report.duration)
        if report.when == "teardown":
            outcome, seconds = self.outcomes.pop(report.nodeid)
            name = re.sub(r"@\w+$", "", report.nodeid)  # xdist adds its group
            self._write(test=name, outcome=outcome, seconds=round(seconds, 3))

    def _write(self, **line: Any) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def passed_before(file: Path) -> set[str]:
    """Tests that ended well in an earlier session on the code of the last one.

    The last session itself does not count: a worker that is replaced in its middle must choose as the others did.
    """
    sessions = list(read_sessions(file))
    code = sessions[-1][0]
    return {
        line["test"]
        for tested, lines in sessions[:-1]
        if tested == code
        for line in lines
        if line["outcome"] != "failed"
    }


def read_sessions(file: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The code of each session, and what came out."""
    code, lines = None, []
    for text in file.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if "code" in line:
            if code is not None:
                yield code, lines
            code, lines = line["code"], []
        else:
            lines.append(line)
    if code is not None:
        yield code, lines


def code_under_test() -> str:
    """The commit, if there is one, and a checksum of all files that tests read."""
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    folders = [ROOT / name for name in ("src", "tests", "benchmarks", "examples", "docs")]
    files = sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md", ".json"))
    checksum = 0
    for path in [*files, ROOT / "README.md", ROOT / "pyproject.toml"]:
        checksum = zlib.crc32(path.read_bytes(), checksum)
    return f"{done.stdout.strip()} {checksum:08x}".strip()
