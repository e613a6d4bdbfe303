"""The body of BERT: embeddings, encoder layers and pooler, with Hugging Face's module names.

Under autocast the residual stream stays in the low precision, so that what is kept at the border of two layers is
half as large as with torch's own autocast, whose LayerNorm gives fp32.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetx.applications.bert_config import BertConfig
from fleetx.applications.bert_packing import Packing
from fleetx.applications.cheap_dropout import CheapDropout
from fleetx.applications.packed_attention import attend
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
        projected = self._projected(hidden).unflatten(-1, (3, self.heads, -1))
        if isinstance(visible, Packing):
            return attend(projected, visible, dropout).flatten(1)
        query, key, value = (part.transpose(1, 2) for part in projected.unbind(2))
        context = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, dropout_p=dropout)
        return context.transpose(1, 2).flatten(2)

    def _projected(self, hidden: Tensor) -> Tensor:
        """Queries, keys and values, one beside the other."""
        parts = (self.query, self.key, self.value)
        if any(_is_special(part, nn.Linear) for part in parts):
            return torch.cat([part(hidden) for part in parts], dim=-1)
        # One product three times as wide is faster than three.
        weight, bias = (torch.cat([getattr(part, name) for part in parts]) for name in ("weight", "bias"))
        return functional.linear(hidden, weight, bias)


def _is_special(part: nn.Module, usual: type[nn.Module]) -> bool:
    """Whether somebody replaced the layer or watches it: then it must be called itself."""
    hooks = part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks
    return type(part) is not usual or any(hooks) or bool(nn.modules.module._has_any_global_hook())


class BertResidual(nn.Module):
    """The end of a half layer: projection, dropout, shortcut, and the norm after the sum (post-LN)."""

    def __init__(self, width_in: int, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(width_in, config.width)
        self.LayerNorm = StreamLayerNorm(config.width, eps=config.layer_norm_eps)
        self.dropout = CheapDropout(config.dropout)

    def forward(self, hidden: Tensor, shortcut: Tensor) -> Tensor:
        """The new residual stream."""
        projected = self.dense(hidden)
        if _is_special(self.dropout, CheapDropout):
            return self.LayerNorm(self.dropout(projected) + shortcut)
        return self.LayerNorm(self.dropout.added_to(shortcut, projected))


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
