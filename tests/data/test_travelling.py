"""Batches arrive as they were sent, whichever way their tensors travelled."""

from collections import namedtuple

import numpy as np
import pytest
import torch

from fleetx.data import Loader, ShardedBatches
from fleetx.data.travelling import MOST_BYTES, ByValue, packed, unpacked

Pair = namedtuple("Pair", ["first", "second"])


def tensors():
    return {
        "small": torch.arange(6).reshape(2, 3),
        "no dimensions": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "bool": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.float16),
        "bf16": torch.ones(3, dtype=torch.bfloat16),
        "complex": torch.ones(3, dtype=torch.complex64),
        "channels last": torch.arange(24, dtype=torch.uint8).reshape(2, 2, 2, 3).permute(0, 3, 1, 2),
        "strided": torch.arange(8)[::2],
        "large": torch.zeros(MOST_BYTES + 1, dtype=torch.uint8),
        "trained": torch.ones(2, requires_grad=True),
    }


def nested():
    return [{"by name": tensors(), "pair": Pair(torch.ones(2), "text"), "none": None}, (1, torch.zeros(2)), np.ones(2)]


def assert_same(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs)
        assert (ours.dtype, ours.stride(), ours.requires_grad) == (theirs.dtype, theirs.stride(), theirs.requires_grad)
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert_same(ours[name], theirs[name])
    elif isinstance(theirs, list | tuple):
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert np.array_equal(ours, theirs)


def test_small_ones_in_the_usual_order_go_by_value():
    sent = packed(tensors())
    by_value = {name for name, value in sent.items() if isinstance(value, ByValue)}
    assert by_value == {"small", "no dimensions", "bool", "half", "complex"}


def test_what_was_packed_comes_out_as_it_was():
    assert_same(unpacked(packed(nested())), nested())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_arrive_as_they_were_made(num_workers):
    def collate(samples):
        batch = nested()
        del batch[0]["by name"]["trained"]  # torch does not pass on what needs a gradient
        return batch

    loader = Loader([0, 1, 2], ShardedBatches(3, 2), collate=collate, num_workers=num_workers, timeout=60.0)
    for batch in loader:
        assert_same(batch, collate([]))
        batch[0]["by name"]["small"].add_(1)  # it is the user's own
