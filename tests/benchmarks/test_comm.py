"""The benchmark of communication: each way is measured, and bytes are as the guide says."""

import pytest

from benchmarks import comm
from benchmarks.comm import DDP, WAYS, Size, rows, summarise
from tests.launch import hosts


def figures(**milliseconds):
    return {
        "seconds": {name: [milliseconds.get(name, 100) / 1e3, 9.0, 0.0] for name in WAYS},
        "bytes": dict.fromkeys(WAYS, 2e6),
        "hidden": {name: 0.5 for name, way in WAYS.items() if way.peer},
        "apart": dict.fromkeys(WAYS, 0.0),
    }


def test_speeds_are_medians_against_the_peer_that_rounds_alike():
    peer = "DistributedDataParallel, fp16 hook"
    result = summarise({"200 Mbit/s": figures(**{peer: 50, "FleetX": 80})}, Size())
    speeds = result["cases"]["200 Mbit/s"]["speed_against_ddp"]
    assert speeds["FleetX"] == pytest.approx(1.25)
    assert speeds["FleetX, fp16_allreduce"] == pytest.approx(0.5)
    assert DDP not in speeds
    first, second, *_ = rows(result)
    assert first == ("200 Mbit/s", DDP, "100", "2.0", "1", "")
    assert second == ("200 Mbit/s", "FleetX", "80", "2.0", "1.25×", "50%")


@pytest.mark.full
def test_bytes_between_hosts_are_those_of_the_guide():
    if reason := hosts.why_not():
        pytest.skip(reason)
    size = Size(layers=4, width=256, rounds=1)
    run = comm.measure_link(None if hosts.why_no_limit() else 1000, size)
    gradients = 4 * size.layers * (size.width + 1) * size.width
    sent = {name: run["bytes"][name] / gradients for name in WAYS}
    for name in (DDP, "FleetX"):
        assert 1.5 <= sent[name] < 1.7  # headers, and what is sent again, come on top
    assert 1.0 <= sent["FleetX, hierarchical"] < 1.2
    assert 0.75 <= sent["FleetX, fp16_allreduce"] < 0.9
    assert 0.5 <= sent["FleetX, hierarchical, bf16_allreduce"] < 0.65
    assert all(len(seconds) == size.rounds for seconds in run["seconds"].values())
    assert set(run["hidden"]) == {name for name, way in WAYS.items() if way.settings is not None}
    assert run["apart"]["FleetX"] < 1e-6
    assert max(run["apart"].values()) < 1e-2
