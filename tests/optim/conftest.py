import pytest

from .training import MAKERS


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]
