import pytest

from fleetx.memory import offload
from tests.memory import comparing


def pytest_configure(config):
    comparing.is_thorough = "not full" not in config.option.markexpr


@pytest.fixture(autouse=True)
def _move_small_tensors(monkeypatch):
    """The tests' models are tiny: everything is worth moving."""
    monkeypatch.setattr(offload, "SMALLEST", 1)
