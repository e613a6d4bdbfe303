import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fleetx import memory
from fleetx.applications import Resnet50
from fleetx.planner.blocks import find_blocks, ways_to_cut
from fleetx.planner.feeding import Feeding
from tests.memory import zoo


def numbered(pattern, count):
    return [pattern.format(i) for i in range(count)]


EXPECTED = {
    "resnet": ["bn1", "layer1.0", "layer1.1", "layer2.0", "layer3.0", "layer4.0"],
    "unet": ["begin", "down.0", "down.1", "down.2", "up.2", "up.1", "up.0"],
    "densenet": numbered("layers.{}", 5),
    "convnext": ["stem", *numbered("blocks.{}", 4)],
    "vit": numbered("blocks.{}", 4),
    "bert": numbered("bert.encoder.layer.{}", 4),
    "bert_unpadded": numbered("bert.encoder.layer.{}", 4),
    "gpt": numbered("blocks.{}", 5),
    "t5": [*numbered("encoder.{}", 3), *numbered("decoder.{}", 3)],
    "lstm": ["first", "second"],
    "mixture_of_experts": numbered("blocks.{}", 3),
    "clip": ["images.blocks.0", "images.blocks.1", "texts.0", "texts.1"],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_blocks_of_many_kinds_of_models_are_found(name):
    example = zoo.MODELS[name]()
    assert find_blocks(Feeding(example.model), example.batch(0)) == EXPECTED[name]


@pytest.mark.parametrize("name", sorted(zoo.MODELS))
def test_a_model_can_be_cut_in_every_way_that_was_found(name):
    example = zoo.MODELS[name]()
    for names in ways_to_cut(Feeding(example.model), example.batch(0)):
        assert names
        applied = memory.apply(example.model, names)
        batch = example.batch(0)
        output = example.model(**batch) if isinstance(batch, dict) else example.model(*batch)
        example.loss(output).backward()
        applied.remove()


@pytest.mark.parametrize("name", ["bert", "bert_unpadded"])
def test_blocks_can_be_cut_in_two(name):
    example = zoo.MODELS[name]()
    whole, finer = ways_to_cut(Feeding(example.model), example.batch(0))
    assert finer == [part for layer in whole for part in (f"{layer}.attention", layer)]


@pytest.mark.parametrize("name", ["lstm", "gpt", "vit", "resnet"])
def test_blocks_without_an_inside_or_with_a_shortcut_around_it_are_not_cut_in_two(name):
    example = zoo.MODELS[name]()
    assert list(ways_to_cut(Feeding(example.model), example.batch(0))) == [EXPECTED[name]]


def test_resnet_50_is_cut_at_its_sixteen_blocks_and_its_stem():
    sample = (torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 5, (2,)))
    found = find_blocks(Feeding(Resnet50(classes=5, width=4)), sample)
    counts = [sum(name.startswith(f"layer{stage}.") for name in found) for stage in (1, 2, 3, 4)]
    assert counts == [3, 4, 6, 3]
    assert found[0] == "bn1"
    assert len(found) == 17


class Stage(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.blocks = nn.ModuleList(zoo.Block(8) for _ in range(depth))

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def test_blocks_in_stages_are_found_rather_than_the_stages():
    model = nn.Sequential(Stage(2), Stage(1), Stage(3))
    found = find_blocks(Feeding(model), torch.randn(2, 5, 8))
    assert found == ["0.blocks.0", "0.blocks.1", "1.blocks.0", "2.blocks.0", "2.blocks.1", "2.blocks.2"]


class DoublyStacked(nn.Module):
    """Two stacks of different classes, one after the other, deep inside containers."""

    def __init__(self):
        super().__init__()
        convolutions = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3)]
        self.inner = nn.ModuleDict({"images": nn.Sequential(nn.Conv2d(3, 4, 1), *convolutions)})
        self.wrapped = nn.ModuleList([nn.ModuleList(zoo.Block(4) for _ in range(4))])

    def forward(self, images):
        hidden = nn.functional.avg_pool2d(self.inner["images"](images), 4).flatten(2).transpose(1, 2)
        for block in self.wrapped[0]:
            hidden = block(hidden)
        return hidden


def test_several_stacks_in_nested_containers_are_found_in_the_order_in_which_they_run():
    found = find_blocks(Feeding(DoublyStacked()), torch.randn(2, 3, 16, 16))
    assert found == [*numbered("inner.images.{}", 4)[1:], *numbered("wrapped.0.{}", 4)]


def test_a_plain_stack_of_linear_layers_is_cut_evenly_and_never_before_an_activation():
    layers = [layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.ReLU(inplace=True))]
    model = nn.Sequential(*layers)
    found = find_blocks(Feeding(model), torch.randn(4, 16))
    assert 4 <= len(found) <= 8
    assert all(isinstance(model[int(name)], nn.ReLU) for name in found)


def test_a_stack_of_lstms_is_cut_at_each():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.LSTM(6, 6, batch_first=True) for _ in range(4))

        def forward(self, hidden):
            for layer in self.layers:
                hidden, _ = layer(hidden)
            return hidden

    assert find_blocks(Feeding(Stack()), torch.randn(2, 5, 6)) == numbered("layers.{}", 4)


def test_a_model_too_small_to_cut_has_no_cuts():
    assert find_blocks(Feeding(nn.Linear(3, 3)), torch.randn(2, 3)) == []


def test_looking_for_blocks_leaves_no_trace():
    example = zoo.MODELS["mixture_of_experts"]()
    model = example.model
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    balance = [block.balance for block in model.blocks]
    find_blocks(Feeding(model), example.batch(0))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert all(block.balance is then for block, then in zip(model.blocks, balance, strict=True))


def test_a_model_with_a_plan_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    memory.apply(model, ["0"])
    with pytest.raises(ValueError, match=r"has a plan already: take it off first, with fleetx.memory.applied_to"):
        find_blocks(Feeding(model), torch.randn(2, 2))


@pytest.mark.parametrize(
    "wrap", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]
)
def test_what_computes_a_weight_is_no_block(wrap):
    blocks = (nn.Sequential(wrap(nn.Linear(8, 16)), nn.GELU(), wrap(nn.Linear(16, 8))) for _ in range(4))
    assert find_blocks(Feeding(nn.Sequential(*blocks)), torch.randn(4, 8)) == ["0", "1", "2", "3"]


class Shuffles(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6))

    def forward(self, x):
        for place in torch.randperm(6).tolist():
            x = self.blocks[place](x)
        return x


def test_blocks_that_change_places_are_refused():
    with pytest.raises(ValueError, match=r"'blocks\.\d' and 'blocks\.\d' changed places"):
        find_blocks(Feeding(Shuffles()), torch.randn(4, 4))
