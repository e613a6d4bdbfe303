"""The applications with made-up samples, for planning and measuring."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from fleetx import applications

APPLICATIONS = ("resnet50", "bert_base", "bert_large")


def application(
    name: str, seq_len: int = 512, image_size: int = 224, **sizes: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model by its name, and two samples of what it is fed; `sizes` make it smaller."""
    if name == "resnet50":
        images = torch.randint(256, (2, 3, image_size, image_size), dtype=torch.uint8)
        return applications.Resnet50(**sizes), {
            "images": images,
            "labels": torch.randint(sizes.get("classes", 1000), (2,)),
        }
    maker = applications.Bert_large if name == "bert_large" else applications.Bert_base
    if "max_positions" in inspect.signature(maker).parameters:
        sizes = {"max_positions": max(512, seq_len), **sizes}
    masked, words = max(1, round(seq_len * 0.15)), sizes.get("vocab_size", 30_000)
    return maker(**sizes), {
        "input_ids": torch.randint(words, (2, seq_len)),
        "token_type_ids": torch.zeros(2, seq_len, dtype=torch.long),
        "attention_mask": torch.ones(2, seq_len, dtype=torch.long),
        "masked_positions": torch.arange(masked).expand(2, -1).contiguous(),
        "masked_labels": torch.randint(words, (2, masked)),
        "next_sentence_labels": torch.zeros(2, dtype=torch.long),
    }
