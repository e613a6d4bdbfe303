import pytest


@pytest.fixture(scope="session")
def _cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _own_cache(_cache, monkeypatch):
    """Profiles of the tests' models are nothing to the user's own; among the tests they are measured once."""
    monkeypatch.setenv("XDG_CACHE_HOME", _cache)
