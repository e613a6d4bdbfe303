"""What a loss shows of whether a batch may be cut."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import fleetx
from fleetx.planner.feeding import Feeding
from fleetx.planner.merging import couples_samples


class Towers(nn.Module):
    def __init__(self, of_batch):
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 8)) for _ in range(2))
        self.of_batch = of_batch

    def forward(self, x, y):
        return self.of_batch(self.first(x), self.second(y))


def contrastive(a, b):
    scores = functional.normalize(a, dim=1) @ functional.normalize(b, dim=1).T
    return functional.cross_entropy(scores * 3, torch.arange(len(a)))


def decorrelated(a, b):
    a, b = ((x - x.mean(0)) / (x.std(0) + 1e-3) for x in (a, b))
    return ((a.T @ b / len(a)) - torch.eye(8)).square().sum()


def mean_of_some(a, b):
    kept = a[:, 0] > -0.2
    return (a - b).square().sum(1)[kept].sum() / kept.sum().clamp(min=1)


COUPLED = [contrastive, decorrelated, lambda a, b: {"one": functional.mse_loss(a, b), "two": contrastive(a, b)}]
SINGLE = [
    functional.mse_loss,
    mean_of_some,
    lambda a, b: (a - b).square().sum(),
    lambda a, b: {"mean": mean_of_some(a, b), "sum": (a * b).sum()},
    lambda a, b: functional.mse_loss(a, b) * torch.rand(()),  # another one each time: it says nothing
    lambda a, b: (a, b),  # no loss at all
]


def sample(count=8):
    return torch.randn(count, 6), torch.randn(count, 6)


@pytest.mark.parametrize("of_batch", COUPLED)
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_losses_that_couple_samples_are_told(of_batch, precision):
    told = 0
    for seed in range(20):
        torch.manual_seed(seed)
        told += couples_samples(Feeding(Towers(of_batch), None, precision), sample(4))
    # Without a loss of single samples it may look like a mean by chance.
    assert told == 20 or (of_batch is decorrelated and told >= 8)


@pytest.mark.parametrize("of_batch", SINGLE)
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_losses_that_are_sums_or_means_are_not(of_batch, precision):
    for seed in range(20):
        torch.manual_seed(seed)
        model = Towers(of_batch)
        assert not couples_samples(Feeding(model, None, precision), sample(4))
        assert all(module.training for module in model.modules())


class OtherInEvaluation(Towers):
    def forward(self, x, y):
        if not self.training:
            raise RuntimeError("gives no loss")
        return super().forward(x, y)


def test_a_model_that_does_something_else_in_evaluation_says_nothing():
    assert not couples_samples(Feeding(OtherInEvaluation(contrastive)), sample(4))


@pytest.mark.middle
def test_a_plan_that_merges_what_is_coupled_has_a_note():
    torch.manual_seed(0)
    model = Towers(contrastive)
    asked = {"memory": "1MiB", "cached": False}
    merged = fleetx.plan(model, sample(), global_batch=64, **asked | {"memory": "24KiB"})
    assert merged.k_steps > 1
    assert any("no sum or mean over parts" in note and "one_forward=True" in note for note in merged.notes)
    whole = fleetx.plan(model, sample(), global_batch=64, one_forward=True, **asked)
    assert not any("no sum or mean" in note for note in whole.notes)


def test_a_model_without_a_loss_is_planned_with_a_note():
    plan = fleetx.plan(nn.Linear(6, 6), torch.randn(4, 6), memory="1MiB", cached=False)
    assert any("gave no loss" in note and "give loss_fn" in note for note in plan.notes)
    with_loss = fleetx.plan(
        nn.Linear(6, 6), (torch.randn(4, 6),) * 2, loss_fn=functional.mse_loss, memory="1MiB", cached=False
    )
    assert not any("gave no loss" in note for note in with_loss.notes)


class MergesInEvaluation(nn.Linear):
    """As layers do that add a small update to their weights when they are evaluated."""

    def train(self, mode=True):
        if self.training != mode:
            self.weight.data += 1 if not mode else -1
        return super().train(mode)


def test_weights_that_change_in_evaluation_stay_as_they_are():
    model = nn.Sequential(*(nn.Sequential(MergesInEvaluation(6, 6), nn.Tanh()) for _ in range(3)))
    before = [parameter.clone() for parameter in model.parameters()]
    fleetx.plan(model, (torch.randn(4, 6),) * 2, loss_fn=functional.mse_loss, memory="1MiB", cached=False)
    assert all(map(torch.equal, model.parameters(), before))
    assert all(module.training for module in model.modules())
