"""The sizes of a BERT, and how Hugging Face's `config.json` spells them."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleetx.optim.checks import check_count, check_number

MODEL_TYPE = "bert"
ARCHITECTURE = "BertForPreTraining"


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """The defaults are BERT-base. `intermediate` is four times the width unless it is given.

    `loss_chunk` is how many masked positions have their logits in memory at the same time. `unpad` computes real tokens
    only, which saves the share of padding in time and memory; it waits for the device once in a forward, to learn how
    many there are.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    intermediate: int = 0
    vocab_size: int = 30522
    max_positions: int = 512
    token_types: int = 2
    dropout: float = 0.1
    attention_dropout: float = 0.1
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0
    loss_chunk: int = 1024
    unpad: bool = False

    def __post_init__(self) -> None:
        check_count("intermediate", self.intermediate, at_least=0, usual="0 stands for four times the width")
        if self.intermediate == 0:
            object.__setattr__(self, "intermediate", 4 * self.width)
        for name in ("layers", "width", "heads", "vocab_size", "max_positions", "token_types", "loss_chunk"):
            check_count(name, getattr(self, name), usual=f"BERT-base has {getattr(type(self), name)}")
        for name in ("dropout", "attention_dropout"):
            check_number(name, getattr(self, name), below=1, usual="0.1 is usual, 0 is off")
        check_number("initializer_range", self.initializer_range, usual="0.02 is usual")
        check_number("layer_norm_eps", self.layer_norm_eps, above=0, usual="1e-12 is usual")
        check_count("pad_token_id", self.pad_token_id, at_least=0, usual="0 is usual")
        if self.width % self.heads:
            raise ValueError(
                f"width must be a multiple of heads, got width {self.width} and {self.heads} heads: "
                "BERT has 64 of width per head."
            )
        if self.pad_token_id >= self.vocab_size:
            raise ValueError(
                f"pad_token_id must be a token of the vocabulary, got {self.pad_token_id} with vocab_size "
                f"{self.vocab_size}: 0 is usual."
            )


BERT_BASE = BertConfig()
BERT_LARGE = BertConfig(layers=24, width=1024, heads=16)

_HF_NAMES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "token_types": "type_vocab_size",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "initializer_range": "initializer_range",
    "layer_norm_eps": "layer_norm_eps",
    "pad_token_id": "pad_token_id",
}
# What this implementation has fixed. A file that asks for anything else must not be run as if it had not.
_FIXED: dict[str, Any] = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
    "is_decoder": False,
    "add_cross_attention": False,
}


def overridden(config: BertConfig, overrides: Mapping[str, Any]) -> BertConfig:
    """The config with other values; another width takes its own `intermediate` unless that is given too."""
    known = [field.name for field in dataclasses.fields(config)]
    unknown = [name for name in overrides if name not in known]
    if unknown:
        raise TypeError(f"a BERT has no setting {', '.join(unknown)}. It has: {', '.join(known)}.")
    fresh = {"intermediate": 0} if "width" in overrides else {}
    return dataclasses.replace(config, **{**fresh, **overrides})  # type: ignore[bad-argument-type]


def to_hugging_face(config: BertConfig) -> dict[str, Any]:
    """The contents of `config.json`."""
    sizes = {theirs: getattr(config, ours) for ours, theirs in _HF_NAMES.items()}
    return {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE, **sizes, **_FIXED}


def from_hugging_face(contents: Mapping[str, Any], source: str) -> BertConfig:
    """The sizes in a `config.json`; `source` is named in errors."""
    if contents.get("model_type") != MODEL_TYPE:
        raise ValueError(
            f"{source} must describe a model of type {MODEL_TYPE!r}, but its model_type is "
            f"{contents.get('model_type')!r}. Give the folder of a BERT."
        )
    for name, value in _FIXED.items():
        if contents.get(name, value) != value:
            raise ValueError(
                f"{source} asks for {name} {contents[name]!r}; this BERT has only {value!r}. "
                "Load that model with the library that wrote it."
            )
    given = {ours: contents[theirs] for ours, theirs in _HF_NAMES.items() if contents.get(theirs) is not None}
    try:
        return BertConfig(**{"intermediate": 3072, **given})  # type: ignore[bad-argument-type]  # the value that Hugging Face leaves out as default
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from error
