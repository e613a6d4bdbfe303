"""Paddle's variable names in the guide's scripts, and what they are called here."""

import re
from collections.abc import Callable, Sequence

_STAGES = {"2": "layer1", "3": "layer2", "4": "layer3", "5": "layer4"}
_ENDINGS = {"w": "weight", "b": "bias"}
_ENCODER_PARTS = {
    "multi_head_att_query_fc": "attention.self.query",
    "multi_head_att_key_fc": "attention.self.key",
    "multi_head_att_value_fc": "attention.self.value",
    "multi_head_att_output_fc": "attention.output.dense",
    "post_att_layer_norm": "attention.output.LayerNorm",
    "ffn_fc_0": "intermediate.dense",
    "ffn_fc_1": "output.dense",
    "post_ffn_layer_norm": "output.LayerNorm",
}
_LAYER_NORM_ENDINGS = {"scale": "weight", "bias": "bias"}
_GRADIENT = "@GRAD"


def _residual_block(match: re.Match[str]) -> str:
    """res2a … res5c: the output of a block, by stage and letter."""
    return f"{_STAGES[match['stage']]}.{ord(match['block']) - ord('a')}"


def _encoder_parameter(match: re.Match[str]) -> str:
    return f"bert.encoder.layer.{match['layer']}.{_ENCODER_PARTS[match['part']]}.{_ENDINGS[match['kind']]}"


def _encoder_norm(match: re.Match[str]) -> str:
    part = _ENCODER_PARTS[match["part"]]
    return f"bert.encoder.layer.{match['layer']}.{part}.{_LAYER_NORM_ENDINGS[match['kind']]}"


_parts = "|".join(sorted(_ENCODER_PARTS, key=len, reverse=True))
_RULES: list[tuple[re.Pattern[str], Callable[[re.Match[str]], str]]] = [
    (re.compile(r"res(?P<stage>[2-5])(?P<block>[a-z])\.add\.output\.5\.tmp_0"), _residual_block),
    (re.compile(rf"encoder_layer_(?P<layer>\d+)_(?P<part>{_parts})\.(?P<kind>[wb])_0"), _encoder_parameter),
    (re.compile(rf"encoder_layer_(?P<layer>\d+)_(?P<part>{_parts})_(?P<kind>scale|bias)"), _encoder_norm),
]


def translate(name: str) -> str:
    """Our name for a Paddle variable of the guide, or for its gradient; any other is given back as it is."""
    variable = name.removesuffix(_GRADIENT)
    for pattern, ours in _RULES:
        if match := pattern.fullmatch(variable):
            return ours(match) + name[len(variable) :]
    return name


def translate_all(names: Sequence[str]) -> list[str]:
    """Our names, in the same order."""
    return [translate(name) for name in names]
