"""Which feeds run without being compiled."""

import pytest
import torch

from fleetx.static.passing import Sizes


def passing(*sizes):
    known = Sizes()
    return [size for size in sizes if known.is_passing({"x": torch.empty(size, 2)})]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((8, 8, 5, 8, 8, 5, 8, 8, 5), [5, 5, 5]),  # a short last batch, however many epochs
        ((8, 8, 8, 5, 8, 8, 3, 8), [5, 3]),
        ((8, 8, 8, 5, 4, 3, 8), [5]),  # the second in a row is compiled, for any size
        ((8, 5, 8, 5), []),  # every other one
        ((8, 8, 5, 8, 5, 8, 5, 8), [5]),
        ((8, 7, 6, 5), []),
    ],
)
def test_only_sizes_that_come_and_go_pass(sizes, expected):
    assert passing(*sizes) == expected


def test_other_names_dtypes_and_dimensions_are_compiled():
    for other in ({"y": torch.empty(5, 2)}, {"x": torch.empty(5, 2).int()}, {"x": torch.empty(5, 2, 1)}):
        known = Sizes()
        for _ in range(5):
            assert not known.is_passing({"x": torch.empty(8, 2)})
        assert not known.is_passing(other)
