"""How gradients travel in whole jobs: how many messages, through which groups, and that sums stay the same."""

import socket

import pytest
import torch

from tests.jobs import reducing_worker
from tests.jobs.starting import ROOT, start

# In one process of the runner, which starts each job once.
pytestmark = [pytest.mark.middle, pytest.mark.xdist_group("reducing")]


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.full), 4])
def job(request, tmp_path_factory):
    """What each worker saved, and the log of each."""
    folder = tmp_path_factory.mktemp("reducing")
    logs = folder / "logs"
    start(ROOT / "tests/jobs/reducing_worker.py", folder, workers=request.param, options=["--log_dir", logs])
    results = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(request.param)]
    return results, [(logs / f"workerlog.{rank}").read_text() for rank in range(request.param)]


def test_fusing_is_reported_once_per_job(job):
    _, logs = job
    assert [log.count("all-reduces, fused into") for log in logs] == [1] + [0] * (len(logs) - 1)
    assert "7 all-reduces, fused into 2 per update (984 B, " in logs[0]


@pytest.mark.parametrize("way", reducing_worker.SENDING_ALIKE)
def test_a_window_is_one_round_of_as_many_messages_as_reported(job, way):
    """Also with a frozen part, an unused parameter, recompute and offload."""
    results, _ = job
    for result in results:
        assert "7 all-reduces, fused into 2 per update (" in result[way]["overview"]
        assert result[way]["counts"] == [0, 0, 0, 2] * (reducing_worker.WINDOWS - 1)
        assert all(map(torch.equal, result[way]["weights"].values(), results[0]["merge"]["weights"].values()))


def furthest(ours, theirs):
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


@pytest.mark.parametrize("way", [*reducing_worker.SAME_BITS, "uneven, 3 groups"])
def test_further_process_groups_change_no_bit(job, way):
    results, _ = job
    for result in results:
        assert furthest(result[way]["weights"], results[0][way.partition(",")[0]]["weights"]) == 0


@pytest.mark.parametrize("way", [*reducing_worker.SAME_SUMS, "by host", "uneven, in twos"])
def test_a_hierarchy_gives_the_same_sums(job, way):
    """With merge, a frozen part, an unused parameter; groups of 3 workers are uneven."""
    results, _ = job
    compared = "merge" if way == "by host" else way.partition(",")[0]
    tolerance = {"fp16": 2e-3, "bf16": 2e-2}.get(compared, 1e-12)
    for result in results:
        assert furthest(result[way]["weights"], results[0][compared]["weights"]) < tolerance
        assert furthest(result[way]["weights"], results[0][way]["weights"]) == 0


@pytest.mark.parametrize("groups", reducing_worker.ORDERS)
def test_gradients_may_arrive_in_any_order_and_uneven_ends_take_the_same_path(job, groups):
    results, _ = job
    assert [result["orders"][groups] for result in results] == [[]] * len(results)


@pytest.mark.parametrize("groups", ["flat", *reducing_worker.ORDERS])
@pytest.mark.parametrize("wire", reducing_worker.WIRES)
def test_compressed_sums_keep_the_bound_of_the_guide_and_do_not_overflow(job, wire, groups):
    results, _ = job
    for result in results:
        # Not far below 1 either: a bound that is never approached would say little.
        assert 0.1 < result["rounding"][f"{wire}, {groups}"] <= 1


@pytest.mark.parametrize("way", reducing_worker.OVERLAPS)
def test_what_arrives_during_the_backward_counts_as_hidden(job, way):
    results, _ = job
    for result in results:
        *during, last = result["hidden"][way]
        assert during == [None] * (reducing_worker.MICRO_BATCHES - 1)
        assert 0 < last <= 1


def test_a_slow_worker_is_named_and_no_other(job):
    results, _ = job
    found, last = results[0]["slow workers"], len(results) - 1
    named = {name: [message.partition(" was slow")[0] for message in messages] for name, messages in found.items()}
    host = socket.gethostname()
    # Of two workers one alone is left at the uneven end.
    slow = {"slow": [f"worker 1 on {host}"], "uneven ends": [f"worker {last} on {host}"] if last > 1 else []}
    assert named == {name: slow.get(name, []) for name in reducing_worker.WORKERS}
    assert "1.5 s of its own in the latest" in found["slow"][0]
    assert not any(messages for result in results[1:] for messages in result["slow workers"].values())


def test_the_overview_shows_what_was_applied(job):
    results, logs = job
    shown = {way: result["overview"].partition(" B)")[2] for way, result in results[0].items() if "overview" in result}
    assert shown["merge"] == ""
    assert shown["merge, 20 groups"] == ", over 20 process groups of which 2 are used"
    assert shown["unfused, 3 groups"] == ", over 3 process groups"
    if len(results) == 4:
        assert shown["merge, in twos"] == ", within 2 groups of 2 + 2 workers, then between them"
        assert shown["unfused, in threes"] == ", within 2 groups of 3 + 1 workers, then between them"
        assert shown["fp16, in twos"] == f", rounded to float16 on the way{shown['merge, in twos']}"
        assert shown["by host"] == (", over 2 process groups, within 2 groups of 2 + 2 workers, then between them")
    else:
        assert shown["merge, in twos"] == ", not in a hierarchy: the 2 workers are one group"
    reason = "all workers are on one machine (" if len(results) == 4 else "the 2 workers are one group"
    assert f"use_hierarchical_allreduce changes nothing here: {reason}" in logs[0]
    assert shown["merge, one host"].startswith(", not in a hierarchy: all workers are on one machine (")
