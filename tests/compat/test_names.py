"""Paddle's names in the guide lead to ours."""

import pytest

from fleetx.compat.names import translate, translate_all

LETTERS = {"2": "abc", "3": "abcd", "4": "abcdef", "5": "abc"}
GUIDE = [f"res{stage}{letter}.add.output.5.tmp_0" for stage, letters in LETTERS.items() for letter in letters]


def test_the_sixteen_checkpoints_of_the_guide_are_the_sixteen_blocks():
    from fleetx.applications import Resnet50

    assert translate_all(GUIDE) == list(Resnet50(width=4, classes=2).checkpoints)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("encoder_layer_16_ffn_fc_1.w_0", "bert.encoder.layer.16.output.dense.weight"),
        ("encoder_layer_0_ffn_fc_0.b_0", "bert.encoder.layer.0.intermediate.dense.bias"),
        ("encoder_layer_3_multi_head_att_query_fc.w_0", "bert.encoder.layer.3.attention.self.query.weight"),
        ("encoder_layer_3_post_att_layer_norm_scale", "bert.encoder.layer.3.attention.output.LayerNorm.weight"),
        ("encoder_layer_3_post_ffn_layer_norm_bias", "bert.encoder.layer.3.output.LayerNorm.bias"),
    ],
)
def test_parameters_of_bert(theirs, ours):
    from fleetx.applications import Bert_base

    assert translate(theirs) == ours
    small = Bert_base(layers=17, width=8, heads=2, vocab_size=16, max_positions=8)
    assert ours in dict(small.named_parameters())


def test_gradients_are_translated_with_their_parameters():
    assert translate("encoder_layer_16_ffn_fc_1.w_0@GRAD") == "bert.encoder.layer.16.output.dense.weight@GRAD"
    assert translate("fc.weight@GRAD") == "fc.weight@GRAD"


def test_other_names_stay():
    assert translate("layer1.0") == "layer1.0"
    assert translate("res6a.add.output.5.tmp_0") == "res6a.add.output.5.tmp_0"
