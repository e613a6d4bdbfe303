"""What is planned and measured: models, batches, budgets."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from benchmarks.planning.unet import UNet
from fleetx.planner.samples import application
from fleetx.slicing import Batch

GIB = 2**30
KIB = 2**10


class Trained(NamedTuple):
    """A model and how it is trained."""

    model: nn.Module
    sample: Batch
    loss_fn: Callable[[Any, Any], Any] | None = None


@dataclass(frozen=True)
class Case:
    """A model with a global batch, and the budgets to plan it for; None: all that the device has."""

    name: str
    make: Callable[[], Trained]
    global_batch: int
    budgets: Sequence[int | None]
    one_forward: bool = False
    needs: str | None = None  # a library
    beside: str | None = None  # the case whose plan for all memory each budget is compared with, in the same run

    @property
    def is_possible(self) -> bool:
        """Whether the library that it comes from is installed."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None


def _application(name: str, *arguments: int, **sizes: Any) -> Callable[[], Trained]:
    return lambda: Trained(*application(name, *arguments, **sizes))


def _resnet50() -> Trained:
    model, sample = application("resnet50")
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    return Trained(model, sample)


def _unet(width: int, depth: int, pixels: int) -> Callable[[], Trained]:
    def make() -> Trained:
        sample = (torch.randn(2, 3, pixels, pixels), torch.rand(2, 1, pixels, pixels).round())
        return Trained(UNet(width, depth), sample, functional.binary_cross_entropy_with_logits)

    return make


def _vit() -> Trained:
    import timm  # pyrefly: ignore[missing-import]

    model = timm.create_model("vit_large_patch16_224", num_classes=1000)
    return Trained(model, (torch.randn(2, 3, 224, 224), torch.randint(1000, (2,))), functional.cross_entropy)


def _gpt() -> Trained:
    from transformers import GPT2Config, GPT2LMHeadModel  # pyrefly: ignore[missing-import]

    config = GPT2Config(n_layer=24, n_embd=1024, n_head=16, use_cache=False)
    ids = torch.randint(config.vocab_size, (2, 1024))
    return Trained(GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids})


CASES = (
    Case("bert_base", _application("bert_base"), 512, (8 * GIB, 16 * GIB, 32 * GIB)),
    # None first: the plan that the budgets are compared with.
    Case("bert_large", _application("bert_large"), 1024, (None, 16 * GIB, 32 * GIB, 64 * GIB), beside="bert_large"),
    Case(
        "bert_large, one forward",
        _application("bert_large"),
        1024,
        (32 * GIB,),
        one_forward=True,
        beside="bert_large",
    ),
    Case("resnet50", _resnet50, 1024, (8 * GIB, 16 * GIB, 32 * GIB)),
    Case("unet", _unet(64, 4, 256), 128, (8 * GIB, 16 * GIB, 32 * GIB)),
    Case("vit", _vit, 1024, (12 * GIB, 24 * GIB, 48 * GIB), needs="timm"),
    Case("gpt", _gpt, 256, (16 * GIB, 32 * GIB, 64 * GIB), needs="transformers"),
)
_SMALL = {"layers": 4, "width": 32, "heads": 2, "vocab_size": 100, "max_positions": 16}
TINY_CASES = (
    Case("bert_base", _application("bert_base", 16, **_SMALL), 32, (1300 * KIB, 1600 * KIB, 2000 * KIB)),
    Case("unet", _unet(4, 2, 16), 32, (700 * KIB, 1000 * KIB, 1600 * KIB)),
)
