"""The scope: parameters and buffers of the program by Paddle's names and by ours."""

import numpy as np
import pytest
import torch

from fleetx.compat import fleet_lightning, fluid
from fleetx.compat.variables import ScopeVariable

BERT = {"layers": 2, "width": 8, "heads": 2, "vocab_size": 32, "max_positions": 16, "dropout": 0.0}


@pytest.fixture
def model():
    made = fleet_lightning.applications.Bert_large(**BERT)
    fluid.optimizer.Adam(learning_rate=0.01).minimize(made.loss)
    fluid.default_main_program().compile = False
    return made


@pytest.fixture
def exe(model):
    executor = fluid.Executor(fluid.CPUPlace())
    executor.run(fluid.default_startup_program())
    return executor


def test_a_weight_is_read_as_the_guide_reads_it(model, exe):
    array = fluid.global_scope().var("encoder_layer_1_ffn_fc_1.w_0").get_tensor().__array__()
    assert isinstance(array, np.ndarray)
    np.testing.assert_array_equal(array, model.bert.encoder.layer[1].output.dense.weight.detach().numpy())
    assert array.shape == (8, 32)  # (out, in), as in torch


def test_what_was_read_stays_while_training_goes_on(model, exe):
    scope = fluid.global_scope()
    variable = scope.var("encoder_layer_1_ffn_fc_1.w_0")
    before = variable.get_tensor().__array__()
    copied = before.copy()
    feed = {
        "input_ids": np.arange(32).reshape(2, 16),
        "masked_positions": np.array([[1], [2]]),
        "masked_labels": np.array([[3], [4]]),
        "next_sentence_labels": np.array([0, 1]),
    }
    exe.run(fluid.default_main_program(), feed=feed, fetch_list=[model.loss.name])
    np.testing.assert_array_equal(before, copied)
    after = np.asarray(variable.get_tensor())
    assert not np.array_equal(before, after)
    np.testing.assert_array_equal(after, scope.var("bert.encoder.layer.1.output.dense.weight").get_tensor())


def test_arrays_of_other_kinds(exe):
    tensor = fluid.global_scope().find_var("encoder_layer_0_ffn_fc_0.b_0").get_tensor()
    assert np.asarray(tensor, dtype=np.float64).dtype == np.float64
    assert np.array(tensor, copy=True).shape == (32,)
    with pytest.raises(ValueError, match="leave out copy=False"):
        np.array(tensor, copy=False)
    low = ScopeVariable("low", torch.ones(2, dtype=torch.bfloat16)).get_tensor()
    assert low.__array__().dtype == np.float32


def test_tied_parameters_and_buffers_have_all_their_names(exe):
    scope = fluid.global_scope()
    words, decoder = scope.var("bert.embeddings.word_embeddings.weight"), scope.var("cls.predictions.decoder.weight")
    np.testing.assert_array_equal(words.get_tensor(), decoder.get_tensor())


def test_before_the_startup_program_there_is_no_value(model):
    variable = fluid.global_scope().var("encoder_layer_1_ffn_fc_1.w_0")
    with pytest.raises(RuntimeError, match=r"'encoder_layer_1_ffn_fc_1.w_0' has no value yet: run .*startup_program"):
        variable.get_tensor()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "encoder_layer_16_ffn_fc_1.w_0",
            r"'encoder_layer_16_ffn_fc_1.w_0' \('bert.encoder.layer.16.output.dense.weight' here\); near among its "
            r"\d+ names: bert.encoder.layer.\d.output.dense.weight",
        ),
        ("bert.pooler.dens.weight", r"'bert.pooler.dens.weight'; near .*: bert.pooler.dense.weight, "),
        ("zzz", r"no parameter or buffer 'zzz'; near among its \d+ names: .*Fetch anything else with fetch_list"),
    ],
)
def test_unknown_names_are_refused_with_near_ones(exe, name, message):
    with pytest.raises(ValueError, match=message):
        fluid.global_scope().var(name)


def test_a_scope_without_a_program():
    with pytest.raises(ValueError, match=r"program is empty.*minimize\(model.loss\)"):
        fluid.global_scope().var("x")
