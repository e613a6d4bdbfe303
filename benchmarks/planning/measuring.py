"""One case at one budget: the planner's choice and its rivals run, and the fastest of them again; all saved at once."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from benchmarks.planning.cases import Case
from benchmarks.planning.grid import Rival, as_plan, rivals
from benchmarks.planning.running import Runner
from fleetx.planner.budget import budget_on
from fleetx.planner.driver import Driver, Request
from fleetx.planner.feeding import Feeding
from fleetx.planner.fitting import DoesNotFit
from fleetx.planner.plan import Plan
from fleetx.results import now
from fleetx.units import format_bytes

Result = dict[str, Any]
SIMULATED_LINK = 2e9  # bytes per second
CHOSEN, UNLIMITED = "chosen", "with all memory"
ALL_MEMORY = "in all memory"
_FINALISTS, _FINALS = 3, 2
_PAIRS = 5  # finals of the chosen plan and the one with all memory: they differ by little


class OutOfTime(Exception):  # noqa: N818 - it reads as what it says
    """The time that was given is over; what was measured is saved."""


@dataclass
class Bench:
    """All cases, in a result that grows.

    `save` is called after each measurement, `check_time` before; `say` is told in a line what came out.
    """

    results: dict[str, Result]
    save: Callable[[], None]
    check_time: Callable[[], None]
    say: Callable[[str], None]
    device: torch.device
    compile: bool = False
    _opened: dict[str, "_Open"] = field(default_factory=dict)

    def measure(self, case: Case) -> None:
        """All budgets of a case, as far as they are not measured yet."""
        try:
            for budget in case.budgets:
                result = self.results.setdefault(key_of(case, budget), {})
                if not result.get("complete"):
                    self._measure(case, budget, result)
        finally:
            self._opened.clear()
            gc.collect()

    def _measure(self, case: Case, budget: int | None, result: Result) -> None:
        self.check_time()
        memory = budget_on(self.device, budget)[0]
        task = _Task(key_of(case, budget), case, self._open(case), memory, result)
        result |= {"case": case.name, "memory": memory, "global_batch": case.global_batch}
        try:
            plan = self._chosen(task)
        except DoesNotFit as error:
            result |= {"does not fit": str(error), "complete": True}
            self.save()
            self.say(f"{task.key}: does not fit")
            return
        plans = {CHOSEN: plan}
        if budget is not None:  # without a budget it is a reference
            plans |= self._rivals(plan, task)
            plans |= self._unlimited(case)
        for name, one in plans.items():
            self._run(name, one, task)
        self._run_finals(plans, task)
        result |= {**compared(result), "complete": True}
        self.save()

    def _chosen(self, task: "_Task") -> Plan:
        """The same plan after an interruption, or a new one: first the prediction, then verified."""
        if "plan" in task.result:
            return Plan.from_json(task.result["plan"])
        began = time.perf_counter()
        found = task.driver().plan()
        plan = replace(found.plan, planning_seconds=time.perf_counter() - began)
        task.result.update(
            taken=now(),  # rows may be of different days
            plan=plan.to_json(),
            planning_seconds=plan.planning_seconds,
            first_predicted_peak=found.first_peak,
            predicted_peak=plan.peak,
            predicted_samples_per_s=plan.samples_per_s,
            micro_batch=plan.micro_batch,
            k_steps=plan.k_steps,
            reason=plan.reason,
        )
        self.save()
        figures = {"samples_per_s": plan.samples_per_s, "peak": plan.peak}
        self.say(said_of(task.key, f"planned, {plan.micro_batch} × {plan.k_steps}", figures, plan.planning_seconds))
        return plan

    def _unlimited(self, case: Case) -> dict[str, Plan]:
        """The plan for the whole device, if there is one to compare with: it was measured before."""
        known = self.results.get(f"{case.beside} {ALL_MEMORY}", {}).get("plan")
        return {} if known is None else {UNLIMITED: Plan.from_json(known)}

    def _rivals(self, plan: Plan, task: "_Task") -> dict[str, Plan]:
        """The same ones after an interruption: the model may have been measured anew since, and others be worth it."""
        if "rivals" not in task.result:
            profile, case = task.driver().measured(plan.names), task.case
            found = rivals(profile, case.global_batch, task.memory, one_forward=case.one_forward)
            task.result["rivals"] = {rival.name: rival.as_dict() for rival in found}
        saved = task.result["rivals"].items()
        return {name: as_plan(Rival.from_dict(name, values), plan) for name, values in saved}

    def _run(self, name: str, plan: Plan, task: "_Task") -> None:
        """A plan for the first time."""
        runs = task.result.setdefault("runs", {})
        if name not in runs:
            states = [str(state) for state in plan.states]
            what = {
                "micro_batch": plan.micro_batch,
                "k_steps": plan.k_steps,
                "states": {state: states.count(state) for state in dict.fromkeys(states)},
                "is_rival": name not in (CHOSEN, UNLIMITED),
            }
            with self._measuring(name, plan, task) as figures:
                runs[name] = what | figures

    def _run_finals(self, plans: dict[str, Plan], task: "_Task") -> None:
        """The chosen plan and its fastest rivals some more times, in turns.

        Machines have good and bad moments: of twenty that ran once, the fastest is also one of the luckiest.
        """
        runs = task.result["runs"]
        if "failed" in runs[CHOSEN]:
            return  # there is nothing to compare
        pair = [name for name in (CHOSEN, UNLIMITED) if name in plans and _ran(runs[name])]
        rivals = [name for name in fastest_rivals(runs) if name in plans]
        for number in range(_FINALS):
            for name in [*pair, *rivals]:
                self._run_again(name, number, plans[name], task)
        for number in range(_FINALS, _PAIRS if UNLIMITED in pair else 0):
            for name in pair:
                self._run_again(name, number, plans[name], task)

    def _run_again(self, name: str, number: int, plan: Plan, task: "_Task") -> None:
        """A plan once more, if it did not run more than so many times after the first."""
        run = task.result["runs"][name]
        again = run.setdefault("again", [])
        if len(again) <= number:
            with self._measuring(f"{name}, again", plan, task, bool(run.get("limited"))) as figures:
                again.append(figures)

    @contextmanager
    def _measuring(self, name: str, plan: Plan, task: "_Task", limited: bool = False) -> Iterator[Result]:
        """What running a plan showed; what is done with it inside is saved."""
        self.check_time()
        began = time.perf_counter()
        figures = task.opened.runner.run(plan, plan.memory, limited=limited).as_dict() | {"taken": now()}
        yield figures
        self.save()
        self.say(said_of(task.key, name, figures, time.perf_counter() - began))

    def _open(self, case: Case) -> "_Open":
        if case.name not in self._opened:
            self._opened[case.name] = _Open(case, self.device, self.compile)
        return self._opened[case.name]


class _Task(NamedTuple):
    """One case at one budget."""

    key: str
    case: Case
    opened: "_Open"
    memory: int
    result: Result

    def driver(self) -> Driver:
        """Plans the case; what was measured for one budget is on disk for the others."""
        case = self.case
        request = replace(self.opened.request, memory=self.memory, global_batch=case.global_batch)
        return Driver(replace(request, one_forward=case.one_forward))


class _Open:
    """A case whose model is on the device."""

    def __init__(self, case: Case, device: torch.device, compile: bool) -> None:
        torch.manual_seed(0)
        trained = case.make()
        model, on_gpu = trained.model.to(device).train(), device.type == "cuda"
        feeding = Feeding(model, trained.loss_fn, torch.bfloat16 if on_gpu else None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=on_gpu or None)
        self.runner = Runner(feeding, trained.sample, optimizer)
        link = None if on_gpu else SIMULATED_LINK
        self.request = Request(
            feeding, trained.sample, memory=0, global_batch=0, optimizer=optimizer, compile=compile, bandwidth=link
        )


def key_of(case: Case, budget: int | None) -> str:
    """How a result is called."""
    return f"{case.name} {ALL_MEMORY if budget is None else f'in {format_bytes(budget)}'}"


def said_of(key: str, name: str, figures: Result, seconds: float) -> str:
    """What came out of a plan, in a line; and how long one waited for that."""
    if "failed" in figures:
        came_out = figures["failed"].partition(". ")[0]  # torch goes on about the allocator
    else:
        came_out = f"{figures['samples_per_s']:,.1f} samples/s, {format_bytes(figures['peak'])}"
    return f"{key}: {name}: {came_out} ({seconds:.1f} s)"


def fastest_rivals(runs: dict[str, Result]) -> list[str]:
    """Those that take part in the finals."""
    speeds = {name: run["samples_per_s"] for name, run in runs.items() if run["is_rival"] and "failed" not in run}
    return sorted(speeds, key=lambda name: -speeds[name])[:_FINALISTS]


def compared(result: Result) -> Result:
    """The prediction beside the measurement, and the choice beside the best rival that ran."""
    runs = result["runs"]
    ours = _ran(runs[CHOSEN])
    if not ours:
        return {"failed": True}
    speed, peak = _speed(runs[CHOSEN]), max(run["peak"] for run in ours)
    # Who ran out of memory once is no alternative.
    rivals = {name: _speed(runs[name]) for name in fastest_rivals(runs) if not _has_failed(runs[name])}
    best = max(rivals, key=lambda name: rivals[name], default=None)
    return _beside_all_memory(runs) | {
        "failed": _has_failed(runs[CHOSEN]),
        "peak": peak,
        "peak_error": result["predicted_peak"] / peak - 1,
        "first_peak_error": result["first_predicted_peak"] / peak - 1,
        "samples_per_s": speed,
        "best_rival": best,
        "of_best_rival": None if best is None else speed / rivals[best],
    }


def _beside_all_memory(runs: dict[str, Result]) -> Result:
    """The speed beside that with all memory, of finals that ran one right after the other."""
    pairs = zip(runs[CHOSEN].get("again", []), runs.get(UNLIMITED, {}).get("again", []), strict=False)
    shares = [a["samples_per_s"] / b["samples_per_s"] for a, b in pairs if "failed" not in a and "failed" not in b]
    return {"of_all_memory": statistics.median(shares)} if shares else {}


def _ran(run: Result) -> list[Result]:
    """Each time that a plan ran and had enough memory."""
    return [one for one in (run, *run.get("again", [])) if "failed" not in one]


def _has_failed(run: Result) -> bool:
    return len(_ran(run)) < 1 + len(run.get("again", []))


def _speed(run: Result) -> float:
    """The median of all its runs: the machine may have been busy in one of them."""
    return statistics.median(one["samples_per_s"] for one in _ran(run))
