from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleetx import slicing


class Pair(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor


class Box(NamedTuple):
    left: int
    top: int
    right: int
    bottom: int


@dataclass
class Sample:
    ids: torch.Tensor
    scale: float


@given(size=st.integers(1, 50), parts=st.integers(1, 60))
def test_slices_cover_the_batch_in_order_and_differ_by_at_most_one(size, parts):
    batch = {"x": torch.arange(size), "nested": [(torch.arange(size) * 2, None, 3.5), torch.tensor(7)]}
    pieces = slicing.split(batch, parts)
    lengths = [len(piece["x"]) for piece in pieces]
    assert len(pieces) == min(parts, size)
    assert max(lengths) - min(lengths) <= 1
    assert torch.cat([piece["x"] for piece in pieces]).tolist() == list(range(size))
    assert torch.cat([piece["nested"][0][0] for piece in pieces]).tolist() == list(range(0, 2 * size, 2))
    assert all(piece["nested"][0][1:] == (None, 3.5) and piece["nested"][1] == 7 for piece in pieces)


def test_slices_are_views():
    batch = torch.zeros(6, 2)
    slicing.split(batch, 3)[1].fill_(1)
    assert batch.sum(dim=1).tolist() == [0, 0, 2, 2, 0, 0]


def test_containers_keep_their_class():
    pair = slicing.split(Pair(torch.zeros(4, 1), torch.arange(4)), 2)[1]
    assert isinstance(pair, Pair)
    assert pair.labels.tolist() == [2, 3]
    ordered = slicing.split(OrderedDict(a=torch.arange(4)), 2)[0]
    assert isinstance(ordered, OrderedDict)
    sample = slicing.split(Sample(torch.arange(4), 0.5), 4)[3]
    assert (sample.ids.tolist(), sample.scale) == ([3], 0.5)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ((torch.zeros(4), torch.zeros(3)), ValueError, r"share their first dimension.*batch\[0\]: 4, batch\[1\]: 3"),
        ({"x": torch.zeros(0, 3)}, ValueError, "empty"),
        ({}, ValueError, "at least one tensor"),
        ([None, 3], ValueError, "at least one tensor"),
        (torch.tensor(3.0), ValueError, "at least one tensor"),
        ((torch.zeros(4), ["a"] * 4), TypeError, r"batch\[1\]\[0\] is a str"),
        ((np.zeros(4),), TypeError, r"batch\[0\] is a ndarray.*torch.as_tensor"),
    ],
)
def test_what_cannot_be_cut_is_named(batch, error, message):
    with pytest.raises(error, match=message):
        slicing.split(batch, 2)


@dataclass
class Weighed:
    x: torch.Tensor
    weight: torch.Tensor = field(init=False, default=None)

    def __post_init__(self):
        self.weight = torch.ones(len(self.x))


@pytest.mark.parametrize(
    ("rows", "path"),
    [
        ([3, 1, 2, 4], r"batch\[1\] is a list of 4 entries"),
        ((0.5, 1.0, 1.0, 0.5), r"batch\[1\] is a tuple of 4 entries"),
        ({"spans": [[0, 3], [1, 2], [0, 0], [2, 2]]}, r"batch\[1\]\['spans'\] is a list"),
        ([torch.zeros(4), [True, False, True, True]], r"batch\[1\]\[1\] is a list"),
    ],
)
def test_numbers_for_each_sample_are_no_tensor_and_not_sent_whole_to_each_part(rows, path):
    batch = (torch.zeros(4, 2), rows)
    with pytest.raises(TypeError, match=f"{path}.*as many as there are samples.*give a tensor"):
        slicing.split(batch, 2)
    assert slicing.split(batch, 1) == [batch]


@pytest.mark.parametrize("whole", [[1, 2, 3], (224, 224, 3), [None] * 4, Box(0, 0, 5, 5), 4])
def test_other_numbers_go_whole(whole):
    assert [part[1] for part in slicing.split((torch.zeros(4, 2), whole), 2)] == [whole, whole]


def test_what_a_dataclass_was_given_after_it_was_made_is_sliced_too():
    batch = Weighed(torch.arange(4.0))
    batch.weight = torch.full((4,), 5.0)
    pieces = slicing.split(batch, 2)
    assert [piece.weight.tolist() for piece in pieces] == [[5.0, 5.0]] * 2
    assert [piece.x.tolist() for piece in pieces] == [[0.0, 1.0], [2.0, 3.0]]


@dataclass
class Masked:
    x: torch.Tensor
    name: str = field(init=False, default="a batch")

    def __post_init__(self):
        self.mask = self.x > 2
        self.x = self.x / 2  # would be done twice if parts were made anew
        self.is_ready = True


def test_what_a_dataclass_makes_for_each_sample_is_cut_and_nothing_is_made_twice():
    batch = Masked(torch.arange(8.0))
    pieces = slicing.split(batch, 4)
    assert torch.cat([piece.mask for piece in pieces]).tolist() == (torch.arange(8) > 2).tolist()
    assert torch.cat([piece.x for piece in pieces]).tolist() == (torch.arange(8.0) / 2).tolist()
    assert all(piece.name == "a batch" and piece.is_ready for piece in pieces)


@dataclass
class Makes:
    x: torch.Tensor
    make: Callable = None

    def __post_init__(self):
        self.made, self.make = self.make(self.x), None


@pytest.mark.parametrize("make", [len, lambda x: len(x) / 2, torch.sum, lambda x: torch.ones(3)])
def test_what_a_dataclass_makes_of_the_whole_batch_is_refused_if_it_is_cut(make):
    batch = Makes(torch.arange(8.0), make)
    assert slicing.batch_size(batch) == 8
    assert slicing.split(batch, 1) == [batch]
    for nested, path in ((batch, "batch"), ({"a": [batch]}, r"batch\['a'\]\[0\]")):
        with pytest.raises(TypeError, match=rf"{path}\.made is made by Makes itself, .*: make it a property"):
            slicing.split(nested, 4)


def test_all_tensors_of_a_dataclass_move():
    moved = slicing.map_tensors(Makes(torch.arange(8.0), torch.sum), lambda tensor: tensor.to("meta"))
    assert moved.x.is_meta
    assert moved.made.is_meta


@dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    count: int = field(init=False, default=0)


def test_a_frozen_dataclass_with_slots_is_sliced():
    assert [piece.x.tolist() for piece in slicing.split(Frozen(torch.arange(3.0)), 2)] == [[0, 1], [2]]


class CountedDict(dict):
    def __init__(self, **items):
        super().__init__(items)
        self.count = len(self["x"])


class CountedList(list):
    def __init__(self, items):
        super().__init__([item * 2 for item in items])  # would be done twice if parts were made anew
        self.total = self[0].sum()


class Rows(list):
    """What holds a tensor with a row for each sample, and is not made again."""

    def __init__(self, items):
        super().__init__([item * 2 for item in items])
        self.mask = self[0] > 4
        self.is_ready = True


class Attributes(dict):
    """Its items are its attributes, as in many libraries."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


@pytest.mark.parametrize("batch", [CountedDict(x=torch.arange(8.0)), CountedList([torch.arange(8.0)])])
def test_what_a_dict_or_list_of_a_class_of_its_own_makes_of_the_whole_batch_is_refused_if_it_is_cut(batch):
    assert slicing.split(batch, 1) == [batch]
    for nested, path in ((batch, "batch"), ({"a": [batch]}, r"batch\['a'\]\[0\]")):
        with pytest.raises(
            TypeError, match=rf"{path}\.(count|total) is an attribute of a Counted.*: make it a property"
        ):
            slicing.split(nested, 4)


def test_attributes_beside_items_are_cut_and_nothing_is_made_twice():
    pieces = slicing.split(Rows([torch.arange(4.0)]), 2)
    assert [piece[0].tolist() for piece in pieces] == [[0, 2], [4, 6]]
    assert [piece.mask.tolist() for piece in pieces] == [[False, False], [False, True]]
    assert all(type(piece) is Rows and piece.is_ready for piece in pieces)


def test_a_dict_whose_items_are_its_attributes_is_cut_in_both():
    pieces = slicing.split(Attributes(x=torch.arange(4.0), scale=2.0), 2)
    assert [piece["x"].tolist() for piece in pieces] == [[0, 1], [2, 3]]
    assert all(piece.x is piece["x"] and piece.scale == 2.0 for piece in pieces)


@pytest.mark.parametrize("lengths", [[5], [5, 3]])
def test_packed_sequences_lie_by_time_and_are_refused(lengths):
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.zeros(5, len(lengths), 2), lengths)
    with pytest.raises(TypeError, match=r"batch\[0\] is a PackedSequence.*give padded sequences"):
        slicing.split((packed, torch.zeros(len(lengths))), 2)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11
def test_sparse_tensors_with_coordinates_are_cut_as_dense_ones_are():
    rows = torch.tensor([[0.0, 1, 0], [2, 0, 3], [0, 0, 0], [0, 4, 0], [5, 0, 6]]).to_sparse()
    indices, values = rows.indices().repeat(1, 2), rows.values().repeat(2)
    doubled = torch.sparse_coo_tensor(indices, values, rows.shape, check_invariants=True)
    pieces = slicing.split({"rows": doubled, "labels": torch.arange(5)}, 2)
    assert [piece["rows"].layout for piece in pieces] == [torch.sparse_coo] * 2
    assert torch.equal(torch.cat([piece["rows"].to_dense() for piece in pieces]), 2 * rows.to_dense())


@pytest.mark.filterwarnings("ignore:Sparse CS", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda rows: rows.to_sparse_csr(), r"torch.sparse_csr tensor.*give a dense one \(to_dense\(\)\)"),
        (lambda rows: rows.to_sparse_csc(), r"torch.sparse_csc tensor"),
        (lambda rows: torch.nested.nested_tensor(list(rows)), r"nested tensor.*to_padded_tensor\(\), and lengths"),
        (lambda rows: torch.nested.nested_tensor(list(rows), layout=torch.jagged), r"nested tensor"),
    ],
    ids=["csr", "csc", "nested", "jagged"],
)
def test_tensors_without_rows_go_whole_and_are_not_cut(make, said):
    batch = make(torch.randn(4, 3)), torch.arange(4)
    assert slicing.batch_size(batch) == 4
    assert slicing.split(batch, 1) == [batch]
    with pytest.raises(TypeError, match=rf"batch\[0\] is a {said}"):
        slicing.split(batch, 2)
    with pytest.raises(TypeError, match=rf"batch\[0\] is a {said}"):
        slicing.require_dense(batch, "what is asked for cannot be had of")


def test_tensors_of_mkldnn_are_refused():
    with pytest.raises(TypeError, match=r"batch\[1\] is a torch._mkldnn tensor, which cannot be copied"):
        slicing.batch_size([torch.ones(4), torch.ones(4, 3).to_mkldnn()])
