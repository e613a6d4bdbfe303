"""What windows measure, against squared norms of gradients that bare torch computes for each micro-batch alone."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import fleetx as X
from fleetx import fleet
from fleetx.convergence import NoiseScale
from fleetx.convergence.estimators import from_parts

COUNTS = (4, 1, 7, 2)


class Net(nn.Module):
    """A frozen part, an unused parameter, one that is used twice."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))
        self.twice = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, inputs):
        return self.head(self.twice(self.twice(self.frozen(inputs)).tanh()))


def make(noise=None, k_steps=4, dtype=torch.float64, **settings):
    torch.manual_seed(0)
    strategy = fleet.DistributedStrategy(
        gradient_merge=True, gradient_merge_configs={"k_steps": k_steps, "avg": True}, **settings
    )
    model = fleet.distributed_model(Net().to(dtype), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, fleet.distributed_optimizer(optimizer, strategy, noise_scale=noise)


def micro_batches(counts=COUNTS, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    sizes = [(torch.randn(n, 3, generator=generator).to(dtype), n) for n in counts]
    return [(inputs, torch.randint(2, (n,), generator=generator)) for inputs, n in sizes]


def by_definition(model, batches):
    """Of the whole model under None, then of each parameter."""
    parameters = dict(model.named_parameters())
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    counts = [len(labels) for _, labels in batches]
    parts = []
    for inputs, labels in batches:
        loss = functional.cross_entropy(model(inputs).double(), labels, reduction="sum")
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        given = dict(zip(map(id, trained), found, strict=True))
        grads = (given.get(id(parameter)) for parameter in parameters.values())
        parts.append([torch.zeros(1) if grad is None else grad for grad in grads])
    squares = torch.tensor([[grad.double().square().sum() for grad in part] for part in parts], dtype=torch.float64)
    whole = [sum(grads).double().square().sum().item() for grads in zip(*parts, strict=True)]
    found = {None: from_parts(counts, squares.sum(1).tolist(), sum(whole))}
    return found | {
        name: from_parts(counts, squares[:, place].tolist(), whole[place]) for place, name in enumerate(parameters)
    }


def assert_measured(noise, expected, tolerance=1e-9):
    for name, moments in expected.items():
        assert noise.moments(layer=name)[-1] == pytest.approx(moments, rel=tolerance, abs=tolerance)


def loss_of(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def test_minimize_measures_ragged_micro_batches():
    noise = NoiseScale(every=1)
    model, optimizer = make(noise)
    for seed in (1, 2):
        batches = micro_batches(seed=seed)
        expected = by_definition(model, batches)
        for batch in batches:
            optimizer.minimize(loss_of(model, batch), items=len(batch[1]))
        assert_measured(noise, expected)
    assert noise.updates == 2


@pytest.mark.parametrize("size", [16, 10])
def test_step_counts_samples(size):
    noise = NoiseScale(every=1)
    model, optimizer = make(noise)
    (batch,) = micro_batches((size,))
    step = X.Step(model, optimizer, functional.cross_entropy)
    cut = [len(piece) for piece in batch[1].tensor_split(4)]
    expected = by_definition(model, list(zip(batch[0].split(cut), batch[1].split(cut), strict=True)))
    step(batch)
    assert_measured(noise, expected)


def test_a_loss_scale_changes_nothing():
    noise = NoiseScale(every=1)
    model, optimizer = make(noise, dtype=torch.float32, amp=True, amp_configs={"init_loss_scaling": 1024.0})
    batches = micro_batches(dtype=torch.float32)
    expected = by_definition(model, batches)
    for batch in batches:
        optimizer.minimize(loss_of(model, batch).float(), items=len(batch[1]))
    assert_measured(noise, expected, tolerance=0.05)


def test_measuring_changes_no_bit_of_training():
    weights = []
    for noise in (None, NoiseScale(every=1), NoiseScale(every=2)):
        model, optimizer = make(noise)
        for seed in range(5):
            for batch in micro_batches(seed=seed):
                optimizer.minimize(loss_of(model, batch), items=len(batch[1]))
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert noise.updates == 3
    for others in weights[1:]:
        assert all(map(torch.equal, others, weights[0]))


def test_windows_that_say_nothing_are_left_out():
    """One that is skipped, one with a single micro-batch, one that was discarded, and empty micro-batches."""
    noise = NoiseScale(every=1)
    model, optimizer = make(noise)
    first = micro_batches()
    expected = by_definition(model, first)
    for batch in first:
        optimizer.minimize(loss_of(model, batch), items=len(batch[1]))
    assert_measured(noise, expected)
    for batch in micro_batches():
        optimizer.minimize(loss_of(model, batch) * math.nan, items=len(batch[1]))
    optimizer.minimize(loss_of(model, first[0]), items=4)
    optimizer.flush()
    optimizer.minimize(loss_of(model, first[0]), items=4)
    optimizer.discard()
    assert (len(noise.moments()), noise.left_out) == (1, 2)
    expected = by_definition(model, [first[0], first[2]])
    for batch, items in ((first[0], 4), (first[1], 0), (first[2], 7)):
        optimizer.minimize(loss_of(model, batch), items=items)
    optimizer.flush()
    assert_measured(noise, expected)


def test_a_window_of_one_micro_batch_on_one_worker_is_refused():
    model, optimizer = make(NoiseScale(every=1), k_steps=1)
    (batch,) = micro_batches((8,))
    with pytest.raises(ValueError, match=r"at least two parts of a batch.*k_steps = 2 or more, or"):
        optimizer.minimize(loss_of(model, batch), items=8)


def test_a_known_noise_scale_is_found():
    """The gradient of an item is the item itself: mean and covariance are given."""
    torch.manual_seed(0)
    noise = NoiseScale(every=1)
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 4, "avg": True})
    model = fleet.distributed_model(nn.Linear(50, 1, bias=False).double(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fleet.distributed_optimizer(optimizer, strategy, noise_scale=noise)
    mean = nn.functional.normalize(torch.randn(50, dtype=torch.float64), dim=0)
    for _ in range(200):
        for n in (4, 16, 30, 14):
            optimizer.minimize(model(mean + torch.randn(n, 50, dtype=torch.float64) * 2**0.5).mean(), items=n)
    found = noise.estimate()
    assert found.low < 100 < found.high
    assert found.value == pytest.approx(100, rel=0.1)
    assert noise.metrics()["noise_scale"] == found.value
    assert str(noise).startswith(f"noise scale {found.value:,.3g} (")
    assert str(noise).endswith("items, from 200 updates")
    later = noise.estimate(last=100)
    assert later.high - later.low > found.high - found.low
    assert noise.per_layer() == {"weight": found}


@pytest.mark.parametrize("settings", [{"every": 0}, {"every": True}, {"every": 1.5}, {"data_set": -3}])
def test_settings_are_checked(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=rf"NoiseScale's {name} must be a whole number of at least 1, not {value!r}"):
        NoiseScale(**settings)


def test_an_unknown_layer_is_named():
    with pytest.raises(ValueError, match="no layer is called 'hed'; measured so far: nothing"):
        NoiseScale(every=1).moments(layer="hed")
