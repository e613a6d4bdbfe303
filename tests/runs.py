"""Run tiers of tests for a long time, go on after an interruption, and print a summary.

python -m tests.runs full                everything; GPU tests where there is a GPU
python -m tests.runs load                the fast tier ten times and the middle one three times on a busy machine
python -m tests.runs load --rounds 2,0   other numbers of rounds
"""

import argparse
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tests.selection import ROOT, code_under_test, read_sessions

FOLDER = ROOT / ".test-runs"
FAST, MIDDLE = "not middle and not full and not gpu", "middle and not full and not gpu"
ON_BOTH_CORES = ["-n", "2", "--dist", "loadgroup"]
BUSY_LOOP = "while True: pass"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.runs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["full", "load"])
    parser.add_argument("--rounds", default="10,3", help="load: rounds of the fast and of the middle tier")
    parser.add_argument("--busy", type=int, default=2, help="load: processes that compute meanwhile (default 2)")
    parser.add_argument("--again", action="store_true", help="forget what was recorded before")
    options = parser.parse_args()
    folder = FOLDER / options.what
    if options.again:
        shutil.rmtree(folder, ignore_errors=True)
    if options.what == "full":
        runs = {"cpu": [*ON_BOTH_CORES, "-m", "not gpu"]}
        if torch.cuda.is_available():
            runs["gpu"] = ["-m", "gpu"]
        code = run_all(runs, folder)
    else:
        fast, middle = (int(count) for count in options.rounds.split(","))
        runs = {f"fast-{number}": [*ON_BOTH_CORES, "-m", FAST] for number in range(1, fast + 1)}
        runs |= {f"middle-{number}": [*ON_BOTH_CORES, "-m", MIDDLE] for number in range(1, middle + 1)}
        with busy_machine(options.busy):
            code = run_all(runs, folder)
    show(folder)
    return code


def run_all(runs: dict[str, list[str]], folder: Path) -> int:
    """Give 1 if a test failed in any of the runs; a run that was interrupted goes on where it was."""
    failed = 0
    for name, choice in runs.items():
        record = (folder / name).with_suffix(".jsonl")
        command = [sys.executable, "-m", "pytest", "tests", "-q", "--record", str(record), *choice]
        done = subprocess.run(command, cwd=ROOT)
        if done.returncode not in (0, 1, 5):  # 5: everything has passed before
            show(folder)
            sys.exit(done.returncode)
        failed |= done.returncode == 1
    return failed


@contextmanager
def busy_machine(count: int):
    """Inside, so many processes compute without a pause."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def show(folder: Path) -> None:
    """What came out of the code under test, a line for each run, then the tests that failed and the slowest."""
    code, table = code_under_test(), Table("run", "passed", "skipped", "failed", "minutes of tests")
    failed, seconds = [], {}
    for file in sorted(folder.glob("*.jsonl"), key=os.path.getmtime):
        last: dict[str, dict] = {}
        for tested, lines in read_sessions(file):
            last.update({line["test"]: line for line in lines if tested == code})
        of = [line["outcome"] for line in last.values()]
        minutes = sum(line["seconds"] for line in last.values()) / 60
        table.add_row(file.stem, *(str(of.count(what)) for what in ("passed", "skipped", "failed")), f"{minutes:.1f}")
        failed += [f"{file.stem}: {line['test']}" for line in last.values() if line["outcome"] == "failed"]
        seconds |= {name: line["seconds"] for name, line in last.items()}
    console = Console()
    console.print(f"code {code}, {os.cpu_count()} cores, torch {torch.__version__}")
    console.print(table)
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True)[:10]:
        console.print(f"slow: {seconds[name]:6.1f} s  {name}", markup=False)
    for name in failed:
        console.print(f"FAILED {name}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
