"""Recompute, offload and compiled segments as a strategy switches them on: same numbers, through every door."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import fleetx as X
from fleetx import fleet, memory
from fleetx.applications import Bert_base, Resnet50


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(32, 16)
            )
            for _ in range(4)
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def batches(count=3, size=24):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


def trained(strategy, *, door="step", dtype=torch.float32):
    torch.manual_seed(0)
    model = Net().to(dtype)
    model = fleet.distributed_model(model, strategy)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), strategy)
    torch.manual_seed(5)
    losses = []
    if door == "step":
        step = X.Step(model, optimizer, functional.cross_entropy)
        losses = [step((x.to(dtype), y)).loss.item() for x, y in batches()]
    else:
        for x, y in batches():
            for xs, ys in zip(x.to(dtype).split(12), y.split(12), strict=True):
                out = optimizer.minimize(functional.cross_entropy(model(xs), ys))
            losses.append(out.loss.item())
    return losses, model.state_dict(), torch.get_rng_state()


def merging(**settings):
    return fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2}, **settings)


def recomputing(offload=False, **settings):
    configs = {"checkpoints": ["blocks.*"], "enable_offload": offload}
    return merging(recompute=True, recompute_configs=configs, **settings)


@pytest.mark.parametrize("door", ["step", "minimize"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lars": True},
        {"amp": True, "amp_configs": {"dtype": "bfloat16"}},
        {"amp": True, "amp_configs": {"use_pure_bf16": True}},
        {"amp": True, "amp_configs": {"dtype": "bfloat16", "custom_black_list": ["blocks.1.0"]}},
    ],
    ids=["fp32", "lars", "bf16", "pure", "black list"],
)
def test_recompute_changes_no_bit(door, offload, settings):
    plain = trained(merging(**settings), door=door)
    ours = trained(recomputing(offload, **settings), door=door)
    assert ours[0] == plain[0]
    for name, tensor in plain[1].items():
        assert torch.equal(ours[1][name], tensor), name
    assert torch.equal(ours[2], plain[2])


@pytest.mark.middle
@pytest.mark.filterwarnings("ignore")  # torch's own, when it compiles
def test_compiled_segments_give_the_same_with_and_without_recompute():
    plain = trained(merging(compile=True), dtype=torch.float64)
    ours = trained(recomputing(compile=True), dtype=torch.float64)
    for name, tensor in plain[1].items():
        torch.testing.assert_close(ours[1][name], tensor, rtol=1e-12, atol=1e-12, msg=name)


def test_auto_takes_what_the_model_recommends():
    strategy = fleet.DistributedStrategy(recompute=True, recompute_configs={"checkpoints": "auto"})
    model = fleet.distributed_model(Resnet50(classes=2, depths=(1, 1, 1, 1), width=2), strategy)
    assert memory.applied_to(model).cut_modules() == ["layer1.0", "layer2.0", "layer3.0", "layer4.0"]


def test_auto_without_a_recommendation_says_what_to_do():
    strategy = fleet.DistributedStrategy(recompute=True, recompute_configs={"checkpoints": "auto"})
    with pytest.raises(ValueError, match="has no list of names called `checkpoints`"):
        fleet.distributed_model(Net(), strategy)


def test_a_wrong_name_leaves_the_model_as_it_was():
    model = Net()
    before = copy.deepcopy(model)
    strategy = fleet.DistributedStrategy(recompute=True, recompute_configs={"checkpoints": ["block.*"]})
    with pytest.raises(ValueError, match=r"no module is called 'block.\*'"):
        fleet.distributed_model(model, strategy)
    assert not model._forward_hooks
    assert before.state_dict().keys() == model.state_dict().keys()


def test_a_checkpoint_shape_is_checked_where_it_is_given():
    def run(shape):
        configs = {"checkpoints": ["blocks.*"], "checkpoint_shape": shape}
        model = fleet.distributed_model(Net(), fleet.DistributedStrategy(recompute=True, recompute_configs=configs))
        model(torch.ones(4, 6))

    run([8, 16])
    with pytest.raises(ValueError, match=r"says \[8, 17\], and a checkpoint made by a Sequential is \[4, 16\]"):
        run([8, 17])


def test_bert_with_both_losses_recomputes_every_layer():
    def run(strategy):
        torch.manual_seed(0)
        model = Bert_base(layers=3, width=16, heads=2, vocab_size=40, max_positions=12)
        step = X.Step(model, torch.optim.AdamW(model.parameters(), lr=1e-3), items=model.items, strategy=strategy)
        torch.manual_seed(2)
        batch = {
            "input_ids": torch.randint(40, (8, 12)),
            "attention_mask": torch.arange(12).expand(8, 12) < torch.randint(4, 13, (8, 1)),
            "masked_positions": torch.randint(4, (8, 2)),
            "masked_labels": torch.randint(40, (8, 2)),
            "next_sentence_labels": torch.randint(2, (8,)),
        }
        return [step(batch).losses["mlm"].item() for _ in range(3)], model.state_dict()

    plain, ours = (
        run(merging()),
        run(merging(recompute=True, recompute_configs={"checkpoints": "auto", "enable_offload": True})),
    )
    assert ours[0] == plain[0]
    assert all(torch.equal(ours[1][name], tensor) for name, tensor in plain[1].items())
