import pytest

from fleetx.fleet.job import _is_launched


@pytest.mark.parametrize(
    ("environment", "launched"),
    [({}, False), ({"RANK": "0", "WORLD_SIZE": "1"}, True), ({"RANK": "3", "WORLD_SIZE": "4"}, True)],
)
def test_a_launcher_says_who_a_worker_is(environment, launched):
    assert _is_launched(environment) == launched


@pytest.mark.parametrize(("rank", "workers"), [("2", "2"), ("-1", "2"), ("one", "2"), ("0", "0"), ("", "2")])
def test_a_worker_that_cannot_be_is_refused_at_once(rank, workers):
    """Else it would wait for workers that never come."""
    with pytest.raises(ValueError, match=f"RANK must be a number from 0.*got RANK='{rank}', WORLD_SIZE='{workers}'"):
        _is_launched({"RANK": rank, "WORLD_SIZE": workers})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_half_of_what_a_launcher_says_is_refused(name):
    with pytest.raises(ValueError, match=f"only {name}='0' is set.*unset {name} to run alone"):
        _is_launched({name: "0"})
