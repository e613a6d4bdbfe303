"""BERT once more, in bare torch from the names of its parameters: what the tests compare with."""

import math

import torch
from torch import nn

from fleetx.applications import Bert_base

SIZES = {"layers": 2, "width": 16, "heads": 4, "intermediate": 24, "vocab_size": 50, "max_positions": 12}


def tiny(seed=0, **settings):
    """A small BERT whose parameters are all different from their initial values, so that none can be forgotten."""
    torch.manual_seed(seed)
    model = Bert_base(**{**SIZES, "dropout": 0.0, "attention_dropout": 0.0, **settings})
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def batch(n=7, length=12, masked=5, seed=1):
    """Samples with padding at the end and 1 to `masked` masked words each."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.stack([torch.randperm(length, generator=generator)[:masked] for _ in range(n)])
    labels = torch.randint(0, SIZES["vocab_size"], (n, masked), generator=generator)
    padding = torch.arange(masked) > torch.randint(0, masked, (n, 1), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (n, 1), generator=generator)
    return {
        "input_ids": torch.randint(0, SIZES["vocab_size"], (n, length), generator=generator),
        "token_type_ids": torch.randint(0, 2, (n, length), generator=generator),
        "attention_mask": (torch.arange(length) < lengths).long(),
        "masked_positions": positions.masked_fill(padding, -1),
        "masked_labels": labels.masked_fill(padding, -100),
        "next_sentence_labels": torch.randint(0, 2, (n,), generator=generator),
    }


def logits(state, inputs, heads=SIZES["heads"]):
    """Logits of every position and of the relationship, by the formulas."""

    def linear(name, x):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(name, x):
        centred = x - x.mean(-1, keepdim=True)
        spread = (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt()
        return centred / spread * state[f"{name}.weight"] + state[f"{name}.bias"]

    def gelu(x):
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    def by_head(x):
        return torch.stack(x.chunk(heads, dim=-1), dim=1)

    words = state["bert.embeddings.word_embeddings.weight"]
    ids, types = inputs["input_ids"], inputs["token_type_ids"]
    at = "bert.embeddings"
    x = words[ids] + state[f"{at}.position_embeddings.weight"][: ids.shape[1]]
    x = norm(f"{at}.LayerNorm", x + state[f"{at}.token_type_embeddings.weight"][types])
    hidden_from = (inputs["attention_mask"] == 0)[:, None, None, :]
    layers = 1 + max(int(name.split(".")[3]) for name in state if name.startswith("bert.encoder"))
    for at in (f"bert.encoder.layer.{index}" for index in range(layers)):
        query, key, value = (by_head(linear(f"{at}.attention.self.{n}", x)) for n in ("query", "key", "value"))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        seen = scores.masked_fill(hidden_from, -math.inf).softmax(-1) @ value
        x = norm(
            f"{at}.attention.output.LayerNorm",
            x + linear(f"{at}.attention.output.dense", torch.cat(seen.unbind(1), -1)),
        )
        x = norm(
            f"{at}.output.LayerNorm", x + linear(f"{at}.output.dense", gelu(linear(f"{at}.intermediate.dense", x)))
        )
    pooled = torch.tanh(linear("bert.pooler.dense", x[:, 0]))
    at = "cls.predictions.transform"
    predictions = norm(f"{at}.LayerNorm", gelu(linear(f"{at}.dense", x))) @ words.T + state["cls.predictions.bias"]
    return predictions, linear("cls.seq_relationship", pooled)


def losses(state, inputs):
    """Means over real masked words and over samples, by loops."""
    predictions, relationship = logits(state, inputs)
    mlm = [
        -predictions[sample, position].log_softmax(-1)[label]
        for sample, (positions, labels) in enumerate(
            zip(inputs["masked_positions"].tolist(), inputs["masked_labels"].tolist(), strict=True)
        )
        for position, label in zip(positions, labels, strict=True)
        if label != -100
    ]
    nsp = [-row.log_softmax(-1)[label] for row, label in zip(relationship, inputs["next_sentence_labels"], strict=True)]
    return {"mlm": sum(mlm) / len(mlm), "nsp": sum(nsp) / len(nsp)}


def live_state(model: nn.Module):
    """Parameters by name, connected to the graph."""
    return dict(model.named_parameters())
