"""sync_batch_norm in jobs: unequal parts of a batch train as the whole batch does in bare torch, in fp64."""

from functools import cache

import pytest
import torch

from tests.jobs.batch_norms_worker import K_STEPS, PLAIN, train_in_bare_torch
from tests.jobs.starting import ROOT, start

# In one process of the runner, which starts each job once.
pytestmark = [pytest.mark.middle, pytest.mark.xdist_group("batch norms")]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    @cache
    def run(workers):
        folder = tmp_path_factory.mktemp(f"batch-norms{workers}")
        start(ROOT / "tests" / "jobs" / "batch_norms_worker.py", folder, workers=workers)
        return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(workers)]

    return run


@pytest.fixture(params=[2, 4])
def found(request, results_of):
    return results_of(request.param)


@pytest.mark.parametrize("way", PLAIN)
def test_unequal_parts_train_as_the_whole_batch(found, way):
    expected = train_in_bare_torch(way, len(found))
    for worker in found:
        state = worker[way][0]
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12, msg=name)
            assert torch.equal(state[name], found[0][way][0][name]), name


@pytest.mark.parametrize(("way", "plain"), [("recompute", "step"), ("offload", "step"), ("bf16 recompute", "bf16")])
def test_recompute_gives_the_same_bits_and_asks_nobody_again(found, way, plain):
    for worker in found:
        assert all(torch.equal(worker[way][0][name], value) for name, value in worker[plain][0].items())
        assert worker[way][1] == worker[plain][1] == K_STEPS * 3 * 2  # norms, forward and backward


def test_bfloat16_is_near_and_its_statistics_are_those_of_all(found):
    expected = train_in_bare_torch("bf16", len(found))
    for worker in found:
        state = worker["bf16"][0]
        assert all(torch.equal(state[name], found[0]["bf16"][0][name]) for name in expected)
        torch.testing.assert_close(state["stem.1.running_var"], expected["stem.1.running_var"], rtol=0.02, atol=0.02)
        assert state["stem.1.running_mean"].dtype == torch.float32


def test_it_says_what_was_done(found):
    workers = len(found)
    message = (
        f"sync_batch_norm: the BatchNorm layers (3) take the statistics of each micro-batch of all {workers} workers."
    )
    assert found[0]["said"] == [message]
    overview = found[0]["step"][2]
    assert "sync_batch_norm" in overview
    assert f"BatchNorm layers over {workers} workers: 3" in overview


def test_a_batch_that_would_hold_up_the_others_is_refused(found):
    for worker in found:
        assert "this worker's batch is empty" in worker["empty"]
        assert "k_steps is 2, but this worker's batch has only 1 samples" in worker["short"]
        for message in (worker["empty"], worker["short"]):
            assert "the model has SyncBatchNorm layers" in message
            assert "last='drop'" in message
        assert 'sync_batch_norm must not be on with recompute_configs.checkpoints = "auto" yet' in worker["planned"]


@pytest.mark.full
def test_compiled_segments_ask_as_often_and_give_the_same(tmp_path):
    ways = ("compiled", "compiled recompute")
    start(ROOT / "tests" / "jobs" / "batch_norms_worker.py", tmp_path, *ways, workers=2)
    expected = train_in_bare_torch("step", 2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for state, calls, _ in found.values():
            assert calls == K_STEPS * 3 * 2
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12, msg=name)
