"""Models in which no blocks are found, modules that each run once: their plan is a micro-batch."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import fleetx
from fleetx import memory


class SharedEncoder(nn.Module):
    """Two views of each sample go through one encoder."""

    def __init__(self):
        super().__init__()
        layers = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))
        self.encoder = nn.Sequential(*layers)

    def forward(self, views):
        first, second = self.encoder(views[:, 0]), self.encoder(views[:, 1])
        return (functional.normalize(first, dim=1) - functional.normalize(second, dim=1)).square().mean()


class OneLongForward(nn.Module):
    """Its operations are not in modules."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(16, 16) / 4) for _ in range(6))

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x.square().mean()


class RecurrentLoop(nn.Module):
    """One cell runs for each word."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(8, 16), nn.Linear(16, 1)

    def forward(self, words):
        state = words.new_zeros(len(words), 16)
        for word in words.unbind(1):
            state = self.cell(word, state)
        return self.out(state).square().mean()


SHAPES = {SharedEncoder: (64, 2, 16), OneLongForward: (64, 16), RecurrentLoop: (64, 6, 8)}


@pytest.mark.parametrize("kind", SHAPES)
def test_the_plan_of_a_model_without_blocks_is_its_micro_batch(kind):
    torch.manual_seed(0)
    model, batch = kind(), torch.randn(SHAPES[kind])
    plain = kind()
    plain.load_state_dict(model.state_dict())
    asked = {"optimizer": torch.optim.AdamW(model.parameters()), "cached": False}
    with pytest.raises(fleetx.planner.DoesNotFit) as caught:
        fleetx.plan(model, batch, memory=1000, **asked)
    whole = fleetx.plan(model, batch, memory="1GiB", one_forward=True, **asked)
    middle = (caught.value.least_memory + whole.peak) // 2
    plan = fleetx.plan(model, batch, memory=middle, verify=True, **asked)
    assert (plan.names, plan.states) == ((), ())
    assert 1 < plan.k_steps < 64
    assert plan.measured.peak <= plan.peak <= middle
    assert any("the plan chooses the micro-batch alone, and nothing is recomputed" in note for note in plan.notes)
    with plan.apply(model):
        assert memory.applied_to(model) is None
        for part in plan.split(batch):
            (model(part) * len(part) / len(batch)).backward()
    plain(batch).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_that_nothing_is_compiled_without_blocks_is_said():
    torch.manual_seed(0)
    plan = fleetx.plan(OneLongForward(), torch.randn(4, 16), memory="1GiB", compile=True, cached=False)
    assert any("segments are what compile=True compiles, and there are none" in note for note in plan.notes)
