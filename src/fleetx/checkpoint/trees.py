"""State dicts as JSON and tensors, and back, bit for bit. Nothing is pickled: what has no exact form here is refused.

JSON's own values stand for themselves. Everything else is an object with one key, which says what it is:
`{"dict": {…}}`, `{"tuple": […]}`, `{"tensor": {…}}`. A tensor is a reference to a named one in a safetensors file.
"""

import base64
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Path = tuple[str, ...]
_LARGEST = 2**63


class TensorSet:
    """Tensors on their way to a file, by name. One that is met twice (tied weights) is kept once."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def add(self, tensor: Tensor, path: Path) -> dict[str, Any]:
        """Keep a tensor under the name of its path; gives the reference to it.

        Of a tensor with a past, a loss say, the values are kept; whether a leaf requires a gradient is kept too.
        """
        _require_plain(tensor, path)
        reference: dict[str, Any] = {"in": self.group}
        if type(tensor) is nn.Parameter:
            reference["parameter"] = True
        if tensor.requires_grad and tensor.is_leaf:
            reference["requires_grad"] = True
        tensor = tensor.detach()
        # Both are said of the view alone; the numbers lie in memory as the file has them.
        if tensor.is_conj():
            tensor, reference["conj"] = tensor.conj(), True
        if tensor.is_neg():
            tensor, reference["neg"] = torch._neg_view(tensor), True
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
            reference["complex"] = True
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        name = self._names.get(memory) if tensor.numel() else None
        if name is None:
            name = self._names[memory] = self._unused("/".join(path))
            self.tensors[name] = tensor
        reference["name"] = name
        if _has_own_order(tensor):
            reference["stride"] = list(tensor.stride())
        return reference

    def _unused(self, name: str) -> str:
        number, candidate = 1, name
        while candidate in self.tensors or candidate == "__metadata__":
            number += 1
            candidate = f"{name}#{number}"
        return candidate


class TensorSource:
    """Tensors from files, by group and name; one that is referred to twice is handed out as one."""

    def __init__(self, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._groups = groups
        self._given: dict[tuple[Any, ...], Tensor] = {}
        self._ordered: dict[tuple[Any, ...], Tensor] = {}

    def get(self, reference: Mapping[str, Any]) -> Tensor:
        """The tensor of a reference that `TensorSet.add` gave."""
        forms = tuple(bool(reference.get(form)) for form in ("parameter", "requires_grad", "conj", "neg"))
        key = (self._memory_key(reference), *forms)
        if key not in self._given:
            is_parameter, requires_grad, is_conj, is_neg = forms
            tensor = self._in_memory(reference).detach()
            tensor = torch._neg_view(tensor) if is_neg else tensor
            tensor = tensor.conj() if is_conj else tensor
            made = nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
            self._given[key] = made
        return self._given[key]

    def _in_memory(self, reference: Mapping[str, Any]) -> Tensor:
        """The numbers of a reference in their order; all that are said to be the same tensor share them."""
        key = self._memory_key(reference)
        if key not in self._ordered:
            tensor = self._groups[reference["in"]][reference["name"]]
            if (stride := reference.get("stride")) is not None:
                tensor = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)
            self._ordered[key] = torch.view_as_complex(tensor) if reference.get("complex") else tensor
        return self._ordered[key]

    @staticmethod
    def _memory_key(reference: Mapping[str, Any]) -> tuple[Any, ...]:
        stride = reference.get("stride") or ()
        return reference["in"], reference["name"], tuple(stride), reference.get("complex", False)


def encode(value: Any, tensors: TensorSet, path: Path = ()) -> Any:
    """The value as JSON can hold it; its tensors go to `tensors`. Raises TypeError for what has no exact form."""
    try:
        return _encode(value, tensors, path)
    except RecursionError:
        raise TypeError(f"{_called(path)} is nested too deeply, or holds itself. Save plain values.") from None


def encoded_dict(entries: dict[str, Any]) -> Any:
    """A dict of values that are encoded already."""
    return {"dict": entries}


def decode(value: Any, tensors: TensorSource) -> Any:
    """What `encode` was given."""
    if isinstance(value, list):
        return [decode(entry, tensors) for entry in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or (tag := next(iter(value))) not in _DECODERS:
        raise ValueError(
            f"this state was written by another version of FleetX, which has {', '.join(map(repr, value))} in it. "
            "Load it with that version."
        )
    return _DECODERS[tag](value[tag], tensors)


def _encode(value: Any, tensors: TensorSet, path: Path) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        # Long numbers in decimal are slow to read, and Python refuses very long ones.
        return value if -_LARGEST <= value < _LARGEST else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if isinstance(value, Tensor):
        return {"tensor": tensors.add(value, path)}
    if kind in _ENCODERS:
        return _ENCODERS[kind](value, tensors, path)
    if isinstance(value, np.generic):
        return {"number": [_numpy_dtype(value.dtype, path), value.tobytes().hex()]}
    raise TypeError(
        f"a checkpoint holds numbers, text, tensors, and dicts, lists and tuples of them, and {_called(path)} is a "
        f"{kind.__module__}.{kind.__qualname__}. Leave it out, or save it as one of these."
    )


def _encode_all(values: Any, tensors: TensorSet, path: Path) -> list[Any]:
    return [_encode(entry, tensors, (*path, str(number))) for number, entry in enumerate(values)]


def _encode_pairs(values: Mapping[Any, Any], tensors: TensorSet, path: Path) -> list[Any]:
    return [
        [_encode(key, tensors, (*path, "key")), _encode(entry, tensors, (*path, str(key)))]
        for key, entry in values.items()
    ]


def _encode_dict(values: dict[Any, Any], tensors: TensorSet, path: Path) -> Any:
    if all(type(key) is str for key in values):
        return {"dict": {key: _encode(entry, tensors, (*path, key)) for key, entry in values.items()}}
    return {"pairs": _encode_pairs(values, tensors, path)}


def _encode_set(values: Any, tensors: TensorSet, path: Path) -> list[Any]:
    return _encode_all(sorted(values, key=repr), tensors, path)


def _encode_array(value: np.ndarray, tensors: TensorSet, path: Path) -> Any:
    _numpy_dtype(value.dtype, path)
    # A copy has the usual order in memory, and may be written to.
    return {"array": tensors.add(torch.from_numpy(np.array(value, order="C")), path)}


def _numpy_dtype(dtype: np.dtype, path: Path) -> str:
    if dtype.kind not in "biufc" or not dtype.isnative or dtype.itemsize > 8 + 8 * (dtype.kind == "c"):
        raise TypeError(f"{_called(path)} is of numpy's {dtype}, which a checkpoint cannot hold. Convert it.")
    return dtype.name


def _encode_complex(value: complex, _tensors: TensorSet, _path: Path) -> Any:
    return {"complex": struct.pack(">dd", value.real, value.imag).hex()}


_Encoder = Callable[[Any, TensorSet, Path], Any]
_ENCODERS: dict[type, _Encoder] = {
    dict: _encode_dict,
    list: _encode_all,
    tuple: lambda value, tensors, path: {"tuple": _encode_all(value, tensors, path)},
    OrderedDict: lambda value, tensors, path: {"ordered": _encode_pairs(value, tensors, path)},
    Counter: lambda value, tensors, path: {"counter": _encode_pairs(value, tensors, path)},
    set: lambda value, tensors, path: {"set": _encode_set(value, tensors, path)},
    frozenset: lambda value, tensors, path: {"frozenset": _encode_set(value, tensors, path)},
    complex: _encode_complex,
    bytes: lambda value, _tensors, _path: {"bytes": base64.b64encode(value).decode("ascii")},
    torch.Size: lambda value, _tensors, _path: {"size": list(value)},
    torch.dtype: lambda value, _tensors, _path: {"dtype": str(value)},
    torch.device: lambda value, _tensors, _path: {"device": str(value)},
    np.ndarray: _encode_array,
}


def _pairs(value: Any, tensors: TensorSource) -> dict[Any, Any]:
    return {decode(key, tensors): decode(entry, tensors) for key, entry in value}


def _number(value: Any) -> np.generic:
    name, bits = value
    return np.frombuffer(bytes.fromhex(bits), dtype=np.dtype(name))[0]


_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_Decoder = Callable[[Any, TensorSource], Any]
_DECODERS: dict[str, _Decoder] = {
    "dict": lambda value, tensors: {key: decode(entry, tensors) for key, entry in value.items()},
    "pairs": _pairs,
    "tuple": lambda value, tensors: tuple(decode(entry, tensors) for entry in value),
    "ordered": lambda value, tensors: OrderedDict(_pairs(value, tensors)),
    "counter": lambda value, tensors: Counter(_pairs(value, tensors)),
    "set": lambda value, tensors: {decode(entry, tensors) for entry in value},
    "frozenset": lambda value, tensors: frozenset(decode(entry, tensors) for entry in value),
    "int": lambda value, _tensors: int(value, 16),
    "float": lambda value, _tensors: struct.unpack(">d", bytes.fromhex(value))[0],
    "complex": lambda value, _tensors: complex(*struct.unpack(">dd", bytes.fromhex(value))),
    "bytes": lambda value, _tensors: base64.b64decode(value),
    "size": lambda value, _tensors: torch.Size(value),
    "dtype": lambda value, _tensors: _DTYPES[value],
    "device": lambda value, _tensors: torch.device(value),
    "tensor": lambda value, tensors: tensors.get(value),
    "array": lambda value, tensors: tensors.get(value).numpy(),
    "number": lambda value, _tensors: _number(value),
}


def _require_plain(tensor: Tensor, path: Path) -> None:
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        remedy = "Save it through torch.distributed.checkpoint, or gather it first."
        raise TypeError(f"{_called(path)} is a {type(tensor).__name__}, and a checkpoint holds whole tensors. {remedy}")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        form = "quantized" if tensor.is_quantized else "without data (meta)" if tensor.is_meta else str(tensor.layout)
        raise TypeError(f"{_called(path)} is {form}, and a checkpoint holds dense tensors. Convert it first.")


def _has_own_order(tensor: Tensor) -> bool:
    """Whether its memory has no gaps but another order than the usual, as with channels last.

    Sums depend on the order in memory, so such tensors must come back as they were.
    """
    usual, expected, dense = [], 1, True
    for size in reversed(tensor.shape):
        usual.insert(0, expected)
        expected *= max(size, 1)
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            dense = dense and stride == expected
            expected *= size
    return dense and tensor.numel() > 0 and list(tensor.stride()) != usual


def _called(path: Path) -> str:
    return repr("/".join(path)) if path else "the value"
