import pytest

from fleetx.memory import offload


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """Profiles of one test are nothing to another, nor to the user's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _move_small_tensors(monkeypatch):
    """The tests' models are tiny: everything is worth moving."""
    monkeypatch.setattr(offload, "SMALLEST", 1)


@pytest.fixture(autouse=True)
def _time_by_work(work_clock):
    """For all tests of the planner."""
