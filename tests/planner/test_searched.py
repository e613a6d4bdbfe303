"""The search, compared with an exhaustive one on simulated problems."""

import numpy as np
import pytest

from fleetx.planner.making import plan_for
from tests.planner.problems import problem, searched
from tests.planner.work import Work


def _ratios(problems):
    """Seconds of today's plans, as parts of those that the exhaustive search found; and all calls of both."""
    ratios, calls = [], 0
    for one in problems:
        profile, question = problem(one.seed)
        with Work() as work:
            plan = plan_for(profile, memory=one.memory, curve=False, **question)
        assert plan.peak <= one.memory
        ratios.append(plan.seconds / one.seconds)
        calls += work.calls
    return ratios, calls, sum(one.calls for one in problems)


@pytest.mark.parametrize("every", [40, pytest.param(1, marks=pytest.mark.full)])
def test_plans_are_about_as_fast_as_those_of_an_exhaustive_search_for_less_work(every):
    ratios, calls, before = _ratios(searched()[::every])
    assert np.median(ratios) == pytest.approx(1)
    assert np.quantile(ratios, 0.99) <= 1.005
    assert max(ratios) <= 1.02
    assert calls <= 1.05 * before  # a few are made only once in a process
