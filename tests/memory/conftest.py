import pytest

from fleetx.memory import offload


@pytest.fixture(autouse=True)
def _move_small_tensors(monkeypatch):
    """The tests' models are tiny: everything is worth moving."""
    monkeypatch.setattr(offload, "SMALLEST", 1)
