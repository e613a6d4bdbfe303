"""Parameters cut by fully_shard: the numbers of the whole run, and one all-reduce for all norms of a step."""

import json
from pathlib import Path

import pytest

from tests.jobs.starting import start

WORKER = Path(__file__).with_name("sharded_worker.py")


@pytest.mark.middle
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.full)])
def test_sharded_equals_whole_and_norms_travel_together(workers):
    done = start(WORKER, workers=workers, launcher="torchrun")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(found) == 8
    for name, figures in found.items():
        assert figures["distance"] < 1e-12
        assert figures["alone"] == 0
        # LAMB's moments depend on clipping and cannot be taken back, so that all gradients are measured before.
        assert figures["sharded"] == ([2] if name in ("lamb, clipped", "lamb, checked") else [1])
