"""Reads and writes Hugging Face folders of a BERT: `config.json` and `model.safetensors`, or its shards."""

import difflib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fleetx.applications.bert_config import BertConfig, from_hugging_face, to_hugging_face

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Written once: the decoder shares them with the word embeddings and with `cls.predictions.bias`.
_TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
# Constants that older versions of transformers saved.
_NOT_WEIGHTS = {"bert.embeddings.position_ids", "bert.embeddings.token_type_ids"}
_SHOWN = 5


def read_config(folder: str | Path) -> BertConfig:
    """The sizes of the model in `folder`."""
    path = Path(folder) / CONFIG
    return from_hugging_face(_read_json(path), str(path))


def read_weights(model: nn.Module, folder: str | Path) -> None:
    """Fill `model` from the weights in `folder`; every one must be there, with the right shape."""
    tensors = {_modern(name): tensor for name, tensor in _load(Path(folder)).items()}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in _NOT_WEIGHTS}
    for shared, original in _TIED.items():
        _check_tie(tensors, shared, original, folder)
    _check_names(model, tensors, folder)
    model.load_state_dict(tensors, strict=False)


def write(model: nn.Module, config: BertConfig, folder: str | Path) -> None:
    """Write `model` to `folder`, which is made if it is not there."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().contiguous() for name, t in model.state_dict().items() if name not in _TIED}
    text = json.dumps(to_hugging_face(config), indent=2) + "\n"
    _replace(folder / WEIGHTS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    _replace(folder / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))
    # An index of shards written here earlier would describe other weights.
    (folder / INDEX).unlink(missing_ok=True)


def _replace(path: Path, write_to: Callable[[Path], Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_to(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _load(folder: Path) -> dict[str, Tensor]:
    if (folder / WEIGHTS).exists():
        return _load_file(folder / WEIGHTS)
    if not (folder / INDEX).exists():
        others = ", ".join(sorted(path.name for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".h5"}))
        raise FileNotFoundError(
            f"{folder} must hold {WEIGHTS} (or {INDEX} and its shards)"
            + (f"; it has only {others}, which are not read. Save it again as safetensors." if others else ".")
        )
    shards = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict):
        raise ValueError(f"{folder / INDEX} must have a 'weight_map' from names to files. Get the folder again.")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(shards.values())):
        if Path(shard).name != shard:
            raise ValueError(f"{folder / INDEX} names the shard {shard!r}, which is not a file of the same folder.")
        tensors |= _load_file(folder / shard)
    return tensors


def _load_file(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing. Get the folder again.") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}). Get it again.") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: a Hugging Face folder has {CONFIG} and {WEIGHTS}.")
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # the latter where it is nested too deep
        raise ValueError(f"{path} is not JSON ({error}). Get it again.") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(contents).__name__}. Get it again.")
    return contents


def _modern(name: str) -> str:
    """The first BERT files, made from TensorFlow's, call a norm's weight gamma and its bias beta."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _check_tie(tensors: dict[str, Tensor], shared: str, original: str, folder: str | Path) -> None:
    """A file may hold both names of a shared tensor, with one value."""
    tensor = tensors.pop(shared, None)
    if tensor is None:
        return
    if not torch.equal(tensor, tensors.setdefault(original, tensor)):
        raise ValueError(
            f"{shared} and {original} are one tensor in this BERT, but {folder} has different values for them. "
            "Load that model with the library that wrote it."
        )


def _check_names(model: nn.Module, tensors: Mapping[str, Tensor], folder: str | Path) -> None:
    expected = {name: tensor for name, tensor in model.state_dict().items() if name not in _TIED}
    problems = [
        *(f"{name} is missing{_near(name, tensors)}" for name in expected if name not in tensors),
        *(f"{name} is not of this model{_near(name, expected)}" for name in tensors if name not in expected),
        *(
            f"{name} has the shape {list(tensors[name].shape)}, not {list(tensor.shape)}"
            for name, tensor in expected.items()
            if name in tensors and tensors[name].shape != tensor.shape
        ),
    ]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(
            f"the weights in {folder} must be those of a BertForPreTraining of this size: "
            f"{'; '.join(problems[:_SHOWN])}{more}. Check which model was saved there, and any overrides."
        )


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.8)
    return f" (near: {near[0]})" if near else ""
