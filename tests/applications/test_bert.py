import copy

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import fleetx as X
from fleetx import data, fleet
from fleetx.applications import Bert, Bert_base, Bert_large, BertConfig
from tests.applications import bert_plain as plain


def names_of_hugging_face(layers):
    """The keys of transformers' BertForPreTraining."""

    def pair(name):
        return [f"{name}.weight", f"{name}.bias"]

    at = "bert.embeddings"
    names = [f"{at}.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")]
    names += pair(f"{at}.LayerNorm")
    for at in (f"bert.encoder.layer.{index}" for index in range(layers)):
        names += [n for part in ("query", "key", "value") for n in pair(f"{at}.attention.self.{part}")]
        names += pair(f"{at}.attention.output.dense") + pair(f"{at}.attention.output.LayerNorm")
        names += pair(f"{at}.intermediate.dense") + pair(f"{at}.output.dense") + pair(f"{at}.output.LayerNorm")
    names += pair("bert.pooler.dense")
    names += ["cls.predictions.bias"]
    names += pair("cls.predictions.transform.dense") + pair("cls.predictions.transform.LayerNorm")
    return names + pair("cls.predictions.decoder") + pair("cls.seq_relationship")


@pytest.mark.parametrize(
    ("make", "layers", "parameters"), [(Bert_base, 12, 110_106_428), (Bert_large, 24, 336_226_108)]
)
def test_names_and_sizes_are_hugging_faces(make, layers, parameters):
    with torch.device("meta"):
        model = make()
    assert list(model.state_dict()) == names_of_hugging_face(layers)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model.checkpoints == [f"bert.encoder.layer.{index}" for index in range(layers)]
    assert all(model.get_submodule(name) for name in model.checkpoints)
    assert model.config.width // model.config.heads == 64


def test_logits_equal_a_plain_forward_in_fp64():
    model, inputs = plain.tiny().double().eval(), plain.batch()
    expected = plain.logits(plain.live_state(model), inputs)
    given = [inputs[name] for name in ("input_ids", "token_type_ids", "attention_mask")]
    for ours, theirs in zip(model(*given), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_without_mask_and_types_all_tokens_are_seen_and_of_the_first_sentence():
    model, inputs = plain.tiny().double().eval(), plain.batch()
    ids = inputs["input_ids"]
    whole = {**inputs, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    expected = plain.logits(plain.live_state(model), whole)
    for ours, theirs in zip(model(ids), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_losses_and_gradients_equal_the_plain_ones_in_fp64():
    model, inputs = plain.tiny(loss_chunk=3).double(), plain.batch()
    twin = copy.deepcopy(model)
    ours, theirs = model(**inputs), plain.losses(plain.live_state(twin), inputs)
    assert list(ours) == ["mlm", "nsp"]
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=1e-12)
    (ours["mlm"] + 2 * ours["nsp"]).backward()
    (theirs["mlm"] + 2 * theirs["nsp"]).backward()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        gradient = other.grad.clone()
        if name == "bert.embeddings.word_embeddings.weight":
            continue  # padding is left out of the lookup's gradient: checked below
        torch.testing.assert_close(one.grad, gradient, rtol=1e-12, atol=1e-12, msg=name)
    words, plain_words = (m.bert.embeddings.word_embeddings.weight.grad for m in (model, twin))
    torch.testing.assert_close(words[1:], plain_words[1:], rtol=1e-12, atol=1e-12)


def test_only_the_losses_whose_labels_are_given():
    model, inputs = plain.tiny().eval(), plain.batch()
    both = model(**inputs)
    only_mlm = model(**{**inputs, "next_sentence_labels": None})
    only_nsp = model(inputs["input_ids"], inputs["token_type_ids"], inputs["attention_mask"], None, None,
                     inputs["next_sentence_labels"])  # fmt: skip
    assert list(only_mlm) == ["mlm"]
    assert list(only_nsp) == ["nsp"]
    assert torch.equal(only_mlm["mlm"], both["mlm"])
    assert torch.equal(only_nsp["nsp"], both["nsp"])


def test_flat_positions_mean_the_same():
    model, inputs = plain.tiny().double().eval(), plain.batch()
    real = inputs["masked_labels"] != -100
    flat = (inputs["masked_positions"] + 12 * torch.arange(7)[:, None])[real]
    ours = model(**{**inputs, "masked_positions": flat, "masked_labels": inputs["masked_labels"][real]})
    torch.testing.assert_close(ours["mlm"], model(**inputs)["mlm"], rtol=1e-12, atol=1e-12)


def test_logits_of_masked_positions_only():
    model, inputs = plain.tiny().double().eval(), plain.batch()
    everywhere, _ = model(inputs["input_ids"])
    picked, _ = model(inputs["input_ids"], masked_positions=inputs["masked_positions"])
    assert picked.shape == (7, 5, 50)
    expected = everywhere[torch.arange(7)[:, None], inputs["masked_positions"].clamp(min=0)]
    torch.testing.assert_close(picked, expected, rtol=1e-12, atol=1e-12)


def test_items_count_masked_words_and_samples():
    model, inputs = plain.tiny(), plain.batch()
    expected = {"mlm": int((inputs["masked_labels"] != -100).sum()), "nsp": 7}
    assert model.items(inputs) == expected
    assert model.items(tuple(inputs[name] for name in model.inputs)) == expected
    assert list(model.items({**inputs, "next_sentence_labels": None})) == ["mlm"]


@pytest.mark.parametrize("masked", [0, 3])
def test_a_batch_without_masked_words_has_no_loss_and_no_nan(masked):
    model, inputs = plain.tiny(), plain.batch()
    nothing = torch.full((7, masked), -1)
    losses = model(**{**inputs, "masked_positions": nothing, "masked_labels": nothing.clamp(max=-100)})
    sum(losses.values()).backward()
    assert losses["mlm"] == 0
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_micro_batches_with_unequal_counts_equal_the_big_batch():
    model = plain.tiny().double()
    twin = copy.deepcopy(model)
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 4})
    step = X.Step(model, torch.optim.SGD(model.parameters(), lr=0.5), strategy=strategy, items=model.items)
    sgd = torch.optim.SGD(twin.parameters(), lr=0.5)
    for seed in (1, 2, 3):
        inputs = plain.batch(n=11, seed=seed)
        out = step(inputs)
        losses = twin(**inputs)
        sgd.zero_grad()
        sum(losses.values()).backward()
        sgd.step()
        for name, loss in losses.items():
            assert out.losses[name].item() == pytest.approx(loss.item(), rel=1e-12)
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.middle
@pytest.mark.parametrize("amp", [{"dtype": "bfloat16"}, {"use_pure_bf16": True}], ids=["autocast", "pure"])
def test_a_small_one_learns_in_low_precision_with_dropout(amp):
    torch.manual_seed(0)
    model, inputs = Bert_base(**{**plain.SIZES, "width": 32}), plain.batch(n=8)
    strategy = fleet.DistributedStrategy(
        amp=True, amp_configs=amp, gradient_merge=True, gradient_merge_configs={"k_steps": 2}
    )
    step = X.Step(model, torch.optim.AdamW(model.parameters(), lr=3e-3), strategy=strategy, items=model.items)
    losses = [step(inputs).loss.item() for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_residual_stream_stays_low_under_autocast(dtype):
    model, inputs = plain.tiny(dropout=0.1), plain.batch()
    seen = []
    for module in (model.bert.embeddings, *model.bert.encoder.layer):
        module.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype):
        losses = model(**inputs)
    assert seen == [dtype] * 3
    assert {loss.dtype for loss in losses.values()} == {torch.float32}
    expected = plain.tiny()(**inputs)
    model.eval()
    with torch.autocast("cpu", dtype):
        losses = model(**inputs)
    torch.testing.assert_close(losses["mlm"], expected["mlm"], rtol=0.02, atol=0.02)
    assert model.bert.embeddings(inputs["input_ids"], None).dtype == torch.float32


def test_dropout_is_on_in_training_only():
    model, ids = plain.tiny(dropout=0.1, attention_dropout=0.5), plain.batch()["input_ids"]
    assert not torch.equal(model(ids)[0], model(ids)[0])
    assert torch.equal(model.eval()(ids)[0], model(ids)[0])


# torch's own tracing of an autograd function makes one, and warns of it.
@pytest.mark.middle
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_whole_step_compiles_without_a_break():
    model, inputs = plain.tiny(loss_chunk=20), plain.batch()
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        losses = torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs)
        expected = twin(**inputs)
    sum(losses.values()).backward()
    sum(expected.values()).backward()
    for name, loss in expected.items():
        torch.testing.assert_close(losses[name], loss)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.02, atol=1e-3)


def test_initial_values_are_berts():
    torch.manual_seed(0)
    model = Bert_base(**{**plain.SIZES, "width": 128})
    assert model.bert.encoder.layer[1].output.dense.weight.std().item() == pytest.approx(0.02, rel=0.05)
    words = model.bert.embeddings.word_embeddings.weight
    assert words[1:].std().item() == pytest.approx(0.02, rel=0.05)
    assert words[0].eq(0).all()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.eq(0).all(), name
        elif "LayerNorm" in name:
            assert parameter.eq(1).all(), name


def test_a_model_built_on_meta_comes_to_life_with_its_tie():
    with torch.device("meta"):
        model = Bert_base(**plain.SIZES)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.reset_parameters()
    torch.manual_seed(3)
    twin = Bert_base(**plain.SIZES)
    torch.manual_seed(3)
    twin.reset_parameters()
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    for (name, ours), theirs in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_flops_are_what_torch_counts():
    # A vocabulary that need not be filled up to a multiple of 64, which is work that does not count.
    model, inputs = Bert_base(**plain.SIZES | {"vocab_size": 64}), plain.batch(n=1)
    # torch counts no FLOPs of its fused attention on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**inputs)
    assert model.flops_per_sample(masked=5) == 3 * counter.get_total_flops()
    with torch.device("meta"):
        large = Bert_large()
    assert large.flops_per_sample() == large.flops_per_sample(512, 80)
    assert large.flops_per_sample() == pytest.approx(1.0e12, rel=0.06)


def test_its_loader_gives_batches_it_can_train_on(tmp_path):
    data_dir, vocab_path = data.make_digital(tmp_path / "text", samples=8, vocab=50, seq_len=12)
    model = plain.tiny()
    loader = model.load_digital_dataset_from_file(
        data_dir=data_dir, vocab_path=vocab_path, max_seq_len=12, batch_size=4, num_workers=0
    )
    batch = next(iter(loader))
    assert tuple(batch) == model.inputs
    losses = model(**batch)
    assert all(loss.isfinite() for loss in losses.values())
    assert model.items(batch)["nsp"] == 4


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"vocab_size": 20}, {}, r"vocab.txt: ids must be below the model's vocab_size of 20.*vocab_size=50"),
        ({"max_positions": 8}, {}, r"max_seq_len must be at most the model's max_positions of 8, got 12. Lower it"),
        ({"vocab_size": 20}, {"vocab_size": 50}, r"vocab_size must be at most the model's vocab_size of 20, got 50"),
        ({"token_types": 1}, {}, r"two sentences per sample, and the model token_types=1: build it with token_types=2"),
    ],
)
def test_text_that_is_too_large_for_the_model_is_refused(tmp_path, sizes, options, message):
    data_dir, vocab_path = data.make_digital(tmp_path / "text", samples=8, vocab=50, seq_len=12)
    model = Bert(BertConfig(**{"layers": 1, "width": 8, "heads": 2, "vocab_size": 50, "max_positions": 16} | sizes))
    with pytest.raises(ValueError, match=message):
        model.load_digital_dataset_from_file(data_dir, vocab_path, 4, 12, **options)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"heads": 5}, ValueError, "width must be a multiple of heads, got width 768 and 5 heads"),
        ({"layers": 0}, ValueError, "layers must be a whole number of at least 1, got 0: BERT-base has 12"),
        ({"dropout": 1.0}, ValueError, "dropout must be a number at least 0 and below 1, got 1.0"),
        ({"hidden": 3}, TypeError, "a BERT has no setting hidden. It has: layers, width"),
        ({"pad_token_id": 40000}, ValueError, "pad_token_id must be a token of the vocabulary, got 40000"),
    ],
)
def test_wrong_settings_say_what_is_right(settings, kind, message):
    with pytest.raises(kind, match=message):
        Bert_base(**settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": torch.zeros(7, 13, dtype=torch.long)}, r"at most 12, not \(7, 13\)"),
        ({"masked_positions": None}, "give masked_positions too"),
        ({"masked_labels": torch.zeros(7, 4, dtype=torch.long)}, r"one shape, not \(7, 4\) and \(7, 5\)"),
    ],
)
def test_wrong_batches_say_what_is_right(changes, message):
    with pytest.raises(ValueError, match=message):
        plain.tiny()(**{**plain.batch(), **changes})


def test_a_mask_that_is_added_is_not_taken_for_one_of_ones_and_zeros():
    inputs = plain.batch()
    added = torch.zeros(inputs["attention_mask"].shape).masked_fill_(inputs["attention_mask"] == 0, -1e9)
    with pytest.raises(TypeError, match=r"1 for real tokens, got torch.float32: .* give mask == 0"):
        plain.tiny()(**{**inputs, "attention_mask": added})


@pytest.mark.parametrize(("labels", "positions"), [(-1, 1), (-5, 0), (3, -1), (3, -2)])
def test_what_is_no_word_or_no_position_is_an_error_and_not_the_first_one(labels, positions):
    inputs = plain.batch()
    changed = {name: inputs[name].clone() for name in ("masked_labels", "masked_positions")}
    changed["masked_labels"][2, 1], changed["masked_positions"][2, 1] = labels, positions
    expected = (ValueError, "must lie within their") if positions < 0 else (RuntimeError, "out of bounds")
    with pytest.raises(expected[0], match=expected[1]):
        plain.tiny()(**{**inputs, **changed})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_shorter_whole_numbers_are_labels_too(dtype):
    inputs = plain.batch()
    shorter = {name: value.to(dtype) for name, value in inputs.items() if "labels" in name}
    assert len(shorter) == 2
    expected, found = plain.tiny()(**inputs), plain.tiny()(**{**inputs, **shorter})
    assert {name: loss.item() for name, loss in found.items()} == {name: loss.item() for name, loss in expected.items()}


@pytest.mark.parametrize("sizes", [plain.SIZES, {**plain.SIZES, "layers": 1, "max_positions": 20}])
def test_logits_equal_those_of_transformers(sizes):
    transformers = pytest.importorskip("transformers")
    from fleetx.applications.bert_config import to_hugging_face

    model = Bert_base(**sizes).eval()
    theirs = transformers.BertForPreTraining(transformers.BertConfig(**to_hugging_face(model.config))).eval()
    for parameter in theirs.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.load_state_dict(theirs.state_dict(), strict=True)
    inputs = {k: v for k, v in plain.batch().items() if k in ("input_ids", "token_type_ids", "attention_mask")}
    expected = theirs(**inputs)
    predictions, relationship = model(**inputs)
    torch.testing.assert_close(predictions, expected.prediction_logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(relationship, expected.seq_relationship_logits, rtol=1e-4, atol=1e-4)
