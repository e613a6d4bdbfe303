"""The same training in bare torch, without a line of FleetX: what the exactness tests compare with.

Everything is fp64. A job is a list of global batches; each worker holds a part of a batch and cuts it into
micro-batches. The reference sees each global batch as one.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tests.optim.reference import lamb_step, lars_step

UPDATES = 5
K_STEPS = 4
PAD = -100


@dataclass(frozen=True)
class Case:
    """One exactness case. `ragged` batches cannot be cut evenly, neither over workers nor into micro-batches."""

    optimizer: str = "sgd"
    ragged: bool = False
    avg: bool = True
    clip_norm: float | None = None
    recompute: str | None = None  # where checkpoints live; changes nothing

    @property
    def name(self):
        parts = [self.optimizer, "ragged" if self.ragged else "equal", "avg" if self.avg else "sum"]
        recompute = [f"recompute_{self.recompute}"] if self.recompute else []
        return "-".join([*parts, *(["clip"] if self.clip_norm else []), *recompute])


CASES = [
    *(Case(optimizer, ragged) for optimizer in ("sgd", "adam", "lars", "lamb") for ragged in (False, True)),
    *(Case(optimizer, ragged, avg=False) for optimizer in ("sgd", "adam", "lars", "lamb") for ragged in (False, True)),
    Case("adam", ragged=True, clip_norm=0.05),
    Case("lars", ragged=True, recompute="device"),
    Case("lamb", ragged=True, recompute="host"),
]


class Net(nn.Module):
    """A frozen part, an unused parameter, and otherwise a small network with a normalisation."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.first = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 3)
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.first(self.frozen(x)))))


def make_net(seed=0):
    torch.manual_seed(seed)
    return Net().double()


def batches(case, workers):
    """Global batches: sizes that divide evenly, or sizes that do not."""
    generator = torch.Generator().manual_seed(11)
    even = workers * K_STEPS * 3
    sizes = [even + 3 * workers + 1 + i for i in range(UPDATES)] if case.ragged else [even] * UPDATES
    return [
        (
            torch.randn(n, 6, generator=generator, dtype=torch.float64),
            torch.randint(0, 3, (n,), generator=generator),
        )
        for n in sizes
    ]


def part(batch, rank, workers):
    """What one worker holds of a global batch."""
    return tuple(tensor.tensor_split(workers)[rank] for tensor in batch)


def micro_batches(batch):
    return list(zip(*(tensor.tensor_split(K_STEPS) for tensor in batch), strict=True))


def mean_loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def contrast(model, batch):
    """A loss of two forwards."""
    return (model(batch[0]) - model(-batch[0])).square().mean()


def train_awkward(workers):
    """What tests/jobs/exactness_worker.py: awkward_windows does, on whole batches."""
    net = make_net()
    optimizer = make_optimizer("sgd", net)
    first, second, third = batches(Case(), workers)[:3]
    parts = [micro_batches(part(second, rank, workers))[:2] for rank in range(workers)]
    seen = [torch.cat([micro[index] for micros in parts for micro in micros]) for index in range(2)]

    def two_losses():
        return (mean_loss(net, seen) + net(seen[0]).square().mean()) / 2

    for loss in (lambda: contrast(net, first), two_losses, lambda: mean_loss(net, third)):
        net.zero_grad()
        loss().backward()
        optimizer.step()
        net.frozen.requires_grad_(loss is two_losses)
    return net.state_dict()


def global_loss(case, model, batch, workers):
    """One number for the whole global batch: its mean, or the mean over workers of sums of micro-batch means."""
    if case.avg:
        return mean_loss(model, batch)
    sums = [sum(mean_loss(model, micro) for micro in micro_batches(part(batch, r, workers))) for r in range(workers)]
    return sum(sums) / workers


def train(case, workers, net=None):
    """Parameters after all updates, and the loss of each."""
    net = net or make_net()
    optimizer = make_optimizer(case.optimizer, net)
    losses = []
    for batch in batches(case, workers):
        loss = global_loss(case, net, batch, workers)
        net.zero_grad()
        loss.backward()
        if case.clip_norm:
            torch.nn.utils.clip_grad_norm_(net.parameters(), case.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}, losses


def make_optimizer(name, net):
    parameters = list(net.parameters())
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
    if name == "adam":
        return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.01)
    return LayerwiseReference(name, net)


class LayerwiseReference:
    """LARS and LAMB in numpy, for the parameters that have a gradient."""

    def __init__(self, name, net):
        self.name = name
        self.parameters = dict(net.named_parameters())
        self.state = {key: SimpleNamespace(v=0.0, m=0.0, s=0.0, t=0) for key in self.parameters}

    @torch.no_grad()
    def step(self):
        for key, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            state, excluded = self.state[key], key.endswith("bias")
            p, g = parameter.numpy().copy(), parameter.grad.numpy()
            if self.name == "lars":
                p, state.v = lars_step(
                    p, g, state.v, lr=0.5, momentum=0.9, coeff=0.02, weight_decay=0.0005, epsilon=0.0,
                    decays=not excluded, adapts=not excluded,
                )  # fmt: skip
            else:
                state.t += 1
                p, state.m, state.s = lamb_step(
                    p, g, state.m, state.s, state.t, lr=0.01, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01,
                    decays=not excluded, always_adapt=False,
                )  # fmt: skip
            parameter.copy_(torch.from_numpy(np.asarray(p)))


# Two losses that average over different things -------------------------------------------------------------


class Tagger(nn.Module):
    """Scores for each token, and for the whole sequence."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.tokens = nn.Linear(8, 5)
        self.sequence = nn.Linear(8, 2)

    def forward(self, ids):
        hidden = torch.tanh(self.embedding(ids))
        return self.tokens(hidden), self.sequence(hidden.mean(dim=1))


def make_tagger():
    torch.manual_seed(3)
    return Tagger().double()


def tagged_batches(workers):
    """Sequences with very different numbers of unpadded tokens; some micro-batches have none at all."""
    generator = torch.Generator().manual_seed(5)
    result = []
    for _ in range(UPDATES):
        n = workers * K_STEPS * 2 + 3
        ids = torch.randint(0, 11, (n, 7), generator=generator)
        labels = torch.randint(0, 5, (n, 7), generator=generator)
        kept = torch.randint(0, 8, (n, 1), generator=generator)
        kept[: math.ceil(n / workers / K_STEPS)] = 0
        labels[torch.arange(7) >= kept] = PAD
        result.append({"ids": ids, "labels": labels, "kind": torch.randint(0, 2, (n,), generator=generator)})
    return result


def tagger_losses(model, batch):
    tokens, sequence = model(batch["ids"])
    return {
        "tokens": functional.cross_entropy(tokens.flatten(0, 1), batch["labels"].flatten(), ignore_index=PAD),
        "sequence": functional.cross_entropy(sequence, batch["kind"]),
    }


def tagger_items(batch):
    return {"tokens": (batch["labels"] != PAD).sum(), "sequence": len(batch["kind"])}


def train_tagger(workers):
    model = make_tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    reported = []
    for batch in tagged_batches(workers):
        losses = tagger_losses(model, batch)
        model.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
        reported.append({name: loss.item() for name, loss in losses.items()})
    return model.state_dict(), reported


# Items that are weights of samples: fewer than one in a window, none in some micro-batches, none in some windows -----


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.common = nn.Linear(8, 3)
        self.rare = nn.Linear(8, 1)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return self.common(hidden), self.rare(hidden)


def make_two_heads():
    torch.manual_seed(4)
    return TwoHeads().double()


def weighed_batches(workers):
    """The first micro-batch of the first worker has no weight at all; the rare task has none in every other batch."""
    generator = torch.Generator().manual_seed(7)
    result = []
    for number in range(UPDATES):
        n = workers * K_STEPS * 2 + 3
        x = torch.randn(n, 6, generator=generator, dtype=torch.float64)
        w = torch.rand(n, generator=generator, dtype=torch.float64) / n / 3
        w[: math.ceil(n / workers / K_STEPS)] = 0
        v = (torch.rand(n, generator=generator) < 0.4).double() * ((number + 1) % 2)
        result.append((x, torch.randint(0, 3, (n,), generator=generator), w, v))
    return result


def weighed_losses(model, batch):
    """Masked means as people write them: 0/0 where nothing has a weight."""
    x, labels, w, v = batch
    common, rare = model(x)
    errors = functional.cross_entropy(common, labels, reduction="none")
    return {"common": (errors * w).sum() / w.sum(), "rare": (rare[:, 0].square() * (v / v.sum())).sum()}


def weighed_items(batch):
    return {"common": batch[2].sum(), "rare": batch[3].sum()}


def train_weighed(workers, names=("common", "rare")):
    """A task without items in the whole batch has a zero gradient: decay and momentum go on."""
    model = make_two_heads()
    optimizer = make_optimizer("sgd", model)
    for x, labels, w, v in weighed_batches(workers):
        losses = weighed_losses(model, (x, labels, w, v if v.sum() > 0 else v + 1))
        losses["rare"] = losses["rare"] * float(v.sum() > 0)
        model.zero_grad()
        sum(losses[name] for name in names).backward()
        optimizer.step()
    return model.state_dict()


# Complex weights beside real ones -------------------------------------------------------------------------------------


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.phase = nn.Buffer(torch.randn((), dtype=torch.complex128))

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight * self.phase).abs() + self.bias


def make_complex(seed=5):
    torch.manual_seed(seed)
    return Complex()


def train_complex(case, workers):
    """Clipping sees the length of pairs of real numbers."""
    return train(case, workers, net=make_complex())


COMPLEX = Case("adam", ragged=True, clip_norm=0.05)
