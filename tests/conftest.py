import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.selection", "tests.planner.work_clock"]

torch.set_num_threads(1)

# Jobs that are started in the background, or under nohup, ignore these, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

if " " in torch.__file__:  # a checkout in such a folder: some tests compile without FleetX, which would do this
    from fleetx.compiler_paths import check_compiler_paths

    check_compiler_paths()

# An example may take as long as it likes.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_collection_modifyitems(items):
    """Slow tests may hang for longer: on a machine with much to do they take minutes."""
    for item in items:
        if item.get_closest_marker("full") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(autouse=True)
def _fp32_by_default():
    """Tests that ask for fp64 must not leave it behind."""
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float32)
