"""`make chaos`: disturbs jobs in every way we know, counts what comes out, and saves it after each trial.

python -m tests.chaos                   what is still missing of the full counts
python -m tests.chaos --only stopped    one scenario
python -m tests.chaos --count 5         at most so many trials of each
"""

import argparse
import itertools
import json
import random
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.report.tables import chaos_outcome
from fleetx.results import save_result
from tests.chaos import scenarios
from tests.jobs.starting import ROOT

# The bars of the suite: what, how many trials, and the most seconds that 95 of 100 may take.
BARS = {
    "kills": (scenarios.kills, 200, 6.0),
    "kills_during_saves": (scenarios.kills_during_saves, 200, None),
    "damage": (scenarios.damage, 1600, None),
    "resumes": (scenarios.resumes, 150, None),
    "long_run": (scenarios.long_run, 300, None),
    "stopped": (scenarios.stopped, 50, 3.0 + 15.0),
    "orphans": (scenarios.orphans, 100, None),
    "causes": (scenarios.causes, 100, None),
    "machines": (scenarios.machines, 24, None),
}


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=BARS, help="this scenario only; may be given several times")
    parser.add_argument("--count", type=int, help="at most so many trials of each scenario")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results"), help="where chaos.json is kept (default %(default)s)"
    )
    parser.add_argument("--anew", action="store_true", help="forget earlier results of the chosen scenarios")
    options = parser.parse_args()
    file = options.out / "chaos.json"
    saved = json.loads(file.read_text(encoding="utf-8"))["scenarios"] if file.exists() else {}
    for name in options.only or BARS:
        if options.anew:
            saved.pop(name, None)
        run(name, saved, options)
    show(saved)


def run(name, saved, options):
    """Run what is missing of one scenario; each trial is saved when it is done."""
    play, wanted, _ = BARS[name]
    wanted = min(wanted, options.count or wanted)
    entry = saved.setdefault(name, {"what": " ".join(play.__doc__.split()), "trials": [], "seconds": 0.0})
    missing = wanted - len(entry["trials"])
    if missing <= 0:
        return
    if name == "long_run":
        play = partial(play, faults=missing)  # all of them in one run
    scratch = Path(tempfile.mkdtemp(prefix="fleetx-chaos-"))
    try:
        began = time.monotonic()
        for trial in itertools.islice(play(scratch, random.Random(f"{name} {len(entry['trials'])}")), missing):
            entry["trials"].append(_short(trial))
            entry["seconds"] += time.monotonic() - began
            began = time.monotonic()
            what = "The chaos suite: what was done to jobs, and what came out."
            save_result("chaos", {"what": what, "scenarios": saved}, options.out)
            if not trial.get("ok") and "skipped" not in trial:
                print(f"{name}: {trial}", flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _short(trial):
    """Without what a reader of good news does not need; where the checkout is matters to nobody."""
    if trial.get("ok"):
        return {key: value for key, value in trial.items() if key not in ("said", "what", "left", "wrong", "saved")}
    return json.loads(json.dumps(trial).replace(f"{ROOT}/", ""))


def show(saved):
    """The table: how many of how many, against the bar."""
    heads = ("scenario", "as it should be", "bar", "95th percentile, s", "took, min")
    table = Table(*heads, title="chaos", title_justify="left")
    for name, (_, wanted, most) in BARS.items():
        good, slowest, minutes = chaos_outcome(saved.get(name, {"trials": [], "seconds": 0.0}))
        bar = f"{wanted} of {wanted}" + (f", {most:g} s" if most else "")
        table.add_row(name, good, bar, slowest, minutes)
    Console().print(table)


if __name__ == "__main__":
    main()
