"""`CUDAPlace` in scripts of the guide, on machines with and without a GPU."""

import pytest
import torch

from fleetx import static
from fleetx.compat import fluid, paddle
from fleetx.launch.devices import ON_HOST


def test_it_is_the_host_where_the_launcher_says_so(monkeypatch, told):
    monkeypatch.setenv(ON_HOST, "1")
    assert fluid.CUDAPlace(1) == static.CPUPlace()
    assert paddle.CUDAPlace(0) == static.CPUPlace()
    (record,) = told.records
    assert "CUDAPlace(1) is the host here: the job was started with --devices cpu" in record.message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nobody_guesses(monkeypatch):
    monkeypatch.delenv(ON_HOST, raising=False)
    with pytest.raises(RuntimeError, match=r"needs a GPU, and this machine has none.*fleetrun --devices cpu,cpu"):
        fluid.CUDAPlace(0)


def test_the_host_by_its_own_name():
    assert fluid.CPUPlace().device == torch.device("cpu")
