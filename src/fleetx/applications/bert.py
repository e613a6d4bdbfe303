"""BERT with both pre-training losses; parameters have the names of Hugging Face's `BertForPreTraining`."""

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetx.applications.base import Application, Count
from fleetx.applications.bert_config import BERT_BASE, BERT_LARGE, BertConfig, overridden
from fleetx.applications.bert_layers import BertBody
from fleetx.applications.bert_losses import IGNORED, mean_cross_entropy, projected_cross_entropy
from fleetx.applications.bert_packing import Packing
from fleetx.applications.stream_norm import StreamLayerNorm
from fleetx.optim.checks import check_count


class BertTransform(nn.Module):
    """The layer between the last hidden states and the vocabulary."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.width)
        self.LayerNorm = StreamLayerNorm(config.width, eps=config.layer_norm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        """What the decoder compares with each word."""
        return self.LayerNorm(functional.gelu(self.dense(hidden)))


class BertPredictions(nn.Module):
    """The head that names masked words; `decoder` shares its weight with the word embeddings."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.transform = BertTransform(config)
        self.decoder = nn.Linear(config.width, config.vocab_size)
        self.loss_chunk = config.loss_chunk

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits of each position, or with labels the mean loss over them, computed in chunks."""
        words = self.transform(hidden)
        if labels is None:
            return self.decoder(words)
        return projected_cross_entropy(words, self.decoder.weight, self.bias, labels, self.loss_chunk)


class BertHeads(nn.Module):
    """Both heads: what Hugging Face calls `cls`."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = BertPredictions(config)
        self.seq_relationship = nn.Linear(config.width, 2)


class Bert(Application):
    """A BERT of any size; `Bert_base()` and `Bert_large()` are the usual ones.

    With labels the forward gives `{"mlm": ..., "nsp": ...}`, those whose labels were given: the mean over masked
    positions and over samples. Without labels it gives `(prediction_logits, seq_relationship_logits)`.

    `masked_positions` (n, m) are positions within each sequence, padded with -1, and `masked_labels` their words,
    padded with -100: samples can then be cut into micro-batches. Flat ones, which count through all n · length
    tokens of the batch, are taken too.

    >>> model = Bert_base(layers=2, width=8, heads=2, vocab_size=30, max_positions=16)
    >>> batch = {
    ...     "input_ids": torch.randint(30, (4, 16)),
    ...     "masked_positions": torch.tensor([[1, 5], [2, -1], [3, 4], [7, -1]]),
    ...     "masked_labels": torch.tensor([[9, 8], [7, -100], [6, 5], [4, -100]]),
    ...     "next_sentence_labels": torch.tensor([0, 1, 0, 1]),
    ... }
    >>> list(model(**batch)), model.items(batch)["mlm"].item()
    (['mlm', 'nsp'], 6)
    """

    inputs = (
        "input_ids",
        "token_type_ids",
        "attention_mask",
        "masked_positions",
        "masked_labels",
        "next_sentence_labels",
    )
    losses = ("mlm", "nsp")

    def __init__(self, config: BertConfig = BERT_BASE) -> None:
        super().__init__()
        self.config = config
        self.bert = BertBody(config)
        self.cls = BertHeads(config)
        self.reset_parameters()

    @property
    def host_inputs(self) -> tuple[str, ...]:
        """With `unpad` the mask is read on the host."""
        return ("attention_mask",) if self.config.unpad else ()

    @property
    def checkpoints(self) -> list[str]:
        """The encoder's layers."""
        return [f"bert.encoder.layer.{index}" for index in range(self.config.layers)]

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        masked_positions: Tensor | None = None,
        masked_labels: Tensor | None = None,
        next_sentence_labels: Tensor | None = None,
    ) -> dict[str, Tensor] | tuple[Tensor, Tensor]:
        """The losses whose labels are given, or without labels the logits of both heads."""
        self._check_inputs(input_ids, attention_mask, masked_positions, masked_labels)
        packing = None
        if self.config.unpad and attention_mask is not None and masked_positions is not None:
            from fleetx.applications.bert_unpad import pack

            packing = pack(attention_mask, input_ids.device)
        hidden = self.bert(input_ids, token_type_ids, attention_mask, packing)
        first = hidden[:, 0] if packing is None else hidden.index_select(0, packing.starts[:-1])
        chosen = hidden
        if masked_positions is not None:
            chosen = _picked(hidden, _real(masked_positions, masked_labels), input_ids.shape, packing)
        if masked_labels is None and next_sentence_labels is None:
            return self.cls.predictions(chosen), self._relationship(first)
        losses = {}
        if masked_labels is not None:
            losses["mlm"] = self.cls.predictions(chosen.flatten(0, -2), masked_labels.flatten())
        if next_sentence_labels is not None:
            losses["nsp"] = mean_cross_entropy(self._relationship(first), next_sentence_labels.flatten())
        return losses

    def items(self, batch: Any) -> dict[str, Count]:
        """`mlm` averages over masked positions, `nsp` over samples; counts stay on the batch's device."""
        named = self.named_inputs(batch)
        labels = {"mlm": named.get("masked_labels"), "nsp": named.get("next_sentence_labels")}
        return {name: (given != IGNORED).sum() for name, given in labels.items() if given is not None}

    def flops_per_sample(self, sequence: int | None = None, masked: int | None = None) -> int:
        """Forward and backward for one sequence; by default the longest, with BERT's 5 masked words in 32.

        With width w, intermediate f, vocabulary V, length s and m masked words:
        3 · 2 · (layers · (s · (4w² + 2wf) + 2s²w) + m · (w² + wV) + w² + 2w).
        """
        c = self.config
        sequence = c.max_positions if sequence is None else sequence
        masked = sequence * 5 // 32 if masked is None else masked
        layer = sequence * (4 * c.width**2 + 2 * c.width * c.intermediate) + 2 * sequence**2 * c.width
        heads = masked * (c.width**2 + c.width * c.vocab_size) + c.width**2 + 2 * c.width
        return 3 * 2 * (c.layers * layer + heads)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """BERT's initialisation: normal weights of 0.02, zero biases, unit norms, a zero row for padding."""
        self.tie_weights()
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear) and module is not self.cls.predictions.decoder:
                nn.init.normal_(module.weight, std=self.config.initializer_range)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
        self.bert.embeddings.word_embeddings.weight[self.config.pad_token_id].zero_()
        nn.init.zeros_(self.cls.predictions.bias)

    def tie_weights(self) -> None:
        """Make the decoder share the word embeddings again, after `to_empty` or whatever replaces parameters."""
        predictions = self.cls.predictions
        predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight
        predictions.decoder.bias = predictions.bias

    @classmethod
    def from_folder(cls, folder: str | Path, **overrides: Any) -> Self:
        """A model from a Hugging Face folder (`config.json`, `model.safetensors`), in fp32 on the CPU.

        `overrides` replace what the folder's config says, for example `dropout=0.0`.
        """
        from fleetx.applications import bert_files

        config = overridden(bert_files.read_config(folder), overrides)
        with torch.device("meta"):  # no time is lost on initial values
            model = cls(config)
        model.to_empty(device="cpu")
        model.tie_weights()
        bert_files.read_weights(model, folder)
        return model

    def save_folder(self, folder: str | Path) -> None:
        """Write a Hugging Face folder; each file appears whole or not at all."""
        from fleetx.applications import bert_files

        bert_files.write(self, self.config, folder)

    def load_digital_dataset_from_file(
        self,
        data_dir: str | Path,
        vocab_path: str | Path,
        batch_size: int,
        max_seq_len: int,
        in_tokens: bool = False,
        **options: Any,
    ) -> Any:
        """`fleetx.data.load_digital_dataset_from_file`, refusing text that is too large for this model."""
        from fleetx.data import load_digital_dataset_from_file  # a model is useful without what loaders import

        self._check_text(max_seq_len, options.setdefault("vocab_size", self.config.vocab_size))
        return load_digital_dataset_from_file(data_dir, vocab_path, batch_size, max_seq_len, in_tokens, **options)

    def _check_text(self, max_seq_len: Any, vocab_size: Any) -> None:
        config = self.config
        for name, given, most, setting in (
            ("max_seq_len", max_seq_len, config.max_positions, "max_positions"),
            ("vocab_size", vocab_size, config.vocab_size, "vocab_size"),
        ):
            check_count(name, given, usual=f"the model has {setting}={most}")
            if given > most:
                raise ValueError(
                    f"{name} must be at most the model's {setting} of {most}, got {given}. Lower it, or build the "
                    f"model with {setting}={given}."
                )
        if config.token_types < 2:
            raise ValueError(
                f"the text has two sentences per sample, and the model token_types={config.token_types}: build it with "
                "token_types=2."
            )

    def _relationship(self, first: Tensor) -> Tensor:
        return self.cls.seq_relationship(self.bert.pooler(first))

    def _check_inputs(
        self, input_ids: Tensor, mask: Tensor | None, positions: Tensor | None, labels: Tensor | None
    ) -> None:
        if input_ids.dim() != 2 or input_ids.shape[1] > self.config.max_positions:
            raise ValueError(
                f"input_ids must have the shape (n, length) with a length of at most {self.config.max_positions}, "
                f"not {tuple(input_ids.shape)}. Cut the sequences, or build the model with more max_positions."
            )
        if mask is not None and mask.is_floating_point():
            raise TypeError(
                f"attention_mask must be of bools or whole numbers, 1 for real tokens, got {mask.dtype}: of a mask "
                "that is added to scores, 0 for real tokens, give mask == 0; of ones and zeros give mask.bool()."
            )
        if labels is None:
            return
        if positions is None:
            raise ValueError("masked_labels say which words were masked, not where: give masked_positions too.")
        if labels.shape != positions.shape:
            raise ValueError(
                f"masked_labels and masked_positions must have one shape, not {tuple(labels.shape)} and "
                f"{tuple(positions.shape)}. Pad labels with {IGNORED} and positions with -1."
            )


def _real(positions: Tensor, labels: Tensor | None) -> Tensor:
    """Positions, the first one in place of padding; negative ones are that where nothing is to be predicted."""
    is_padding = positions < 0 if labels is None else (positions < 0) & (labels == IGNORED)
    return positions.masked_fill(is_padding, 0)


def _picked(hidden: Tensor, positions: Tensor, shape: torch.Size, packing: Packing | None) -> Tensor:
    """Hidden states at `positions`. Padding takes the first position, to have fixed shapes and no wait for a count."""
    n, length = shape
    is_flat = positions.dim() == 1
    starts = 0 if is_flat else torch.arange(n, device=hidden.device)[:, None] * length
    is_inside = (positions >= 0) & (positions < (n * length if is_flat else length))
    # A position outside of its sequence must not read another one: it goes beyond all of them, which is an error.
    rows = torch.where(is_inside, positions + starts, n * length)
    _require_inside(rows, n * length, "must lie within their sequences")
    if packing is None:
        return hidden.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, rows.shape)
    places = packing.places[rows.flatten()]
    _require_inside(places, len(packing.rows), "must be real tokens with unpad=True, where attention_mask is not 0")
    return hidden.index_select(0, places).unflatten(0, rows.shape)


def _require_inside(places: Tensor, end: int, rule: str) -> None:
    """Raise where the host may look. A device finds the error when it selects, and compiled code cannot look."""
    if type(places) is not Tensor or places.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if wrong := int((places == end).sum()):
        raise ValueError(
            f"masked_positions {rule}, and {wrong} of {places.numel()} are not: correct them, or pad with position -1 "
            f"and label {IGNORED}."
        )


def Bert_base(**overrides: Any) -> Bert:  # noqa: N802, the guide's name
    """BERT-base: 12 layers of width 768, 110 million parameters. Any setting of `BertConfig` can be replaced."""
    return Bert(overridden(BERT_BASE, overrides))


def Bert_large(**overrides: Any) -> Bert:  # noqa: N802, the guide's name
    """BERT-large: 24 layers of width 1024, 336 million parameters. Any setting of `BertConfig` can be replaced."""
    return Bert(overridden(BERT_LARGE, overrides))
