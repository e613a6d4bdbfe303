"""One case at one budget: the planner's choice and its rivals, each measured once and saved at once."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fleetx.bench.planning.cases import Case
from fleetx.bench.planning.grid import Rival, as_plan, rivals
from fleetx.bench.planning.running import Runner
from fleetx.planner.blocks import ways_to_cut
from fleetx.planner.budget import budget_on
from fleetx.planner.costs import Profile
from fleetx.planner.feeding import Feeding
from fleetx.planner.fitting import DoesNotFit, first_that_fits
from fleetx.planner.making import plan_for
from fleetx.planner.plan import Plan
from fleetx.planner.profile import measure
from fleetx.planner.verify import until_verified
from fleetx.units import format_bytes

Result = dict[str, Any]
SIMULATED_LINK = 2e9  # bytes per second


class OutOfTime(Exception):  # noqa: N818 - it reads as what it says
    """The time that was given is over; what was measured is saved."""


@dataclass
class Bench:
    """All cases, in a result that grows. `save` is called after each measurement, `check_time` before."""

    results: dict[str, Result]
    save: Callable[[], None]
    check_time: Callable[[], None]
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
        opened = self._open(case)
        memory = budget_on(self.device, budget)[0]
        result |= {"case": case.name, "memory": memory, "global_batch": case.global_batch}
        try:
            plan = self._chosen(case, opened, memory, result)
        except DoesNotFit as error:
            result |= {"does not fit": str(error), "complete": True}
            self.save()
            return
        self._run("chosen", plan, opened, memory, result)
        if budget is not None:  # without a budget it is a reference
            self._run_rivals(case, plan, opened, memory, result)
        self._run("chosen, again", plan, opened, memory, result)
        result |= {**compared(result), "complete": True}
        self.save()

    def _chosen(self, case: Case, opened: "_Open", memory: int, result: Result) -> Plan:
        """The same plan after an interruption, or a new one: first the prediction, then verified."""
        if "plan" in result:
            return Plan.from_json(result["plan"])
        question = {"memory": memory, "global_batch": case.global_batch, "one_forward": case.one_forward}

        def make(profile: Profile) -> Plan:
            return plan_for(profile, **question, curve=False)

        def planned(cuts: Sequence[str]) -> Plan:
            profile = opened.profile_at(cuts)
            result["first_predicted_peak"] = make(profile).peak
            return until_verified(profile, opened.feeding, opened.sample, make).plan

        plan = first_that_fits(ways_to_cut(opened.feeding, opened.sample), planned)
        result |= {
            "plan": plan.to_json(),
            "predicted_peak": plan.peak,
            "predicted_samples_per_s": plan.samples_per_s,
            "micro_batch": plan.micro_batch,
            "k_steps": plan.k_steps,
            "reason": plan.reason,
        }
        self.save()
        return plan

    def _run_rivals(self, case: Case, plan: Plan, opened: "_Open", memory: int, result: Result) -> None:
        profile = opened.profile_at(plan.names)
        for rival in rivals(profile, case.global_batch, memory, one_forward=case.one_forward):
            self._run(rival.name, as_plan(rival, plan), opened, memory, result, rival)

    def _run(
        self, name: str, plan: Plan, opened: "_Open", memory: int, result: Result, rival: Rival | None = None
    ) -> None:
        runs = result.setdefault("runs", {})
        if name in runs:
            return
        self.check_time()
        states = [str(state) for state in plan.states]
        runs[name] = {
            "micro_batch": plan.micro_batch,
            "k_steps": plan.k_steps,
            "states": {state: states.count(state) for state in dict.fromkeys(states)},
            "is_rival": rival is not None,
            **opened.runner.run(plan, memory).as_dict(),
        }
        self.save()

    def _open(self, case: Case) -> "_Open":
        if case.name not in self._opened:
            self._opened[case.name] = _Open(case, self.device, self.compile)
        return self._opened[case.name]


class _Open:
    """A case whose model is on the device."""

    def __init__(self, case: Case, device: torch.device, compile: bool) -> None:
        torch.manual_seed(0)
        trained = case.make()
        model, on_gpu = trained.model.to(device).train(), device.type == "cuda"
        self.sample = trained.sample
        self.feeding = Feeding(model, trained.loss_fn, torch.bfloat16 if on_gpu else None)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=on_gpu or None)
        self.runner = Runner(self.feeding, self.sample, self.optimizer)
        self._settings: dict[str, Any] = {"compile": compile, "bandwidth": None if on_gpu else SIMULATED_LINK}
        self._profiles: dict[tuple[str, ...], Profile] = {}

    def profile_at(self, cuts: Sequence[str]) -> Profile:
        """What the model costs if it is cut at these modules; measured once."""
        key = tuple(cuts)
        if key not in self._profiles:
            self._profiles[key] = measure(self.feeding, self.sample, cuts, optimizer=self.optimizer, **self._settings)
        return self._profiles[key]


def key_of(case: Case, budget: int | None) -> str:
    """How a result is called."""
    return f"{case.name} in {'all memory' if budget is None else format_bytes(budget)}"


def compared(result: Result) -> Result:
    """The prediction beside the measurement, and the choice beside the best rival that ran."""
    ours = [run for name, run in result["runs"].items() if name.startswith("chosen") and "failed" not in run]
    if not ours:
        return {"failed": True}
    speed = sum(run["samples_per_s"] for run in ours) / len(ours)
    peak = max(run["peak"] for run in ours)
    rivals = {n: r["samples_per_s"] for n, r in result["runs"].items() if r["is_rival"] and "failed" not in r}
    best = max(rivals, key=lambda name: rivals[name], default=None)
    return {
        "failed": len(ours) < sum(name.startswith("chosen") for name in result["runs"]),
        "peak": peak,
        "peak_error": result["predicted_peak"] / peak - 1,
        "first_peak_error": result["first_predicted_peak"] / peak - 1,
        "samples_per_s": speed,
        "best_rival": best,
        "of_best_rival": None if best is None else speed / rivals[best],
    }
