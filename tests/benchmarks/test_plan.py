"""`python -m benchmarks plan --tiny`: predictions beside a simulated device, saved step by step, taken up again."""

import json
import re
import time
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from benchmarks import plan as bench
from benchmarks.__main__ import app
from benchmarks.planning import grid, measuring, running
from benchmarks.planning.cases import CASES, KIB, TINY_CASES, Case, Trained
from benchmarks.planning.measuring import compared, fastest_rivals, key_of, said_of
from benchmarks.planning.running import Ran, Runner
from benchmarks.planning.simulated import SimulatedDevice
from benchmarks.planning.unet import UNet
from benchmarks.report.tables import plan_table
from fleetx import clock
from fleetx.planner import profile
from fleetx.planner.chain import State
from fleetx.planner.feeding import Feeding
from fleetx.planner.making import plan_for
from fleetx.planner.profile import measure
from fleetx.units import format_bytes
from tests.planner.profiles import transformer

GIB = 2**30


@pytest.fixture(autouse=True)
def _quick(tmp_path, monkeypatch, work_clock):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(grid, "BY_HAND", 3)
    monkeypatch.setattr(grid, "AT_RANDOM", 1)


def stack():
    blocks = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))
    return Trained(nn.Sequential(*blocks), (torch.randn(4, 8, 32), torch.randn(4, 8, 32)), nn.functional.mse_loss)


@pytest.fixture
def cases(monkeypatch):
    made = [Case("stack", stack, 16, (800 * KIB, 1600 * KIB)), Case("other", stack, 16, (100 * KIB,), needs="nowhere")]
    monkeypatch.setattr(bench, "TINY_CASES", made)
    return made


@pytest.mark.full
def test_what_is_planned_is_run_and_saved(cases, tmp_path):
    results, path, complete = bench.measure(tmp_path, tiny=True)
    assert complete
    assert list(results) == ["stack in 800 KiB", "stack in 1.56 MiB"]
    assert json.loads(path.read_text())["cases"] == results
    for result in results.values():
        assert not result["failed"]
        assert result["peak"] <= result["memory"]
        assert abs(result["peak_error"]) < 0.25  # of a few hundred KiB
        assert len(result["runs"]["chosen"]["again"]) == 2
        assert 1 <= sum(run["is_rival"] for run in result["runs"].values()) <= 4
        assert result["of_best_rival"] > 0
    assert [row[0] for row in bench.rows(results)] == list(results)


@pytest.mark.middle
def test_every_measurement_is_said_in_a_line_as_soon_as_it_is_there(tmp_path, monkeypatch, capsys):
    budgets = (800 * KIB, 100 * KIB)
    monkeypatch.setattr(bench, "TINY_CASES", [Case("stack", stack, 16, budgets)])
    monkeypatch.setattr(grid, "BY_HAND", 1)
    monkeypatch.setattr("builtins.print", partial(flushed, print))
    results, _, _ = bench.measure(tmp_path, tiny=True)
    first, *ran, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"stack in 800 KiB: planned, \d+ × \d+: [\d,.]+ samples/s, [\d.]+ KiB \(\d+\.\d s\)", first)
    runs = results["stack in 800 KiB"]["runs"]
    finals = ["chosen", *fastest_rivals(runs)] * 2
    assert [line.partition(" KiB: ")[2].rpartition(": ")[0] for line in ran] == [
        *runs,
        *(f"{name}, again" for name in finals),
    ]
    in_turns = [runs[name]["again"][place // (len(finals) // 2)] for place, name in enumerate(finals)]
    for line, figures in zip(ran, [*runs.values(), *in_turns], strict=True):
        came_out = (
            figures.get("failed") or f"{figures['samples_per_s']:,.1f} samples/s, {format_bytes(figures['peak'])}"
        )
        assert re.search(re.escape(f": {came_out} (") + r"\d+\.\d s\)$", line)
    assert last == "stack in 100 KiB: does not fit"
    assert results["stack in 800 KiB"]["planning_seconds"] > 0


def flushed(show, *line, flush=False):
    assert flush  # a log is written to in large pieces else
    show(*line)


def test_of_memory_that_ran_out_the_first_sentence_is_said():
    failed = {"failed": "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139 GiB."}
    assert said_of("bert in 8 GiB", "all kept, 64", failed, 1.26) == (
        "bert in 8 GiB: all kept, 64: CUDA out of memory (1.3 s)"
    )


@pytest.mark.middle
def test_a_case_is_measured_once_for_all_its_budgets(tmp_path, monkeypatch):
    measured, measuring = [], profile._Measuring
    monkeypatch.setattr(profile, "_Measuring", lambda *a: measured.append(a[2]) or measuring(*a))
    monkeypatch.setattr(Runner, "run", lambda *_, **__: Ran(1, 1.0))
    monkeypatch.setattr(bench, "TINY_CASES", [Case("stack", stack, 16, (800 * KIB, 1600 * KIB))])
    results, _, _ = bench.measure(tmp_path, tiny=True)
    assert len(results) == 2
    assert len(measured) == len({tuple(cuts) for cuts in measured})


@pytest.mark.full
def test_a_run_that_is_out_of_time_is_taken_up_where_it_ended(cases, tmp_path, monkeypatch):
    ran = []
    run = Runner.run
    monkeypatch.setattr(Runner, "run", lambda *a, **k: (ran.append(1), run(*a, **k))[1])
    monkeypatch.setattr(time, "monotonic", lambda: float(len(ran)))
    _, path, complete = bench.measure(tmp_path, tiny=True, seconds=2.5)
    assert not complete
    saved = json.loads(path.read_text())["cases"]["stack in 800 KiB"]
    assert len(saved["runs"]) == len(ran) == 3
    results, _, complete = bench.measure(tmp_path, tiny=True)
    assert complete
    runs = [run for result in results.values() for run in result["runs"].values()]
    assert len(ran) == sum(1 + len(run.get("again", [])) for run in runs)
    assert saved["runs"]["chosen"].items() <= results["stack in 800 KiB"]["runs"]["chosen"].items()


@pytest.fixture
def one_case(monkeypatch):
    monkeypatch.setattr(bench, "TINY_CASES", [Case("stack", stack, 16, (800 * KIB,))])
    return "stack in 800 KiB"


def ran_until(monkeypatch, folder, most, fails=lambda number: False):
    """What is saved after so many measurements, which all come out alike; and how many there were."""
    count = 0

    def run(self, plan, memory, limited):
        nonlocal count
        count += 1
        return Ran(failed="out of memory") if fails(count) else Ran(100, 50.0 + plan.micro_batch)

    monkeypatch.setattr(Runner, "run", run)
    monkeypatch.setattr(time, "monotonic", lambda: float(count))
    results, _, complete = bench.measure(folder, tiny=True, seconds=most - 0.5)
    return results["stack in 800 KiB"], count, complete


@pytest.mark.middle
def test_wherever_it_was_interrupted_nothing_runs_twice(one_case, tmp_path, monkeypatch):
    whole, count, complete = ran_until(monkeypatch, tmp_path / "whole", 1000)
    assert complete
    assert count == 1 + len(whole["rivals"]) + 2 * (1 + min(3, len(whole["rivals"])))
    for first in range(1, count, 2):
        folder = tmp_path / str(first)
        assert not ran_until(monkeypatch, folder, first)[2]
        # On another day others would be worth a try: the same ones go on.
        monkeypatch.setattr(grid, "AT_RANDOM", 3)
        result, rest, complete = ran_until(monkeypatch, folder, 1000)
        monkeypatch.setattr(grid, "AT_RANDOM", 1)
        assert complete
        assert (rest, len(result["runs"])) == (count - first, len(whole["runs"]))


@pytest.mark.middle
def test_what_is_saved_is_measured_anew_if_that_is_asked_for(tmp_path, monkeypatch):
    cases = [Case("stack", stack, 16, (800 * KIB,)), Case("other", stack, 16, (800 * KIB,))]
    monkeypatch.setattr(bench, "TINY_CASES", cases)
    speeds = iter(range(1, 1000))
    monkeypatch.setattr(Runner, "run", lambda *_, **__: Ran(1, float(next(speeds))))
    before = json.loads(json.dumps(bench.measure(tmp_path, tiny=True)[0]))
    assert bench.measure(tmp_path, tiny=True)[0] == before
    after = bench.measure(tmp_path, tiny=True, only="stack", anew=True)[0]
    assert after["other in 800 KiB"] == before["other in 800 KiB"]
    assert after["stack in 800 KiB"]["samples_per_s"] > before["other in 800 KiB"]["samples_per_s"]


@pytest.mark.middle
def test_rivals_of_a_former_version_that_are_not_tried_any_more_are_left_alone(one_case, tmp_path, monkeypatch):
    ran_until(monkeypatch, tmp_path, 3)
    path = next(tmp_path.glob("*.json"))
    saved = json.loads(path.read_text())
    case = saved["cases"][one_case]
    del case["rivals"]
    case["runs"]["gone, 4"] = {"samples_per_s": 1e6, "peak": 1, "is_rival": True}
    path.write_text(json.dumps(saved))
    result, _, complete = ran_until(monkeypatch, tmp_path, 1000)
    assert complete
    assert "again" not in result["runs"]["gone, 4"]


@pytest.mark.middle
def test_a_chosen_plan_that_fails_at_once_is_said_to_have_failed(one_case, tmp_path, monkeypatch):
    result, count, complete = ran_until(monkeypatch, tmp_path, 1000, fails=lambda number: number == 1)
    assert complete
    assert count == 1 + len(result["rivals"])
    assert bench.rows({one_case: result})[0][1] == "ran out of memory"
    assert "ran out of memory" in plan_table(json.loads(next(tmp_path.glob("*.json")).read_text()))


def test_a_rival_that_fails_in_its_finals_is_no_alternative():
    fine = {"peak": 90, "samples_per_s": 10.0, "is_rival": True, "again": []}
    runs = {
        "chosen": fine | {"is_rival": False},
        "lucky": fine | {"samples_per_s": 20.0, "again": [{"failed": "memory"}]},
        "a": fine,
    }
    assert compared({"runs": runs, "predicted_peak": 90, "first_predicted_peak": 90})["of_best_rival"] == 1.0


@pytest.mark.middle
def test_the_speed_with_all_memory_is_that_of_the_same_run(tmp_path, monkeypatch):
    """Machines differ by more than the bars leave."""
    cases = [
        Case("stack", stack, 16, (None, 800 * KIB), beside="stack"),
        Case("other", stack, 16, (800 * KIB,), beside="nobody"),
    ]
    monkeypatch.setattr(bench, "TINY_CASES", cases)
    monkeypatch.setattr(measuring, "budget_on", lambda _, budget: (budget or 2**26, ()))
    large = [16.0, 20.0, 20.0, 20.0, *(16.0, 10.0, 12.5, 20.0, 16.0)]  # first its own row, then beside the other
    speeds = {800 * KIB: iter([10.0] * 100), 2**26: iter(large)}
    monkeypatch.setattr(Runner, "run", lambda _, plan, memory, limited: Ran(100, next(speeds[memory])))
    results = bench.measure(tmp_path, tiny=True)[0]
    result = results["stack in 800 KiB"]
    assert len(result["runs"]["chosen"]["again"]) == 5
    assert result["of_all_memory"] == 10 / 16  # the median of finals, one after the other
    assert result["of_best_rival"] == 1.0  # it is no rival
    assert "with all memory" not in result["rivals"]
    assert all("taken" in run for run in result["runs"].values())
    assert "of_all_memory" not in results["stack in all memory"] | results["other in 800 KiB"]


@pytest.mark.middle
def test_a_reference_that_runs_out_of_memory_does_not_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "TINY_CASES", [Case("stack", stack, 16, (None, 800 * KIB), beside="stack")])
    monkeypatch.setattr(measuring, "budget_on", lambda _, budget: (budget or 2**26, ()))
    large = iter([Ran(100, 1.0)] * 3 + [Ran(failed="memory")])
    monkeypatch.setattr(Runner, "run", lambda _, plan, memory, limited: next(large) if memory == 2**26 else Ran(1, 2.0))
    result = bench.measure(tmp_path, tiny=True)[0]["stack in 800 KiB"]
    assert result["complete"]
    assert "of_all_memory" not in result


@pytest.mark.parametrize(
    ("peaks", "limited", "caps"), [([90], 0, 0), ([110, 95], 110, 1), ([110, None], None, 1), ([None], None, 0)]
)
def test_only_what_takes_more_than_the_budget_is_limited_to_it(monkeypatch, peaks, limited, caps):
    """torch's limit asks for more room than a device of that size would."""
    left, capped = list(peaks), []
    runner = Runner(Feeding(nn.Linear(2, 2)), None, None)
    runner.on_gpu = True
    monkeypatch.setattr(running, "_capped", lambda memory: capped.append(memory) or nullcontext())

    def run(_self, _plan, _memory, _limit):
        peak = left.pop(0)
        return Ran(failed="memory") if peak is None else Ran(peak, 1.0)

    monkeypatch.setattr(Runner, "_run_on_model", run)
    ran = runner.run(None, 100)
    assert (ran.failed is not None) if limited is None else (ran.limited == limited)
    assert capped == [100] * caps
    left[:] = [95]
    if caps and limited:
        again = runner.run(None, 100, limited=True)
        assert (again.peak, again.limited, capped) == (95, 100, [100, 100])


def test_cases_are_chosen_by_name_and_those_without_their_library_are_left_out(cases):
    assert [case.name for case in bench.chosen(cases, "")] == ["stack"]
    budget = cases[0].budgets[-1]
    assert [case.budgets for case in bench.chosen(cases, f"^{key_of(cases[0], budget)}$")] == [[budget]]
    with pytest.raises(ValueError, match=r"nothing that is measured is called 'vgg': choose among stack in 800 KiB"):
        bench.chosen(cases, "vgg")


@pytest.mark.middle
def test_a_budget_that_is_too_small_is_said_to_be_so(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "TINY_CASES", [Case("stack", stack, 16, (100 * KIB,))])
    results, _, complete = bench.measure(tmp_path, tiny=True)
    assert complete
    assert "need at least" in results["stack in 100 KiB"]["does not fit"]
    assert bench.rows(results)[0][1] == "does not fit"


@pytest.mark.middle
def test_the_command_says_what_is_missing(cases, tmp_path):
    if not torch.cuda.is_available():
        done = CliRunner().invoke(app, ["plan"])
        assert done.exit_code == 2
        assert "--tiny" in done.output
    done = CliRunner().invoke(app, ["plan", "--tiny", "--seconds", "0", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "run the same command again" in done.output


def test_the_simulated_device_runs_out_of_memory_at_its_size_and_not_before():
    resident = torch.zeros(1000)
    with SimulatedDevice(8000, [resident]) as device:
        half = torch.zeros(1000)
        assert device.highest == 8000
        del half
        again = resident + 1
        with pytest.raises(torch.OutOfMemoryError, match=f"has {format_bytes(8000)}, and {format_bytes(8004)} are"):
            torch.ones(1)
        del again


def test_the_grid_has_what_people_try_by_hand():
    rivals = grid.rivals(transformer(6), 64, 24 * GIB, one_forward=False)
    assert len(rivals) <= 4
    assert all(len(rival.states) == 6 for rival in rivals)
    assert all(rival.states[-1].home == "device" for rival in rivals)
    assert grid.rivals(transformer(6), 64, 24 * GIB, one_forward=False) == rivals
    whole = grid.rivals(transformer(6), 64, 24 * GIB, one_forward=True)
    assert {rival.micro_batch for rival in whole} == {64}


def test_the_whole_grid_is_at_most_twelve_plans_and_ten_random_ones(monkeypatch):
    monkeypatch.setattr(grid, "BY_HAND", 12)
    monkeypatch.setattr(grid, "AT_RANDOM", 10)
    rivals = grid.rivals(transformer(24), 1024, 48 * GIB, one_forward=False)
    by_hand = [rival for rival in rivals if not rival.name.startswith("random")]
    assert (len(by_hand), len(rivals)) == (12, 22)
    assert len({rival.name for rival in rivals}) == 22
    kinds = {rival.name.rpartition(",")[0] for rival in by_hand}
    assert {"all kept", "all computed again", "every 2. kept", "all computed again, on the host"} <= kinds
    assert all(size & (size - 1) == 0 for size in (rival.micro_batch for rival in rivals))


def test_a_plan_that_failed_is_counted_as_failed():
    ran = {"peak": 90, "samples_per_s": 10.0, "is_rival": False}
    runs = {
        "chosen": ran | {"again": [{"failed": "memory"}]},
        "a": {"failed": "memory", "is_rival": True},
    }
    found = compared({"runs": runs, "predicted_peak": 99, "first_predicted_peak": 80})
    assert found["failed"]
    assert found["peak_error"] == pytest.approx(0.1)
    assert found["best_rival"] is None


def test_a_rival_that_was_lucky_once_is_not_the_best():
    def ran(*speeds, is_rival=True):
        first, *others = [{"peak": 90, "samples_per_s": speed} for speed in speeds]
        return first | {"is_rival": is_rival, "again": others}

    runs = {
        "chosen": ran(10.0, 11.0, 12.0, is_rival=False),
        "lucky": ran(14.0, 9.0, 9.0),
        "best": ran(11.0, 11.0, 11.0),
        "worse": ran(10.5, 10.5, 10.5),
        "slow": {"peak": 90, "samples_per_s": 10.0, "is_rival": True},
    }
    assert fastest_rivals(runs) == ["lucky", "best", "worse"]
    found = compared({"runs": runs, "predicted_peak": 90, "first_predicted_peak": 90})
    assert (found["best_rival"], found["of_best_rival"]) == ("best", 1.0)


def test_every_case_has_three_budgets_and_the_small_ones_run():
    assert {case.name for case in CASES} >= {"bert_base", "bert_large", "resnet50", "unet", "vit", "gpt"}
    for case in CASES:
        assert case.one_forward or sum(budget is not None for budget in case.budgets) == 3
    for case in TINY_CASES:
        trained = case.make()
        assert trained.sample is not None
    assert UNet(4, 2)(torch.randn(1, 3, 16, 16)).shape == (1, 1, 16, 16)
    assert State("inputs") in grid._every(4, 2, State("inputs"))


@pytest.mark.middle
def test_shorter_slices_are_run_in_proportion(monkeypatch):
    """Else 7 slices of 3 samples would pass for 21 samples where the batch has 16."""
    model, sizes = nn.Linear(2, 2), []
    model.register_forward_pre_hook(lambda _module, args: sizes.append(len(args[0])))
    feeding, sample = Feeding(model), (torch.randn(5, 2),)
    plan = plan_for(
        measure(feeding, sample, [], bandwidth=0.0, cached=False), memory=2**30, global_batch=16, k_steps=7, curve=False
    )
    sizes.clear()
    runner = Runner(feeding, sample, torch.optim.SGD(model.parameters(), lr=0.1))
    times = iter([*range(4), *(10 * number for number in range(9)), *range(100, 110)])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: float(next(times)))
    monkeypatch.setattr(running, "_SECONDS", 6.0)
    ran = runner.run(plan, None)
    assert sizes[2:8] == [3, 3, 2, 2, 2, 2]  # after two to warm up, six of seven
    assert ran.samples_per_s == pytest.approx(16 / (7 * 10 + 10))
