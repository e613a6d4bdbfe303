import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fleetx.applications import Bert
from fleetx.applications import bert_files as files
from tests.applications import bert_plain as plain


def saved(folder, **settings):
    model = plain.tiny(**settings)
    model.save_folder(folder)
    return model


def rewrite(folder, change):
    tensors = load_file(folder / files.WEIGHTS)
    change(tensors)
    save_file(tensors, folder / files.WEIGHTS)


def edit_config(folder, **changes):
    path = folder / files.CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def assert_same(one, other):
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_what_is_saved_comes_back(tmp_path):
    model = saved(tmp_path / "new" / "folder", dropout=0.2)
    loaded = Bert.from_folder(tmp_path / "new" / "folder")
    assert loaded.config == model.config
    assert_same(model, loaded)
    assert loaded.cls.predictions.decoder.weight is loaded.bert.embeddings.word_embeddings.weight
    assert Bert.from_folder(str(tmp_path / "new" / "folder"), dropout=0.0).config.dropout == 0.0


def test_the_folder_is_hugging_faces(tmp_path):
    saved(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["BertForPreTraining"]
    assert (config["hidden_size"], config["intermediate_size"], config["hidden_act"]) == (16, 24, "gelu")
    names = load_file(tmp_path / "model.safetensors")
    assert "cls.predictions.bias" in names
    assert not [name for name in names if "decoder" in name]


def test_low_precision_weights_are_saved_as_they_are_and_read_as_fp32(tmp_path):
    model = plain.tiny().bfloat16()
    model.save_folder(tmp_path)
    assert load_file(tmp_path / files.WEIGHTS)["bert.pooler.dense.weight"].dtype == torch.bfloat16
    assert_same(model.float(), Bert.from_folder(tmp_path))


def test_old_files_load(tmp_path):
    """gamma and beta, saved position ids, and the decoder under its own name."""
    model = saved(tmp_path)

    def age(tensors):
        for name in list(tensors):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[old] = tensors.pop(name)
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
        tensors["bert.embeddings.position_ids"] = torch.arange(12)[None]

    rewrite(tmp_path, age)
    assert_same(model, Bert.from_folder(tmp_path))


def shard(folder):
    tensors = load_file(folder / files.WEIGHTS)
    names = {name: f"model-{1 + i % 2}-of-2.safetensors" for i, name in enumerate(tensors)}
    for part in set(names.values()):
        save_file({name: tensors[name] for name in names if names[name] == part}, folder / part)
    (folder / files.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / files.WEIGHTS).unlink()


def test_shards_load(tmp_path):
    model = saved(tmp_path)
    shard(tmp_path)
    assert_same(model, Bert.from_folder(tmp_path))
    model.save_folder(tmp_path)
    assert not (tmp_path / files.INDEX).exists()


def test_a_missing_shard_is_named(tmp_path):
    saved(tmp_path)
    shard(tmp_path)
    (tmp_path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-2-of-2.safetensors is missing"):
        Bert.from_folder(tmp_path)
    (tmp_path / files.INDEX).write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(ValueError, match="not a file of the same folder"):
        Bert.from_folder(tmp_path)
    (tmp_path / files.INDEX).write_text("{}")
    with pytest.raises(ValueError, match="must have a 'weight_map'"):
        Bert.from_folder(tmp_path)


def test_a_failed_write_leaves_the_old_folder_whole(tmp_path, monkeypatch):
    model = saved(tmp_path)

    def fails_half_way(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(files, "save_file", fails_half_way)
    with pytest.raises(OSError, match="disk full"):
        plain.tiny(seed=5).save_folder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert_same(model, Bert.from_folder(tmp_path))


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json is missing: a Hugging Face folder has config.json and"):
        Bert.from_folder(tmp_path)
    saved(tmp_path)
    (tmp_path / files.WEIGHTS).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="it has only pytorch_model.bin, which are not read"):
        Bert.from_folder(tmp_path)


def test_broken_files_are_named(tmp_path):
    saved(tmp_path)
    whole = (tmp_path / files.WEIGHTS).read_bytes()
    (tmp_path / files.WEIGHTS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="model.safetensors is not a whole safetensors file"):
        Bert.from_folder(tmp_path)
    for text, message in (
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "must hold a JSON object, not a list"),
    ):
        (tmp_path / files.CONFIG).write_text(text)
        with pytest.raises(ValueError, match=message):
            Bert.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "roberta"}, "must describe a model of type 'bert', but its model_type is 'roberta'"),
        ({"hidden_act": "relu"}, "asks for hidden_act 'relu'; this BERT has only 'gelu'"),
        ({"position_embedding_type": "relative_key"}, "asks for position_embedding_type 'relative_key'"),
        ({"num_attention_heads": 3}, "config.json: width must be a multiple of heads"),
        ({"num_hidden_layers": 3}, "bert.encoder.layer.2.attention.self.query.weight is missing .near: bert.enc"),
        ({"num_hidden_layers": 1}, "bert.encoder.layer.1.attention.output.LayerNorm.bias is not of this model .near"),
        ({"vocab_size": 51}, r"word_embeddings.weight has the shape \[50, 16\], not \[51, 16\]; cls.predictions.bias"),
    ],
)
def test_other_architectures_and_sizes_are_refused(tmp_path, changes, message):
    saved(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        Bert.from_folder(tmp_path)


def test_a_misspelled_weight_shows_the_nearest_name(tmp_path):
    saved(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"bert.poler.dense.bias": tensors.pop("bert.pooler.dense.bias")}))
    with pytest.raises(ValueError, match=r"bert.pooler.dense.bias is missing \(near: bert.poler.dense.bias\)"):
        Bert.from_folder(tmp_path)


def test_an_untied_decoder_is_refused(tmp_path):
    saved(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"cls.predictions.decoder.weight": torch.zeros(50, 16)}))
    with pytest.raises(ValueError, match="are one tensor in this BERT"):
        Bert.from_folder(tmp_path)


def test_transformers_reads_and_writes_the_same_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = saved(tmp_path / "ours").eval()
    theirs = transformers.BertForPreTraining.from_pretrained(tmp_path / "ours").eval()
    ids = plain.batch()["input_ids"]
    torch.testing.assert_close(theirs(ids).prediction_logits, model(ids)[0], rtol=1e-4, atol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    assert_same(model, Bert.from_folder(tmp_path / "theirs"))
