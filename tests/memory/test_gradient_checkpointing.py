"""Gradient checkpointing that is switched on after a plan: its blocks would run three times, so it is refused."""

import importlib.util
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fleetx import memory
from fleetx.fleet import DistributedStrategy, distributed_model

calls = []


class Layer(nn.Module):
    """Checkpoints itself as the layers of transformers do: by a flag that others set on it."""

    gradient_checkpointing = False

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def compute(self, x):
        calls.append(self)
        return torch.tanh(self.linear(x))

    def forward(self, x):
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(self.compute, x)
        return self.compute(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(3)))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.layers(x))

    def gradient_checkpointing_enable(self, enable=True):
        for module in self.modules():
            if hasattr(module, "gradient_checkpointing"):
                module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
                module.gradient_checkpointing = enable


REFUSED = r"layers.0.gradient_checkpointing is True.*three times.*gradient_checkpointing_disable\(\), or Training"


def test_it_is_refused_in_the_next_forward_and_the_model_works_once_it_is_off():
    model = Model()
    memory.apply(model, ["layers.*"])
    model(torch.ones(2, 4)).sum().backward()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=REFUSED):
        model(torch.ones(2, 4))
    model.gradient_checkpointing_enable(False)
    calls.clear()
    model(torch.ones(2, 4)).sum().backward()
    assert [calls.count(layer) for layer in model.layers] == [2, 2, 2]


def test_it_is_refused_under_a_strategy():
    model = Model()
    strategy = DistributedStrategy(recompute=True)
    strategy.recompute_configs = {"checkpoints": ["layers.*"]}
    planned = distributed_model(model, strategy)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=REFUSED):
        planned(torch.ones(2, 4))


def test_where_it_does_nothing_it_is_not_refused():
    model = Model()
    memory.apply(model, ["layers.*"])
    model.gradient_checkpointing_enable()
    with torch.no_grad():
        model(torch.ones(2, 4))
    model.eval()
    model(torch.ones(2, 4)).sum().backward()


def test_the_flag_of_timm_is_known():
    model = Model()
    memory.apply(model, ["layers.*"])
    model.layers.grad_checkpointing = True
    with pytest.raises(ValueError, match=r"layers.grad_checkpointing is True.*model.set_grad_checkpointing\(False\)"):
        model(torch.ones(2, 4))


@pytest.mark.middle
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="without transformers: requirements/trainers.txt"
)
def test_it_is_refused_in_models_of_transformers():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2)).train()
    memory.apply(model, ["transformer.h.*"])
    words = torch.randint(20, (2, 6))
    model(words, labels=words).loss.backward()
    model.activation_checkpointing_enable()
    with pytest.raises(ValueError, match=r"gradient_checkpointing is True.*gradient_checkpointing_disable"):
        model(words, labels=words)
    model.activation_checkpointing_disable()
    model(words, labels=words).loss.backward()
