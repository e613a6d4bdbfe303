"""The planner against ways by hand: small, on a simulated device, in processes as the command starts them."""

import pytest
import torch

from benchmarks import by_hand
from benchmarks.report.tables import by_hand_table

(TINY,) = by_hand.TINY


@pytest.fixture(scope="module")
def measured():
    lines = []
    return by_hand.measure(TINY, lines.append), lines


@pytest.mark.full
def test_each_way_runs_within_the_budget_and_the_plan_five_times(measured):
    result, lines = measured
    ways = result["ways"]
    assert all(ways[way]["ran"]["peak"] <= TINY.budget for way in (by_hand.KEPT, by_hand.CHECKPOINTED))
    runs = ways[by_hand.PLANNED_WAY]["runs"]
    assert len(runs) == by_hand.RUNS
    assert all(run["peak"] <= TINY.budget for run in runs)
    assert result["failed"] == 0
    assert result["of_best_by_hand"] > 0
    assert len(lines) == 4


@pytest.mark.full
def test_by_hand_all_powers_of_two_are_tried_until_memory_runs_out(measured):
    ways = measured[0]["ways"]
    kept, checkpointed = (ways[way]["tried"] for way in (by_hand.KEPT, by_hand.CHECKPOINTED))
    for tried in (kept, checkpointed):
        assert [int(size) for size in tried] == [2**power for power in range(len(tried))]
        assert ["failed" in ran for ran in tried.values()] == [False] * (len(tried) - 1) + [True]
    assert len(checkpointed) > len(kept)  # it saves memory


def test_checkpointing_by_hand_changes_no_gradient():
    grads = []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        model, sample, _ = TINY.make()
        model.eval()  # no dropout
        if checkpoint:
            TINY.checkpoint(model)
        sum(model(**sample).values()).backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def ways(*planned, kept=100.0, checkpointed=90.0):
    by_user = {
        by_hand.KEPT: {"ran": {"samples_per_s": kept} if kept else {"failed": "no room"}},
        by_hand.CHECKPOINTED: {"ran": {"samples_per_s": checkpointed} if checkpointed else {"failed": "no room"}},
    }
    runs = [{"samples_per_s": speed} if speed else {"failed": "no room"} for speed in planned]
    return by_user | {by_hand.PLANNED_WAY: {"runs": runs, "planning_seconds": 3.0}}


def test_the_median_of_a_plans_runs_is_compared_with_the_better_way_by_hand():
    assert by_hand.compared(ways(110, 130, 120)) == {"samples_per_s": 120, "failed": 0, "of_best_by_hand": 1.2}
    assert by_hand.compared(ways(45, kept=None))["of_best_by_hand"] == 0.5
    assert by_hand.compared(ways(120, None, 120))["failed"] == 1
    assert by_hand.compared(ways(120, kept=None, checkpointed=None))["of_best_by_hand"] is None


def test_the_table_leaves_out_plans_that_ran_out_of_memory_once():
    def case(found):
        return {"budget": 2**34, "global_batch": 64, "ways": found, **by_hand.compared(found)}

    cases = {"good": case(ways(120, 120)), "bad": case(ways(120, None))}
    origin = {"what": "w", "machine": {"gpu": "g"}, "versions": {"torch": "t"}}
    table = by_hand_table({"cases": cases, **origin})
    assert "| good, updates of 64 | 16 GiB | 100.0 | 90.0 | 120.0 | 1.20× | 3 s |" in table
    assert "bad" not in table
