"""Computing real tokens only must change nothing but time and memory."""

import pytest
import torch

from fleetx.applications import Bert_base

SIZES = {"layers": 2, "width": 16, "heads": 2, "vocab_size": 70, "max_positions": 12}


def batch_of(lengths, masked=3):
    n, length = len(lengths), SIZES["max_positions"]
    torch.manual_seed(3)
    return {
        "input_ids": torch.randint(70, (n, length)),
        "token_type_ids": torch.randint(2, (n, length)),
        "attention_mask": (torch.arange(length) < torch.tensor(lengths)[:, None]).long(),
        "masked_positions": torch.tensor([[0, size - 1, -1] for size in lengths])[:, :masked],
        "masked_labels": torch.tensor([[5, 7, -100] for _ in lengths])[:, :masked],
        "next_sentence_labels": torch.randint(2, (n,)),
    }


def losses_and_gradients(batch, *, compiled=False, **settings):
    torch.manual_seed(1)
    model = Bert_base(**SIZES, dropout=0.0, attention_dropout=0.0, **settings).double()
    run = torch.compile(model) if compiled else model
    losses = run(**batch)
    sum(losses.values()).backward()
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(ours, plain, tolerance=1e-14):
    for mine, theirs in zip(ours, plain, strict=True):
        for name in theirs:
            torch.testing.assert_close(mine[name], theirs[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("lengths", [[12, 5, 9], [1, 1], [12, 12], [3]])
def test_without_padding_losses_and_gradients_are_those_of_the_padded_model(lengths):
    batch = batch_of(lengths)
    assert_same(losses_and_gradients(batch, unpad=True), losses_and_gradients(batch))


def test_holes_in_a_sequence_are_left_out_too():
    batch = batch_of([12, 7])
    batch["attention_mask"][:, 3] = 0
    assert_same(losses_and_gradients(batch, unpad=True), losses_and_gradients(batch))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*Function.*should not be instantiated:DeprecationWarning")
def test_a_compiled_model_takes_any_number_of_tokens_with_one_compilation():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    torch.manual_seed(1)
    model = Bert_base(**SIZES, dropout=0.0, attention_dropout=0.0, unpad=True).double()
    run = torch.compile(model)
    graphs = []
    for lengths in ([12, 5, 9], [11, 4, 2], [7, 8, 10]):
        batch = batch_of(lengths)
        model.zero_grad()
        losses = run(**batch)
        sum(losses.values()).backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert_same((losses, grads), losses_and_gradients(batch), tolerance=1e-12)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] == graphs[2]


def test_a_sequence_that_begins_with_padding_is_refused():
    batch = batch_of([12, 7])
    batch["attention_mask"][1, 0] = 0
    with pytest.raises(ValueError, match="begin with a real token"):
        losses_and_gradients(batch, unpad=True)


def test_logits_of_all_positions_are_computed_with_their_padding():
    batch = batch_of([12, 7])
    inputs = {name: batch[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
    torch.manual_seed(1)
    model = Bert_base(**SIZES, unpad=True).eval()
    words, relationship = model(**inputs)
    assert words.shape == (2, 12, 70)
    assert relationship.shape == (2, 2)


def test_a_replaced_or_watched_projection_is_called_itself():
    model = Bert_base(**SIZES, dropout=0.0, attention_dropout=0.0)
    attention = model.bert.encoder.layer[0].attention.self
    seen = []
    attention.key.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    model(torch.randint(70, (2, 12)))
    assert seen == [(2, 12, 16)]


@pytest.mark.parametrize("unpad", [False, True], ids=["padded", "packed"])
def test_a_masked_position_beyond_its_sequence_reads_nobody_elses(unpad):
    batch = batch_of([12, 7])
    batch["masked_positions"][0, 0] = 12
    with pytest.raises(ValueError, match=r"masked_positions must lie within their sequences, and 1 of 6 are not"):
        losses_and_gradients(batch, unpad=unpad)


def test_a_masked_position_in_the_padding_is_an_error_where_no_padding_is_computed():
    batch = batch_of([12, 7])
    batch["masked_positions"][1, 0] = 7
    with pytest.raises(ValueError, match=r"must be real tokens with unpad=True, .* is not 0, and 1 of 6 are not: corr"):
        losses_and_gradients(batch, unpad=True)


@pytest.mark.parametrize("label", [70, 127, 4000])
def test_a_label_that_is_no_word_is_refused(label):
    batch = batch_of([12, 7])
    batch["masked_labels"][0, 0] = label
    with pytest.raises(RuntimeError, match="out of bounds"):
        losses_and_gradients(batch)
