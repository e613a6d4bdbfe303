"""A small model that is planned, in every door; and memory that runs out when it is told to."""

import torch
from torch import nn

import fleetx as X
from fleetx import fleet

BUDGET = "1800KiB"


class Block(nn.Module):
    """With everything that a repeated step must not repeat: random masks, running statistics, a count."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)
        self.calls = 0

    def forward(self, hidden):
        self.calls += 1
        normed = self.norm(hidden.flatten(0, 1)).view_as(hidden)
        return hidden + self.drop(self.narrow(nn.functional.gelu(self.wide(normed))))


class Net(nn.Module):
    def __init__(self, width=32, depth=6):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 4)
        self.greed = None  # called in every forward, and may raise

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.greed is not None:
                self.greed(number, x)
        return self.head(x)


class RunsOut:
    """Memory runs out once: in the given forward, or in its backward, of a training that counts its forwards."""

    def __init__(self, at, where="forward", times=1):
        self.at, self.where, self.times = at, where, times
        self.forwards = 0

    def __call__(self, number, hidden):
        if number != 3 or not torch.is_grad_enabled():
            return
        self.forwards += 1
        if self.forwards < self.at or not self.times:
            return
        if self.where == "forward":
            self.fail()
        elif hidden.requires_grad:
            hidden.register_hook(self.fail)

    def fail(self, _gradient=None):
        if self.times:
            self.times -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def strategy(configs, k_steps=2, **others):
    made = fleet.DistributedStrategy(**others)
    if k_steps > 1:
        made.gradient_merge = True
        made.gradient_merge_configs = {"k_steps": k_steps}
    if configs is not None:
        made.recompute = True
        made.recompute_configs = {"checkpoints": "auto", "memory_budget": BUDGET, **configs}
    return made


def prepared(made, seed=0, optimizer=None):
    torch.manual_seed(seed)
    model = fleet.distributed_model(Net(), made)
    make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    return model, fleet.distributed_optimizer(make(model.parameters()), made)


def batches(count=4, size=16, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 16, 32, generator=generator), torch.randn(size, 16, 4, generator=generator))
        for _ in range(count)
    ]


def by_step(model, optimizer, data):
    step = X.Step(model, optimizer, nn.functional.mse_loss)
    return [step(batch).loss.item() for batch in data]


def by_minimize(model, optimizer, data, k_steps=2):
    losses = []
    for x, y in data:
        for part, target in zip(x.chunk(k_steps), y.chunk(k_steps), strict=True):
            out = optimizer.minimize(nn.functional.mse_loss(model(part), target))
        losses.append(out.loss.item())
    return losses


def state(model, losses):
    """All that a training leaves behind."""
    calls = [block.calls for block in model.blocks]
    return losses, {name: value.clone() for name, value in model.state_dict().items()}, calls, torch.get_rng_state()


def same(ours, plain, within=0.0):
    assert ours[2] == plain[2]
    assert torch.equal(ours[3], plain[3])
    if within == 0.0:
        assert ours[0] == plain[0]
    for name, value in plain[1].items():
        if within == 0.0:
            assert torch.equal(ours[1][name], value), name
        else:
            torch.testing.assert_close(ours[1][name], value, rtol=within, atol=within, msg=name)
