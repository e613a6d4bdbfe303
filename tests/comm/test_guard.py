import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetx.comm.guard import ParameterGuard, checksum


@settings(max_examples=60)
@given(st.integers(0, 299_999), st.integers(0, 31))
def test_any_flipped_bit_changes_the_sum(place, bit):
    values = torch.arange(300_000, dtype=torch.float32)
    before = checksum(values)
    bits = values.view(torch.int32)
    bits[place] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
    assert checksum(values) != before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_all_kinds_of_numbers(dtype):
    values = torch.randn(64, 3).to(dtype)
    assert checksum(values) == checksum(values.clone())
    swapped = values.clone()
    swapped[[0, 1]] = values[[1, 0]]
    assert checksum(swapped) != checksum(values)


def test_values_that_differ_in_opposite_directions_do_not_cancel():
    values = torch.ones(1000)
    other = values.clone()
    other.view(torch.int32)[10] += 1
    other.view(torch.int32)[20] -= 1
    assert checksum(other) != checksum(values)


def test_odd_layouts():
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert checksum(image) == checksum(image.clone(memory_format=torch.preserve_format))
    assert checksum(torch.randn(6, 6)[:, ::2]).dtype == torch.int64
    assert checksum(torch.empty(0)) == 0
    assert checksum(torch.tensor(3.0)) != 0


@pytest.mark.parametrize("every", [-1, 1.5, True])
def test_wrong_settings(every):
    with pytest.raises(ValueError, match="compare_every must be an int of at least 0"):
        ParameterGuard(every)
