"""The planner on real models: is the predicted peak that of a real step, and is the chosen plan the fastest?

For each model and budget the chosen plan is run, then up to twelve plans as people make them and ten random ones, all
within the same budget; then the chosen one and the fastest of the others in turns. Everything is saved after each run;
what is saved is not run again.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.planning.cases import CASES, TINY_CASES, Case
from benchmarks.planning.measuring import Bench, OutOfTime, key_of
from fleetx.notices import tell_once
from fleetx.results import save_result, so_far
from fleetx.units import format_bytes

WHAT = (
    "Training in bf16 autocast over fp32 weights with fused AdamW, within a budget of what the allocator reserves. "
    "Rivals: all, none and every n-th block computed again, with and without offload, micro-batches of powers of two, "
    "and random states"
)
TINY_WHAT = (
    "Small models in fp32 on a simulated device of the stated size. Their speed is that of Python, which differs from "
    "moment to moment: it says nothing about plans"
)


def measure(
    folder: Path,
    *,
    tiny: bool = False,
    only: str | None = None,
    seconds: float | None = None,
    compile: bool = False,
    anew: bool = False,
) -> tuple[dict[str, Any], Path, bool]:
    """All cases and budgets that `only` is found in: the results, their file, and whether there was time for all.

    What was measured before is not measured again, unless `anew`.
    """
    name = "plan-tiny" if tiny else "plan-compiled" if compile else "plan"
    path = folder / f"{name}.json"
    results = so_far(path) or {}
    cases = chosen(TINY_CASES if tiny else CASES, only or "")
    for case in cases if anew else ():
        for budget in case.budgets:
            results.pop(key_of(case, budget), None)
    ends = None if seconds is None else time.monotonic() + seconds

    def save() -> None:
        save_result(name, {"what": TINY_WHAT if tiny else WHAT, "cases": results}, folder)

    def check_time() -> None:
        if ends is not None and time.monotonic() > ends:
            raise OutOfTime

    bench = Bench(results, save, check_time, _say, torch.device("cpu" if tiny else "cuda"), compile)
    threads = torch.get_num_threads()
    if tiny:
        torch.set_num_threads(1)  # what is tiny takes longer with more
    try:
        for case in cases:
            bench.measure(case)
    except OutOfTime:
        return results, path, False
    finally:
        torch.set_num_threads(threads)
    return results, path, True


def _say(line: str) -> None:
    """At once: it takes many minutes, and whoever reads a log wants to know where it stands."""
    print(line, flush=True)


def chosen(cases: Sequence[Case], only: str) -> list[Case]:
    """Cases by name and budget, as far as their libraries are installed; those left out are named."""
    found = [
        replace(case, budgets=[budget for budget in case.budgets if re.search(only, key_of(case, budget))])
        for case in cases
    ]
    wanted = [case for case in found if case.budgets]
    if not wanted:
        there = ", ".join(key_of(case, budget) for case in cases for budget in case.budgets)
        raise ValueError(f"nothing that is measured is called {only!r}: choose among {there}.")
    for case in wanted:
        if not case.is_possible:
            tell_once(f"bench.{case.name}", f"{case.name} is left out: it comes from {case.needs}, not installed here.")
    return [case for case in wanted if case.is_possible]


def rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """For the console."""
    made: list[tuple[str, ...]] = []
    for name, result in results.items():
        if "of_best_rival" not in result:
            why = "does not fit" if "does not fit" in result else "ran out of memory" if result.get("failed") else ""
            made.append((name, why or "not yet complete", "", "", "", ""))
            continue
        of_best = result["of_best_rival"]
        made.append(
            (
                name,
                f"{result['micro_batch']} × {result['k_steps']}",
                format_bytes(result["peak"]),
                f"{result['peak_error']:+.1%}",
                f"{result['samples_per_s']:,.1f}",
                "" if of_best is None else f"{of_best:.3f}× of {result['best_rival']}",
            )
        )
    return made
