"""Saving from a CUDA device, and resuming there."""

import pytest
import torch

import fleetx as X
from tests.checkpoint.making import same
from tests.jobs import checkpoint_worker

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", checkpoint_worker.CASES.values(), ids=list(checkpoint_worker.CASES))
def test_a_run_on_a_device_resumes_bit_for_bit(tmp_path, monkeypatch, case):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    whole = checkpoint_worker.play("through", tmp_path, case, "cuda")
    assert checkpoint_worker.play("resume", tmp_path, case, "cuda") == whole


def test_an_asynchronous_save_holds_what_was_there_at_the_call(tmp_path):
    model = torch.nn.Linear(2000, 2000, device="cuda")
    checkpoints = X.Checkpoints(tmp_path, model=model)
    for number in range(3):
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        checkpoints.save(number, asynchronous=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        checkpoints.wait()
    again = torch.nn.Linear(2000, 2000, device="cuda")
    assert X.Checkpoints(tmp_path, model=again).resume().step == 2
    assert same(again.state_dict(), expected)


def test_a_run_saved_on_a_device_goes_on_without_one(tmp_path):
    model = torch.nn.Linear(3, 3, device="cuda")
    X.Checkpoints(tmp_path, model=model).save(1)
    again = torch.nn.Linear(3, 3)
    assert X.Checkpoints(tmp_path, model=again).resume().step == 1
    assert torch.equal(again.weight, model.weight.cpu())
