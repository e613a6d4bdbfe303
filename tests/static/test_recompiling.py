"""Compiled programs: equal to the compiled plain step, and compiled no more often than necessary."""

import numpy as np
import pytest
import torch
from torch import nn

from fleetx import fleet, static
from tests.static.making import Classifier, feeds, merging, program, sgd, tensors

pytestmark = pytest.mark.middle


@pytest.fixture
def told(caplog, monkeypatch):
    """What the user is told, from the beginning."""
    monkeypatch.setattr("fleetx.notices._told", {"eager"})
    return lambda: [record.message for record in caplog.records if record.name == "fleetx"]


def test_compiled_like_the_compiled_plain_step(told):
    """A compilation for each set of fetched outputs, one more for sizes that vary, and none after that."""
    main, exe = program(compile=True), static.Executor()
    counted = []
    for size in (6, 4, 5, 3):
        for feed in feeds(4, size):
            exe.run(main, feed, ["loss"])
        counted.append(exe.compilations(main))
    # The forward, and the update without and with momentum; then the forward for any size.
    assert counted == [2, 4, 4, 4]
    (output,) = exe.run(main, feeds(1)[0], ["net.first"])
    assert output.shape == (6, 10)
    assert exe.compilations(main) == 5
    assert told() == [
        "a feed of another size ran without being compiled (images float64 (4, 6), labels int64 (4,)), as a short last "
        "batch does: it takes less time than compiling again. If such feeds come one after the other, or often, the "
        "program is compiled for any size.",
        "the program has been compiled again (3 graphs so far): the forward, because of images float64 (6, 6) → "
        "float64 (4, 6), labels int64 (6,) → int64 (4,). A size that has changed is free from now on, but for 1.",
        "the program has been compiled again (5 graphs so far): the forward, because the fetch list asks for the "
        "outputs of net.first. Each set of outputs is compiled once: ask for the same set in every run.",
    ]

    reference = fleet.distributed_model(Classifier(), strategy := merging())
    optimizer = fleet.distributed_optimizer(sgd(reference.parameters()), strategy)
    compiled = torch.compile(reference.forward)
    for size in (6, 4, 5, 3):
        for feed in feeds(4, size):
            optimizer.minimize(compiled(**tensors(feed))["loss"])
    for ours, theirs in zip(main.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_shorter_last_batch_compiles_nothing_and_counts_as_it_did(told):
    """However many epochs follow; its loss, gradients and update are those of the plain loop."""
    main, exe = program(compile=True), static.Executor()
    reference = fleet.distributed_model(Classifier(), strategy := merging())
    optimizer = fleet.distributed_optimizer(sgd(reference.parameters()), strategy)
    counted = []
    for _ in range(3):
        for feed in (*feeds(3), *feeds(1, 2)):
            loss, gradient = exe.run(main, feed, ["loss", "net.head.weight@GRAD"])
            expected = reference(**tensors(feed))["loss"]
            np.testing.assert_allclose(loss, expected.detach().numpy(), rtol=1e-12)
            optimizer.minimize(expected)
        assert gradient is not None
        counted.append(exe.compilations(main))
    assert counted == [2, 3, 3]  # in the second epoch the update with momentum
    assert [message[:52] for message in told()] == ["a feed of another size ran without being compiled (i"]
    for ours, theirs in zip(main.model.state_dict().values(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_outputs_of_a_shorter_last_batch_are_fetched():
    main, exe = program(compile=True), static.Executor()
    for feed in (*feeds(2), *feeds(1, 2)):
        (output,) = exe.run(main, feed, ["net.first"])
    assert output.shape == (2, 10)
    assert exe.compilations(main) == 1


def test_alternating_sizes_do_not_compile_for_ever(told):
    main, exe = program(compile=True), static.Executor()
    for size in (6, 4, 5, 1, 6, 3, 1, 7, 2, 9, 1, 8, 11, 4):
        exe.run(main, feeds(1, size)[0], ["loss"])
    # Three forwards: for six, for any size, and for one; and two updates.
    assert exe.compilations(main) == 5
    assert len(told()) == 2


def test_names_of_losses_parameters_and_gradients_compile_nothing(told):
    main, exe = program(compile=True), static.Executor()
    for feed in feeds(8):
        exe.run(main, feed, ["loss"])
    compiled = exe.compilations(main)
    for names in (["loss", "scale"], ["scale@GRAD", "calls"], []):
        for feed in feeds(4):
            exe.run(main, feed, names)
    assert exe.compilations(main) == compiled
    assert told() == []


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="torch compiles nothing anew for frozen weights there")
def test_what_else_changed_is_named(told):
    main, exe = program(compile=True), static.Executor()
    for feed in feeds(8):
        exe.run(main, feed)
    main.model.net.norm.requires_grad_(False)
    exe.run(main, feeds(1)[0])
    assert "because of trainable parameters 8 of 10 → 6 of 10." in told()[-1]


def test_other_programs_do_not_count_and_an_unbound_one_has_none():
    first, second = program(compile=True), program(compile=True)
    exe = static.Executor()
    assert exe.compilations(first) == 0
    exe.run(first, feeds(1)[0])
    exe.run(second, feeds(1)[0])
    assert (exe.compilations(first), exe.compilations(second)) == (1, 1)


def test_a_learning_rate_that_moves_compiles_nothing(told):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=20)

    main, exe = static.Program(Classifier(), sgd, scheduler=schedule), static.Executor()
    for feed in feeds(12):
        exe.run(main, feed)
    assert exe.compilations(main) == 3
    assert told() == []


def lars():
    return fleet.DistributedStrategy(lars=True, lars_configs={"exclude_from_weight_decay": ["bias"]})


def lamb():
    return fleet.DistributedStrategy(lamb=True)


@pytest.mark.parametrize(("strategy", "graphs"), [pytest.param(lars, 3, marks=pytest.mark.full), (lamb, 1)])
def test_layer_wise_optimizers_are_compiled_at_most_twice(strategy, graphs, told):
    """Equal to the eager ones, too: what compiling reorders is far below the tolerance here."""

    def make(parameters):
        return torch.optim.Adam(parameters, lr=0.01) if strategy is lamb else sgd(parameters)

    exe, trained = static.Executor(), []
    for compile in (False, True):
        main = static.Program(Classifier(), make, strategy(), compile=compile)
        for feed in feeds(10):
            exe.run(main, feed)
        trained.append(list(main.model.parameters()))
    assert exe.compilations(main) == graphs
    assert not any("compiled again" in message for message in told())
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.full
def test_more_programs_than_torch_compiles_of_one_function_are_all_compiled():
    exe = static.Executor()
    for _ in range(10):
        main = static.Program(nn.Linear(2, 1), sgd, compute=lambda model, batch: model(batch["x"]).mean())
        exe.run(main, {"x": torch.ones(2, 2)})
        assert exe.compilations(main) == 2


class Broken(nn.Module):
    """Its graph breaks in the middle, inside of a part, and its forward is decorated."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.part = Part()
        self.head = nn.Linear(4, 1)

    @torch.enable_grad()
    def forward(self, x):
        return self.head(self.part(x)).mean()


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.first(x)
        torch._dynamo.graph_break()
        return self.second(hidden.relu())


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.13 is the first that keeps parts of a graph apart")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own, at a graph break
def test_outputs_behind_a_graph_break_are_fetched():
    exe, x = static.Executor(), torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    compiled, eager = static.Program(Broken(), sgd), static.Program(Broken(), sgd, compile=False)
    for _ in range(2):
        for names in ([], ["part.second"], ["head", "part.first"], ["part"]):
            ours, theirs = (exe.run(main, {"x": x}, names) for main in (compiled, eager))
            for one, other in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
