"""The body of BERT: embeddings, encoder layers and pooler, with Hugging Face's module names.

Under autocast the residual stream stays in the low precision, so that what is kept at the border of two layers is
half as large as with torch's own autocast, whose LayerNorm gives fp32.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetx.applications import bias_gradients, residual_norm
from fleetx.applications.bert_config import BertConfig
from fleetx.applications.bert_packing import Packing
from fleetx.applications.cheap_dropout import CheapDropout
from fleetx.applications.packed_attention import attend
from fleetx.applications.standing_in import is_usual, may_stand_in_for
from fleetx.applications.stream_norm import StreamLayerNorm

Visible = Tensor | Packing | None
"""What a position may look at: a mask over padded sequences, its own packed sequence, or everything."""


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which a matrix product of this tensor would run here."""
    device = tensor.device.type
    if tensor.dtype == torch.float32 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return tensor.dtype


class BertEmbeddings(nn.Module):
    """Words, their positions and their sentences, added up and normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.width, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_positions, config.width)
        self.token_type_embeddings = nn.Embedding(config.token_types, config.width)
        self.LayerNorm = StreamLayerNorm(config.width, eps=config.layer_norm_eps)
        self.dropout = CheapDropout(config.dropout)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None, packing: Packing | None = None) -> Tensor:
        """The first hidden states; this is where the residual stream gets its dtype."""
        if packing is None:
            positions = self.position_embeddings.weight[: input_ids.shape[1]]
        else:
            positions = self.position_embeddings(packing.rows % input_ids.shape[1])
            input_ids = input_ids.flatten()[packing.rows]
            token_type_ids = None if token_type_ids is None else token_type_ids.flatten()[packing.rows]
        words = self.word_embeddings(input_ids)
        first_type = self.token_type_embeddings.weight[0]
        types = first_type if token_type_ids is None else self.token_type_embeddings(token_type_ids)
        hidden = self.LayerNorm(words + types + positions)
        return self.dropout(hidden.to(compute_dtype(hidden)))


class BertSelfAttention(nn.Module):
    """Scaled dot-product attention of several heads."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.attention_dropout
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)

    def forward(self, hidden: Tensor, visible: Visible) -> Tensor:
        """What each position gathers from those it may look at."""
        dropout = self.dropout if self.training else 0.0
        if isinstance(visible, Packing):
            projected = self._projected(hidden).unflatten(-1, (3, self.heads, -1))
            return attend(projected, visible, dropout).flatten(1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self._parts(hidden))
        context = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, dropout_p=dropout)
        return context.transpose(1, 2).flatten(2)

    @property
    def _layers(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.query, self.key, self.value

    def _parts(self, hidden: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values."""
        if bias_gradients.can_take(hidden) and may_stand_in_for(*((layer, nn.Linear) for layer in self._layers)):
            weight, bias = self._joined()
            return bias_gradients.parts_with_bias(functional.linear(hidden, weight, bias.detach()), bias)
        return self._projected(hidden).chunk(3, -1)

    def _projected(self, hidden: Tensor) -> Tensor:
        """Queries, keys and values, one beside the other."""
        if not all(is_usual(layer, nn.Linear) for layer in self._layers):
            return torch.cat([layer(hidden) for layer in self._layers], dim=-1)
        # One product three times as wide is faster than three.
        return functional.linear(hidden, *self._joined())

    def _joined(self) -> tuple[Tensor, Tensor]:
        """Weights and biases, one below the other."""
        return torch.cat([layer.weight for layer in self._layers]), torch.cat([layer.bias for layer in self._layers])


class BertResidual(nn.Module):
    """The end of a half layer: projection, dropout, shortcut, and the norm after the sum (post-LN)."""

    def __init__(self, width_in: int, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(width_in, config.width)
        self.LayerNorm = StreamLayerNorm(config.width, eps=config.layer_norm_eps)
        self.dropout = CheapDropout(config.dropout)

    def forward(self, hidden: Tensor, shortcut: Tensor) -> Tensor:
        """The new residual stream."""
        if residual_norm.can_take(shortcut) and self._is_one_pass(hidden, shortcut):
            projected = functional.linear(hidden, self.dense.weight)
            return residual_norm.residual_norm(
                projected, self.dense.bias, shortcut, self.LayerNorm, self.dropout.present_rate
            )
        return self.LayerNorm(self.dropout(self.dense(hidden)) + shortcut)

    def _is_one_pass(self, hidden: Tensor, shortcut: Tensor) -> bool:
        parts = (self.dense, nn.Linear), (self.LayerNorm, StreamLayerNorm), (self.dropout, CheapDropout)
        if not may_stand_in_for(*parts):
            return False
        weight, norm = self.dense.weight, self.LayerNorm.weight
        fits = (*hidden.shape[:-1], len(weight)) == shortcut.shape and norm.shape == shortcut.shape[-1:]
        return fits and self.dropout.present_rate < 1.0 and compute_dtype(weight) == shortcut.dtype


class BertAttention(nn.Module):
    """The first half of a layer."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = BertSelfAttention(config)
        self.output = BertResidual(config.width, config)

    def forward(self, hidden: Tensor, visible: Visible) -> Tensor:
        """Attention and its shortcut."""
        return self.output(self.self(hidden, visible), hidden)


class BertIntermediate(nn.Module):
    """Widening and the nonlinearity."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.intermediate)

    def forward(self, hidden: Tensor) -> Tensor:
        """The wide hidden states."""
        if bias_gradients.can_take(hidden) and may_stand_in_for((self.dense, nn.Linear)):
            return bias_gradients.biased_gelu(functional.linear(hidden, self.dense.weight), self.dense.bias)
        return functional.gelu(self.dense(hidden))


class BertLayer(nn.Module):
    """Attention, then the feed-forward half."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertResidual(config.intermediate, config)

    def forward(self, hidden: Tensor, visible: Visible) -> Tensor:
        """The next hidden states, in the dtype of those given."""
        hidden = self.attention(hidden, visible)
        return self.output(self.intermediate(hidden), hidden)


class BertEncoder(nn.Module):
    """The layers, one after the other."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.layers))

    def forward(self, hidden: Tensor, visible: Visible) -> Tensor:
        """The last hidden states."""
        for layer in self.layer:
            hidden = layer(hidden, visible)
        return hidden


class BertPooler(nn.Module):
    """One vector per sample, from its first token."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.width)

    def forward(self, first: Tensor) -> Tensor:
        """The pooled vectors."""
        return torch.tanh(self.dense(first))


class BertBody(nn.Module):
    """Everything below the heads: what Hugging Face calls `bert`."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None,
        attention_mask: Tensor | None,
        packing: Packing | None = None,
    ) -> Tensor:
        """The last hidden states; `attention_mask` is 1 (or True) for real tokens and 0 for padding.

        With a `packing` they are those of real tokens only, (tokens, width).
        """
        hidden = self.embeddings(input_ids, token_type_ids, packing)
        if packing is not None or attention_mask is None:  # without padding no mask at all is the fastest
            return self.encoder(hidden, packing)
        # One row per sample, seen by all its heads and positions; to be added to scores, as all layers would make it.
        hidden_from = torch.zeros_like(attention_mask, dtype=hidden.dtype).masked_fill_(attention_mask == 0, -math.inf)
        return self.encoder(hidden, hidden_from[:, None, None, :])
