"""Muon for matrices, AdamW for the rest: torch's own numbers, under our groups, names and patterns."""

import copy
import doctest

import pytest
import torch
from torch import nn
from torch.nn import functional

import fleetx as X
from fleetx import fleet, names
from fleetx.optim import Muon, muon, schedules

from .training import assert_bit_equal, through_a_file


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    names.record(model)
    return model


def train(model, optimizers, steps):
    for step in steps:
        model.zero_grad()
        tokens = (torch.arange(12) + step) % 6
        functional.cross_entropy(model(tokens), tokens % 3).backward()
        for optimizer in optimizers:
            optimizer.step()


def make(model, **more):
    return Muon(
        model.parameters(),
        lr=0.02,
        adamw_lr=0.003,
        weight_decay=0.05,
        exclude_from_weight_decay=["bias", "norm"],
        exclude_from_muon=["embedding", "4.weight"],
        **more,
    )


def by_hand(model):
    own = dict(model.named_parameters())
    return [
        torch.optim.Muon([own["1.weight"]], lr=0.02, weight_decay=0.05),
        torch.optim.AdamW([own["0.weight"], own["4.weight"]], lr=0.003, weight_decay=0.05),
        torch.optim.AdamW([own[n] for n in ("1.bias", "2.weight", "2.bias", "4.bias")], lr=0.003, weight_decay=0.0),
    ]


def test_it_is_torchs_muon_and_adamw():
    model, twin = network(), network()
    train(model, [make(model)], range(4))
    train(twin, by_hand(twin), range(4))
    assert_bit_equal(model.parameters(), twin.parameters())


def test_schedules_and_groups_move_both_halves():
    model, twin = network(), network()
    optimizer, theirs = make(model), by_hand(twin)
    scheduler = schedules.as_scheduler(optimizer, schedules.step_decay(0.02, every=2, factor=0.5))
    for step in range(5):
        for one in theirs:
            one.param_groups[0]["lr"] = (0.02 if isinstance(one, torch.optim.Muon) else 0.003) * 0.5 ** (step // 2)
        train(model, [optimizer], [step])
        train(twin, theirs, [step])
        scheduler.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_saved_and_resumed_is_bit_equal_and_copies_step_on():
    model = network()
    optimizer = make(model)
    train(model, [optimizer], range(2))
    saved, weights = through_a_file(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    again, copied = copy.deepcopy((model, optimizer))
    train(model, [optimizer], range(2, 4))
    resumed = network()
    loaded = make(resumed)
    resumed.load_state_dict(weights)
    loaded.load_state_dict(saved)
    train(resumed, [loaded], range(2, 4))
    train(again, [copied], range(2, 4))
    assert_bit_equal(resumed.parameters(), model.parameters())
    assert_bit_equal(again.parameters(), model.parameters())


def test_other_exclusions_are_refused():
    saved = make(network()).state_dict()
    other = Muon(network().parameters(), exclude_from_weight_decay=["bias", "norm"])
    with pytest.raises(
        ValueError, match=r"exclude_from_muon .* treat 1 parameters of group 0 differently, '4\.weight' first"
    ):
        other.load_state_dict(saved)


def test_a_state_of_another_optimizer_is_refused():
    """Its matrices would begin anew without a word."""
    model = network()
    adamw = torch.optim.AdamW(model.parameters())
    train(model, [adamw], range(1))
    with pytest.raises(ValueError, match=r"has no 'decays', so no Muon saved it: load a state that a Muon saved\. The"):
        make(model).load_state_dict(adamw.state_dict())


def test_the_table_accounts_for_all_that_adamw_moves():
    optimizer = make(network())
    table = [
        "Muon",
        "without weight decay: 4 of 7 parameters",
        "  pattern       parameters  such as",
        "  bias                   3  1.bias, 2.bias, 4.bias",
        "  norm                   2  2.weight, 2.bias",
        "moved by AdamW: 6 of 7 parameters",
        "  pattern       parameters  such as",
        "  embedding              1  0.weight",
        "  4.weight               1  4.weight",
        "  not matrices           4  1.bias, 2.weight, 2.bias, …",
    ]
    assert optimizer.exclusion_table().splitlines() == table
    optimizer.add_param_group(
        {"params": [nn.Parameter(torch.ones(2))], "exclude_from_weight_decay": [], "exclude_from_muon": []}
    )
    assert "not matrices           5" in optimizer.exclusion_table()


def test_empty_matrices():
    weights = [("a", nn.Parameter(torch.ones(0, 3))), ("b", nn.Parameter(torch.ones(3, 0)))]
    other = nn.Parameter(torch.eye(3))
    optimizer = Muon([*weights, ("c", other)], exclude_from_muon=[])
    for _, weight in [*weights, ("c", other)]:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert not torch.equal(other, torch.eye(3))


def test_it_trains_under_a_strategy_with_masters_and_merging():
    strategy = fleet.DistributedStrategy(
        gradient_merge=True,
        gradient_merge_configs={"k_steps": 2},
        amp=True,
        amp_configs={"use_pure_bf16": True},
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
    names.record(model)
    optimizer = Muon(model.parameters(), lr=0.05, adamw_lr=0.01, exclude_from_weight_decay=["bias"])
    step = X.Step(model, optimizer, functional.cross_entropy, strategy)
    x = torch.randn(32, 6)
    batch = x, (x.sum(dim=1) > 0).long()
    losses = [step(batch).loss.item() for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    assert "moved by AdamW: 2 of 4 parameters" in step.optimizer.overview()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda m: Muon(nn.Linear(2, 2).parameters()),
            r"which matrices are embeddings: call .*record.* \[\] if there are",
        ),
        (lambda m: Muon(nn.Linear(2, 2).named_parameters()), "which matrices are embeddings: call"),
        (
            lambda m: Muon(nn.Linear(2, 2).parameters(), exclude_from_muon=["embedding"]),
            r"exclude_from_muon=\['embedding'\] speaks of names",
        ),
        (lambda m: Muon(m.parameters(), exclude_from_muon=["haed"]), "exclude_from_muon: 'haed' matches no parameter"),
        (lambda m: Muon(m.parameters(), exclude_from_muon=None), "exclude_from_muon must be a list .*, got None"),
        (lambda m: Muon(m.parameters(), betas=(0.9,)), r"betas must be two numbers, got \(0\.9,\): \(0\.9, 0\.999\)"),
        (lambda m: Muon(m.parameters(), lr=-1), "lr must be a number at least 0, got -1"),
        (lambda m: Muon(m.parameters(), momentum=1.0), r"momentum must be .*below 1, got 1\.0: 0\.95 is usual"),
        (
            lambda m: Muon(m.parameters(), ns_steps=0),
            "ns_steps must be a whole number of at least 1 and below 100, got 0",
        ),
        (lambda m: Muon(m.parameters(), ns_steps=200), "ns_steps must be .* below 100, got 200: 5 is usual"),
        (lambda m: Muon(m.parameters(), adjust_lr_fn="x"), "adjust_lr_fn must be 'original' or .* got 'x'"),
        (lambda m: Muon(m.parameters(), lr=0.0, adamw_lr=0.1), r"adamw_lr=0\.1 follows .*lr is 0: give the peak"),
        (lambda m: make(m).exclusion_rows("decay"), "Muon has no 'decay': ask for one of exclude_from_weight_decay"),
    ],
)
def test_wrong_arguments(build, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build(network())


def test_a_torch_without_muon_is_told(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(RuntimeError, match=r"is torch's, and torch .* has none: install torch 2\.9 or later"):
        Muon(network().parameters())


def test_the_example_in_the_docstring_runs():
    results = doctest.testmod(muon)
    assert results.attempted > 5
    assert not results.failed
