import json
import math
import pickle
import struct
from collections import Counter, OrderedDict, deque, namedtuple
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fleetx.checkpoint.trees import TensorSet, TensorSource, decode, encode

KEYS = st.one_of(st.text(max_size=6), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    values = torch.arange(math.prod(shape)).reshape(shape).sub(3).to(draw(st.sampled_from(DTYPES)))
    order = draw(st.permutations(range(len(shape))))
    return values.permute(order) if draw(st.booleans()) else values


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=10**5000 - 5, max_value=10**5000),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(max_size=20),
    st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.Size([2, 3]), torch.Size([])]),
    st.floats().map(np.float64),
    st.integers(0, 255).map(np.uint8),
    tensors(),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
        st.dictionaries(st.text(max_size=3), st.integers(), max_size=4).map(Counter),
        st.frozensets(st.integers(), max_size=4),
        st.sets(st.text(max_size=3), max_size=4),
    ),
    max_leaves=12,
)


def there_and_back(value):
    found = TensorSet("own")
    text = json.dumps(encode(value, found), allow_nan=False)
    files = {name: tensor.contiguous().clone() for name, tensor in found.tensors.items()}
    return decode(json.loads(text), TensorSource({"own": files}))


def bits(value):
    return struct.pack(">d", value)


def assert_same(left, right):
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert (left.shape, left.dtype) == (right.shape, right.dtype)
        assert left.contiguous().reshape(-1).view(torch.uint8).equal(right.contiguous().reshape(-1).view(torch.uint8))
        if left.numel() > 1:
            assert left.stride() == right.stride()
    elif isinstance(left, dict):
        assert list(left) == list(right)
        assert [type(key) for key in left] == [type(key) for key in right]
        for one, other in zip(left.values(), right.values(), strict=True):
            assert_same(one, other)
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, float):
        assert bits(left) == bits(right)
    elif isinstance(left, complex):
        assert (bits(left.real), bits(left.imag)) == (bits(right.real), bits(right.imag))
    else:
        assert left == right


@settings(max_examples=200)
@given(TREES)
def test_state_comes_back_exactly(tree):
    assert_same(there_and_back(tree), tree)


@pytest.mark.parametrize("value", [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan])
def test_floats_come_back_bit_for_bit(value):
    assert bits(there_and_back(value)) == bits(value)


def test_the_bits_of_a_nan_survive():
    strange = struct.unpack(">d", bytes.fromhex("fff8dead0000beef"))[0]
    assert bits(there_and_back([strange])[0]).hex() == "fff8dead0000beef"


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_tensors_come_back(dtype):
    value = torch.tensor([1 + 2j, 3 - 4j], dtype=dtype)
    back = there_and_back([value, value.conj(), value.conj().imag, torch._neg_view(value)])
    for found, there in zip(back, [value, value.conj(), value.conj().imag, torch._neg_view(value)], strict=True):
        assert (found.is_conj(), found.is_neg()) == (there.is_conj(), there.is_neg())
        assert_same(found.resolve_conj().resolve_neg(), there.resolve_conj().resolve_neg())


def test_parameters_and_leaves_come_back_as_such():
    weight, frozen = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.arange(3), requires_grad=False)
    leaf = torch.randn(3, requires_grad=True)
    saved = {"weight": weight, "its numbers": weight.detach(), "frozen": frozen, "leaf": leaf, "loss": leaf.sum()}
    back = there_and_back(saved)
    assert {name: type(value) for name, value in back.items()} == {name: type(value) for name, value in saved.items()}
    assert [value.requires_grad for value in back.values()] == [True, False, False, True, False]
    assert all(torch.equal(back[name], value) for name, value in saved.items())
    assert back["weight"].data_ptr() == back["its numbers"].data_ptr()


@pytest.mark.parametrize("dtype", ["float64", "float16", "int32", "uint32", "uint64", "bool", "complex128"])
def test_arrays_come_back(dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    back = there_and_back({"a": array, "b": array[:, ::2], "c": array[0, 0]})
    assert back["a"].dtype == array.dtype
    assert (back["a"] == array).all()
    assert (back["b"] == array[:, ::2]).all()
    assert type(back["c"]) is type(array[0, 0])


def test_a_shared_tensor_is_kept_once_and_stays_shared():
    shared = torch.randn(3, 4)
    found = TensorSet("own")
    tree = encode({"a": shared, "b": [shared, shared.t()], "c": shared.clone()}, found)
    assert list(found.tensors) == ["a", "b/1", "c"]
    back = decode(tree, TensorSource({"own": {name: value.contiguous() for name, value in found.tensors.items()}}))
    assert back["a"] is back["b"][0]
    assert back["a"] is not back["c"]
    assert torch.equal(back["b"][1], shared.t())


def test_names_that_meet_are_told_apart():
    value = {1: torch.tensor(1), "1": torch.tensor(2), "a/b": torch.tensor(3), "a": {"b": torch.tensor(4)}}
    found = TensorSet("own")
    encode(value, found)
    assert len(found.tensors) == 4
    assert_same(there_and_back(value), value)
    assert "__metadata__" not in _names({"__metadata__": torch.ones(1)})


def _names(value):
    found = TensorSet("own")
    encode(value, found)
    return list(found.tensors)


def test_the_order_in_memory_comes_back_where_it_has_no_gaps():
    picture = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert there_and_back(picture).stride() == picture.stride()
    gaps = torch.randn(6, 6)[::2, ::2]
    back = there_and_back(gaps)
    assert back.is_contiguous()
    assert torch.equal(back, gaps)
    expanded = torch.ones(1, 3).expand(4, 3)
    assert torch.equal(there_and_back(expanded), expanded)


Point = namedtuple("Point", "x y")


class Number(int):
    pass


@pytest.mark.parametrize(
    "value",
    [
        object(),
        print,
        lambda: None,
        Point(1, 2),
        Number(3),
        Fraction(1, 3),
        deque([1]),
        np.array(["text"]),
        np.array([object()]),
        np.longdouble(1),
        torch.ones(3).to_sparse(),
        torch.ones(3, device="meta"),
        slice(1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_exact_form_is_refused_with_its_place(value):
    with pytest.raises(TypeError, match="'state/0/deep'"):
        encode({"state": [{"deep": value}]}, TensorSet("own"))


def test_a_value_that_holds_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(TypeError, match="holds itself"):
        encode({"extra": value}, TensorSet("own"))


def test_what_another_version_wrote_is_refused():
    for strange in ({"matrix": []}, {"dict": {}, "list": []}, {}):
        with pytest.raises(ValueError, match="another version"):
            decode([strange], TensorSource({}))


def test_no_pickle_is_read_or_written(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("pickled")

    for name in ("dumps", "loads", "dump", "load"):
        monkeypatch.setattr(pickle, name, refuse)
    there_and_back({"a": [torch.ones(2), (1, 2.0)], "b": np.arange(3)})
