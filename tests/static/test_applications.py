"""Applications through the static door: batches of their loaders are feeds, and everything in them has a name."""

import numpy as np
import pytest
import torch

import fleetx as X
from fleetx import fleet, static
from fleetx.applications import Bert, Bert_base, Resnet50
from fleetx.data import make_digital, make_imagenet

SIZES = {"layers": 2, "width": 16, "heads": 2, "vocab_size": 64, "max_positions": 32, "dropout": 0.0}


def tiny_bert():
    torch.manual_seed(0)
    return Bert_base(**SIZES, attention_dropout=0.0)


def tiny_resnet():
    torch.manual_seed(0)
    return Resnet50(classes=4, depths=(1, 1, 1, 1), width=4, image_size=32)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


@pytest.fixture
def text(tmp_path):
    data, vocab = make_digital(tmp_path / "text", samples=24, vocab=64, seq_len=32)
    return lambda model: model.load_digital_dataset_from_file(data, vocab, 8, 32)


@pytest.fixture
def images(tmp_path):
    path = make_imagenet(tmp_path / "images", images=24)
    return lambda model: model.load_imagenet_from_file(path, 8, num_workers=0)


@pytest.mark.parametrize("kind", ["bert", "resnet"])
def test_the_weights_are_those_of_step(kind, request):
    make, load = (tiny_bert, "text") if kind == "bert" else (tiny_resnet, "images")
    load, exe = request.getfixturevalue(load), static.Executor()
    main = static.Program(make(), sgd, compile=False)
    for batch in load(main.model):
        exe.run(main, batch)
    reference = make()
    step = X.Step(reference, sgd(reference.parameters()), items=reference.items)
    for batch in load(reference):
        step(batch)
    for ours, theirs in zip(main.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_bert_is_fetched_by_the_names_of_its_parts(text):
    main, exe = static.Program(tiny_bert(), sgd, compile=False), static.Executor()
    batch = next(iter(text(main.model)))
    names = ["loss", "mlm", "nsp", "bert.encoder.layer.1", "bert.pooler", "cls.predictions.decoder.weight@GRAD"]
    loss, mlm, nsp, layer, _, gradient = exe.run(main, batch, names)
    assert loss == pytest.approx(mlm + nsp)
    assert (layer.shape, gradient.shape) == ((8, 32, 16), (64, 16))
    # The tied weight has one gradient under both names.
    (again,) = exe.run(main, batch, ["bert.embeddings.word_embeddings.weight@GRAD"])
    assert again.shape == gradient.shape


def test_a_loss_whose_labels_are_missing_is_an_error_and_moves_nothing(text):
    main, exe = static.Program(tiny_bert(), sgd, compile=False), static.Executor()
    batch = next(iter(text(main.model)))
    before = main.model.bert.pooler.dense.weight.clone()
    with pytest.raises(ValueError, match="did not compute nsp, only mlm, loss. The model did not return that loss"):
        exe.run(main, {name: value for name, value in batch.items() if "next" not in name}, ["nsp"])
    assert torch.equal(main.model.bert.pooler.dense.weight, before)


def test_counts_of_several_losses_are_refused_and_those_of_one_are_taken(text, images):
    exe, bert, resnet = static.Executor(), tiny_bert(), tiny_resnet()
    with pytest.raises(ValueError, match=r"items gave counts for mlm, nsp: .*fleetx.Step"):
        exe.run(static.Program(bert, sgd, items=bert.items, compile=False), next(iter(text(bert))))
    merging = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    main = static.Program(resnet, sgd, merging, items=resnet.items, compile=False)
    for batch in images(resnet):
        exe.run(main, batch)
    assert exe.optimizer(main).micro_batches_held == 1


def test_a_model_of_a_folder_is_started_with_its_own_weights(tmp_path, text):
    model = tiny_bert()
    model.save_folder(tmp_path / "saved")
    main, exe = static.Program(Bert.from_folder(tmp_path / "saved"), compile=False), static.Executor()
    exe.run(static.StartupProgram(main))
    (weight,) = exe.run(main, next(iter(text(model))), ["bert.pooler.dense.weight"])
    np.testing.assert_array_equal(weight, model.bert.pooler.dense.weight.detach().numpy())


def test_a_bert_without_memory_comes_to_life_with_its_tie(text):
    main, exe = static.Program(static.build(Bert_base, **SIZES), sgd, compile=False, seed=3), static.Executor()
    exe.run(static.StartupProgram(main))
    predictions = main.model.cls.predictions
    assert predictions.decoder.weight is main.model.bert.embeddings.word_embeddings.weight
    losses = [exe.run(main, batch, ["loss"])[0] for batch in text(main.model)]
    assert np.isfinite(losses).all()
    assert predictions.decoder.weight is main.model.bert.embeddings.word_embeddings.weight
