import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start

import pytest
import torch

pytest_plugins = ["tests.selection"]

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fp32_by_default():
    """Tests that ask for fp64 must not leave it behind."""
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float32)
