"""What crosses between machines, counted on their network interfaces; machines are network namespaces."""

import json

import pytest

from tests.launch import hosts

pytestmark = pytest.mark.full


def test_a_hierarchy_sends_less_between_machines(tmp_path):
    """A ring of W workers sends 2 (W - 1) / W times the gradients over each link, and one of the 2 machines once."""
    if reason := hosts.why_not():
        pytest.skip(reason)
    done = hosts.play("tests.jobs.crossing_hosts", tmp_path)
    assert done.returncode == 0, done.stderr[-6000:]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for result in found:
        # Headers, and what is sent again, come on top.
        assert result["flat"] >= 1.5
        assert 1.0 <= result["hierarchy"] < 1.25
