"""The static door on two workers, with a merge of two: equal weights, the dynamic door's numbers, reduced gradients."""

import pytest
import torch

from tests.jobs.starting import ROOT, start
from tests.jobs.static_worker import K_STEPS, Linear, plain_sgd
from tests.static.making import Classifier, sgd

# In one process of the runner, which starts the job once.
pytestmark = [pytest.mark.middle, pytest.mark.timeout(900), pytest.mark.xdist_group("static")]

WORKERS = 2


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("static")
    # Two workers on two cores: processes of their own to compile with would only be in the way.
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    start(ROOT / "tests" / "jobs" / "static_worker.py", folder, workers=WORKERS, env=env)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORKERS)]


def assert_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-12, atol=1e-12, msg=name)


def test_the_startup_program_gives_all_workers_the_same_weights(workers):
    first, second = (results["started"] for results in workers)
    for kind in ("made", "own"):
        assert all(torch.equal(value, second[kind][name]) for name, value in first[kind].items()), kind
    expected = Classifier(seed=0).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in first["own"].items())


@pytest.mark.parametrize("clip", ["", " clipped"])
def test_the_numbers_are_those_of_the_dynamic_door(workers, clip):
    for results in workers:
        state, _ = results["clipped" if clip else "eager"]
        assert_close(state, results[f"dynamic{clip}"])


def by_whole_batches(batches, kind=Classifier, make=sgd):
    """Bare torch on whole global batches: the weights, and the gradient of each update."""
    model = kind(seed=0)
    optimizer, gradients = make(model.parameters()), []
    for batch in batches:
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        gradients.append(model.net.head.weight.grad.clone())
        optimizer.step()
    return model.state_dict(), gradients


def test_the_update_is_that_of_the_whole_batch(workers):
    for results in workers:
        assert_close(results["eager"][0], by_whole_batches(results["batches"])[0])


def test_workers_hold_bit_equal_weights(workers):
    for door in ("eager", "clipped", "compiled"):
        first, second = (results[door][0] for results in workers)
        assert all(torch.equal(value, second[name]) for name, value in first.items()), door


@pytest.mark.parametrize(("door", "kind", "make"), [("eager", Classifier, sgd), ("compiled", Linear, plain_sgd)])
def test_a_fetched_gradient_is_the_whole_batchs_when_the_window_is_full(workers, door, kind, make):
    for results in workers:
        _, expected = by_whole_batches(results["batches"], kind, make)
        gradients = [gradient for _, gradient, _ in results[door][1]]
        assert [gradient is None for gradient in gradients] == [True, False] * len(expected)
        for ours, theirs in zip(gradients[1::2], expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_fetched_gradient_is_neither_clipped_nor_scaled(workers):
    for results in workers:
        _, expected = by_whole_batches(results["batches"])
        clipped = results["clipped"][1][K_STEPS - 1][1]
        torch.testing.assert_close(clipped, expected[0], rtol=1e-12, atol=1e-12)
        # In fp16 the same number, as near as that is.
        torch.testing.assert_close(results["scaled"], expected[0].float(), rtol=0.05, atol=1e-3)


def test_a_fetched_loss_is_that_of_the_feed_and_a_parameter_that_after_the_update(workers):
    first, second = (results["eager"][1] for results in workers)
    for (loss, _, weight), (other_loss, _, other_weight) in zip(first, second, strict=True):
        assert loss != other_loss
        assert torch.equal(weight, other_weight)
    assert torch.equal(first[-1][2], workers[0]["eager"][0]["net.head.weight"])


def test_compiled_like_the_compiled_plain_step(workers):
    for results in workers:
        assert_close(results["compiled"][0], results["compiled by hand"])
