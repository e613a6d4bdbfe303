"""An out-of-memory error says what was resident and what would help; the next step works."""

import pytest
import torch
from torch import nn

import fleetx as X
from fleetx import fleet
from fleetx.fleet import oom
from tests.fleet.planned import RunsOut, batches, by_minimize, prepared, strategy


class Greedy(nn.Module):
    """Runs out of memory when it is told to."""

    def __init__(self, where):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)
        self.where = where

    def forward(self, x):
        hidden = self.first(x)
        if self.where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        if self.where == "backward":
            hidden.register_hook(self.fail)
        return self.second(hidden)

    def fail(self, _gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def batch(size=8):
    return torch.ones(size, 4), torch.zeros(size, dtype=torch.long)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_step_explains_and_goes_on(where):
    model = Greedy(None)
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    step = X.Step(model, torch.optim.Adam(model.parameters()), nn.functional.cross_entropy, strategy)
    step(batch())
    model.where = where
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 20.00 GiB") as caught:
        step(batch())
    note = "\n".join(caught.value.__notes__)
    assert "with a micro-batch of 4 samples" in note
    assert "parameters: 120 B" in note
    assert "gradients, when all are there: 120 B" in note
    assert "optimizer state: " in note
    assert "k_steps = 4" in note
    assert "recompute" in note
    assert note.count("memory ran out") == 1
    model.where = None
    assert step(batch()).updated


def test_minimize_explains_too():
    model = Greedy("backward")
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(fleet.distributed_model(model).parameters(), lr=0.1))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        optimizer.minimize(model(batch()[0]).sum())
    assert any("memory ran out" in note for note in caught.value.__notes__)


def test_what_is_on_already_is_not_advised():
    model = Greedy("forward")
    strategy = fleet.DistributedStrategy(
        recompute=True,
        recompute_configs={"checkpoints": ["first"]},
        amp=True,
        amp_configs={"dtype": "bfloat16"},
    )
    step = X.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy, strategy)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step(batch())
    note = "\n".join(caught.value.__notes__)
    assert "in the forward, in the segment that would have ended at" in note
    assert "try amp" not in note
    assert "enable_offload" not in note  # from the memory of a CPU there is nowhere to go
    advice = " ".join(oom._advice(strategy, 0, 8, torch.device("cuda")))
    assert "enable_offload = True" in advice
    assert "try amp" not in advice


@pytest.mark.middle
@pytest.mark.parametrize("oom_retry", [False, True])
@pytest.mark.parametrize("global_batch", [None, 16])
def test_where_the_planner_cuts_its_own_settings_are_advised(oom_retry, global_batch):
    configs = {"oom_retry": oom_retry, "memory_budget": "3MiB", "global_batch": global_batch}
    model, optimizer = prepared(strategy(configs, k_steps=1))
    step = X.Step(model, optimizer, nn.functional.mse_loss)
    (data,) = batches(1)
    step(data)
    model.greed = RunsOut(at=1, times=100)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step(data)
    note = "\n".join(caught.value.__notes__)
    tried = "try a smaller recompute_configs.memory_budget" in note, "oom_retry = True" in note
    assert tried == ((False, False) if oom_retry else (True, True))  # smaller plans were tried already, or not
    assert ("try gradient_merge" in note) == (global_batch is None)  # else the planner cuts
    assert "enable_offload" not in note  # of a CPU's memory there is no other


def test_where_the_caller_cuts_no_step_can_be_done_again():
    model, optimizer = prepared(strategy({}))
    (data,) = batches(1)
    by_minimize(model, optimizer, [data])
    model.greed = RunsOut(at=1, where="backward", times=100)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        by_minimize(model, optimizer, [data])
    note = "\n".join(caught.value.__notes__)
    assert "try a smaller recompute_configs.memory_budget" in note
    assert "oom_retry" not in note
    assert "try gradient_merge with k_steps = 4" in note


def test_other_errors_are_left_alone():
    model = Greedy(None)
    step = X.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy)
    with pytest.raises(RuntimeError) as caught:
        step((torch.ones(4, 3), torch.zeros(4, dtype=torch.long)))
    assert not any("memory ran out" in note for note in getattr(caught.value, "__notes__", []))


def test_the_segment_that_was_being_repeated_is_named():
    model = nn.Sequential(nn.Linear(4, 4), Greedy(None), nn.ReLU())
    strategy = fleet.DistributedStrategy(recompute=True, recompute_configs={"checkpoints": ["1"]})
    step = X.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy, strategy)
    forwards = []

    def fail(*_):
        forwards.append(1)
        if len(forwards) == 4:  # when the second step repeats it
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model[1].register_forward_pre_hook(fail)
    step(batch())
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step(batch())
    assert "while the segment that ends at '1' was" in "\n".join(caught.value.__notes__)
