import pytest

from fleetx import notices, static


@pytest.fixture(autouse=True)
def _fresh_programs():
    """A script of the guide builds the default programs, and a process has one of each."""
    static.reset_default_programs()
    yield
    static.reset_default_programs()


@pytest.fixture
def told(monkeypatch, caplog):
    """What the test is told, also where an earlier one was told the same."""
    monkeypatch.setattr(notices, "_told", set())
    return caplog
