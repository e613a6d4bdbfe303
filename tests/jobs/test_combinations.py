"""Sampled combinations of settings: each pair of values in some job equals one process of bare torch, and resumes."""

import json
from functools import cache

import pytest
import torch

from tests.jobs import combinations
from tests.jobs.starting import ROOT, start
from tests.launch import hosts

pytestmark = pytest.mark.xdist_group("combinations")

SEED = 1
CHOSEN = combinations.sampled(SEED)
FEW = dict(list(CHOSEN.items())[:6])
JOBS = {
    "2 workers, a few": (2, FEW, pytest.mark.middle),
    "2 workers": (2, CHOSEN, pytest.mark.full),
    "4 workers": (4, CHOSEN, pytest.mark.full),
    "4 workers on 2 hosts": (4, CHOSEN, pytest.mark.full),
}


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    @cache
    def run(job):
        workers, chosen, _ = JOBS[job]
        folder = tmp_path_factory.mktemp("combinations")
        if "hosts" in job:
            done = hosts.play("tests.jobs.combinations_hosts", folder, json.dumps(chosen), timeout=800)
            assert done.returncode == 0, done.stderr[-6000:]
        else:
            start(ROOT / "tests/jobs/combinations_worker.py", folder, json.dumps(chosen), workers=workers)
        return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(workers)]

    return run


@pytest.mark.parametrize(
    ("job", "name"),
    [
        pytest.param(job, name, marks=mark, id=f"{job}-{name.partition(':')[0]}")
        for job, (_, chosen, mark) in JOBS.items()
        for name in chosen
    ],
)
def test_it_equals_one_process_and_resumes_with_the_same_bits(results_of, job, name):
    if "hosts" in job and (reason := hosts.why_not()):
        pytest.skip(reason)
    combination = CHOSEN[name]
    results = [result[name] for result in results_of(job)]
    for result in results:
        assert result["resumed"]
        assert all(torch.equal(value, results[0]["last"][key]) for key, value in result["last"].items())
        assert all(hidden is None or 0 <= hidden <= 1 for hidden in result["hidden"])
    first, last, losses = combinations.train(combination, len(results))
    is_low = combination["amp"] == "bfloat16"  # which rounds the same number otherwise when it is weighed otherwise
    tolerance = 1e-3 if is_low else 1e-12
    assert results[0]["losses"][0] == pytest.approx(losses[0], rel=tolerance)
    if combination["wire"] != "full":
        require_bound(combination["wire"], [result["sent"] for result in results])
        return
    torch.testing.assert_close(results[0]["first"], first, rtol=tolerance, atol=tolerance)
    if is_low:
        torch.testing.assert_close(results[0]["first"], results[0]["plainly sent"], rtol=1e-5, atol=1e-6)
        return
    torch.testing.assert_close(results[0]["last"], last, rtol=tolerance, atol=tolerance)
    assert results[0]["losses"] == [loss if loss is None else pytest.approx(loss, rel=tolerance) for loss in losses]


UNITS = {"float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 0.0)}


def require_bound(wire, sent):
    """Sums are as near as the guide says to what the workers gave."""
    unit, smallest = UNITS[wire]
    workers = len(sent)
    relative = workers * unit / (1 - workers * unit) + 1e-6
    for buckets in zip(*sent, strict=True):
        given = torch.stack([own for own, _ in buckets])
        for _, total in buckets:
            error = (total - given.sum(0)).abs() / workers
            assert (error <= relative * given.abs().mean(0) + workers * smallest).all()


def test_the_sample_holds_each_pair_that_is_possible():
    shown = set().union(*map(combinations._shown_by, CHOSEN.values()))
    assert combinations._pairs() <= shown
    assert all(map(combinations.is_possible, CHOSEN.values()))
    assert 20 <= len(CHOSEN) <= 60
