"""k micro-batches on several workers against one big batch in bare torch, in fp64."""

from functools import cache

import pytest
import torch

from tests import plain
from tests.jobs.starting import ROOT, start

# In one process of the runner, which starts each job once.
pytestmark = pytest.mark.xdist_group("exactness")

SCRIPT = ROOT / "tests" / "jobs" / "exactness_worker.py"
LAUNCHERS = {1: None, 2: "fleetrun", 4: "torchrun"}
TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """Results of all workers of one job; each number of workers is run once."""

    @cache
    def run(workers):
        folder = tmp_path_factory.mktemp(f"exactness{workers}")
        start(SCRIPT, folder, workers=workers, launcher=LAUNCHERS[workers])
        return [torch.load(folder / f"{workers}-{rank}.pt", weights_only=True) for rank in range(workers)]

    return run


@pytest.fixture(params=[1, 2, pytest.param(4, marks=pytest.mark.full)], ids=["alone", "fleetrun-2", "torchrun-4"])
def job(request, results_of):
    return results_of(request.param)


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.full)], ids=["fleetrun-2", "torchrun-4"])
def several(request, results_of):
    return results_of(request.param)


def assert_close(ours, reference):
    assert ours.keys() == reference.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, reference[name], rtol=TOLERANCE, atol=TOLERANCE, msg=name)


@pytest.mark.parametrize("door", ["step", "minimize"])
@pytest.mark.parametrize("case", plain.CASES, ids=lambda case: case.name)
def test_micro_batches_on_workers_equal_the_big_batch(job, case, door):
    reference, losses = plain.train(case, workers=len(job))
    for results in job:
        state, reported = results["cases"][f"{case.name}-{door}"]
        assert_close(state, reference)
        assert reported == pytest.approx(losses, rel=TOLERANCE, abs=TOLERANCE)


def test_workers_hold_bit_equal_weights(several):
    for results in several[1:]:
        for name, (state, _) in results["cases"].items():
            assert all(torch.equal(state[key], several[0]["cases"][name][0][key]) for key in state), name


@pytest.mark.middle
def test_two_losses_with_counts_of_their_own_equal_the_big_batch(job):
    reference, losses = plain.train_tagger(workers=len(job))
    for results in job:
        state, reported = results["two losses"]
        assert_close(state, reference)
        for ours, expected in zip(reported, losses, strict=True):
            assert ours == pytest.approx(expected, rel=TOLERANCE)


def test_complex_weights_equal_the_big_batch(job):
    reference, losses = plain.train_complex(plain.COMPLEX, workers=len(job))
    for results in job:
        state, reported = results["complex"]
        assert_close(state, reference)
        assert reported == pytest.approx(losses, rel=TOLERANCE)
        assert all(isinstance(loss, float) for loss in reported)


def test_weights_of_samples_are_items_like_any_others(job):
    """Fewer than one in a window, none in a micro-batch, none for a task in a window."""
    both = plain.train_weighed(len(job))
    common = plain.train_weighed(len(job), names=("common",))
    for results in job:
        by_step, by_minimize = results["weighed"]
        assert_close(by_step, both)
        assert_close(by_minimize, common)


def test_resume_in_mid_window_is_bit_equal(job):
    assert [results["resumed"] for results in job] == [True] * len(job)


def test_an_overflow_in_one_micro_batch_of_one_worker_skips_the_window_everywhere(job):
    case = plain.Case("adam")
    net = plain.make_net()
    optimizer = plain.make_optimizer("adam", net)
    for number, batch in enumerate(plain.batches(case, len(job))):
        if number == 2:
            continue
        net.zero_grad()
        plain.mean_loss(net, batch).backward()
        optimizer.step()
    for results in job:
        state, outs = results["skipped"]
        assert outs == [(True, False), (True, False), (False, True), (True, False), (True, False)]
        assert_close(state, net.state_dict())


def test_a_flush_averages_over_what_each_worker_holds(several):
    case, workers = plain.Case(), len(several)
    net = plain.make_net()
    optimizer = plain.make_optimizer("sgd", net)
    batch = plain.batches(case, workers)[0]
    held = [m for r in range(workers) for m in plain.micro_batches(plain.part(batch, r, workers))[: r % 3]]
    (sum(plain.mean_loss(net, micro) for micro in held) / len(held)).backward()
    optimizer.step()
    for results in several:
        state, flushed, nothing_left = results["flush"]
        assert flushed
        assert nothing_left
        assert_close(state, net.state_dict())


def test_one_message_per_window_and_none_before(several):
    for results in several:
        assert results["messages"] == [0, 0, 0, 1]


def test_a_parameter_that_one_worker_uses_is_averaged_over_all(several):
    case, workers = plain.Case(), len(several)
    net = plain.make_net()
    optimizer = plain.make_optimizer("sgd", net)
    loss = plain.mean_loss(net, plain.batches(case, workers)[0]) + (net.unused * torch.arange(4)).sum() / workers
    loss.backward()
    optimizer.step()
    for results in several:
        assert_close(results["one worker"], net.state_dict())


def test_forwards_between_backwards_do_not_change_what_is_reduced(several):
    reference = plain.train_awkward(len(several))
    for results in several:
        assert_close(results["awkward"], reference)


def test_both_doors_may_take_turns(job):
    reference, _ = plain.train(plain.Case(ragged=True), workers=len(job))
    for results in job:
        assert_close(results["mixed doors"], reference)
