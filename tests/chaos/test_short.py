"""The chaos suite in short: a few trials of each kind. The counts that matter are in `make chaos`.

Workers may stand still for longer here than there: a busy machine must not be taken for one that hangs.
"""

import itertools
import random

import pytest

from tests.chaos import scenarios
from tests.launch import hosts

pytestmark = pytest.mark.timeout(1800)
LIMIT = 20  # seconds
# Of the scenarios that make many trials with one job, or wait for a limit.
OPTIONS = {
    "kills": {"span": 3.0, "per_job": 3},
    "stopped": {"limit": LIMIT, "per_job": 3},
    "causes": {"limit": LIMIT, "per_job": 3},
}


def first(trials, count):
    found = list(itertools.islice(trials, count))
    assert all(trial["ok"] for trial in found), found
    return found


@pytest.mark.full
def test_causes_are_named(tmp_path):
    kinds = ["raise", "SIGKILL", "import", "hang", "exit", "segfault"]
    trials = scenarios.causes(tmp_path, random.Random(1), per_job=len(kinds), kinds=kinds, workers=2, limit=LIMIT)
    assert [trial["kind"] for trial in first(trials, len(kinds))] == kinds


@pytest.mark.full
def test_a_run_with_faults_ends_as_if_undisturbed(tmp_path):
    first(scenarios.long_run(tmp_path, random.Random(2), faults=4, workers=2, limit=LIMIT), 4)


@pytest.mark.middle
def test_a_machine_that_goes_is_named(tmp_path):
    if reason := hosts.why_not():
        pytest.skip(reason)
    first(scenarios.machines(tmp_path, random.Random(3), ["leader_gone"]), 1)


@pytest.mark.full
@pytest.mark.parametrize("scenario", ["kills", "stopped", "orphans", "resumes", "causes"])
def test_a_few_of_each(tmp_path, scenario):
    first(getattr(scenarios, scenario)(tmp_path, random.Random(4), **OPTIONS.get(scenario, {})), 3)


@pytest.mark.full
@pytest.mark.parametrize("name", scenarios.EXPECTED)
def test_machines(tmp_path, name):
    if reason := hosts.why_not():
        pytest.skip(reason)
    first(scenarios.machines(tmp_path, random.Random(5), [name]), 1)
