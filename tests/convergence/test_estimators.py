"""Means over all possible draws: an estimator without bias gives the truth exactly."""

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetx.convergence.estimators import from_partial_sums, from_parts

SIGNAL = 0.3  # the mean gradient; the noise is +1 or -1 alike
PARTS = st.lists(st.integers(1, 4), min_size=2, max_size=4).filter(lambda counts: sum(counts) <= 10)


def draws(counts):
    """The gradient sums of the parts, for each equally likely draw."""
    ends = np.cumsum(counts)[:-1]
    for noise in product((-1.0, 1.0), repeat=sum(counts)):
        yield [part.sum() for part in np.split(SIGNAL + np.array(noise), ends)]


def means(estimates):
    return np.mean([tuple(estimate) for estimate in estimates], axis=0)


@given(counts=PARTS)
def test_parts_of_any_sizes_give_the_truth_in_the_mean(counts):
    estimates = [from_parts(counts, np.square(sums), np.square(np.sum(sums))) for sums in draws(counts)]
    np.testing.assert_allclose(means(estimates), (SIGNAL**2, 1.0), atol=1e-12)


@given(counts=PARTS)
def test_sums_that_grow_in_place_give_the_truth_in_the_mean(counts):
    estimates = [from_partial_sums(counts, np.square(np.cumsum(sums))) for sums in draws(counts)]
    np.testing.assert_allclose(means(estimates), (SIGNAL**2, 1.0), atol=1e-9)


def test_a_data_set_that_is_drawn_without_replacement_is_corrected_for():
    """Samples of one epoch are never the same: the estimate for the training set's own gradient is exact as well."""
    data_set, counts = np.array([0.1, 2.0, -0.7, 0.4, 1.1]), (1, 2)
    estimates = [
        from_parts(counts, [draw[0] ** 2, (draw[1] + draw[2]) ** 2], sum(draw) ** 2).of_data_set(len(data_set))
        for draw in permutations(data_set, 3)
    ]
    np.testing.assert_allclose(means(estimates), (data_set.mean() ** 2, data_set.var(ddof=1)), atol=1e-12)


@pytest.mark.parametrize("estimate", [lambda n, s: from_parts(n, s, 1.0), from_partial_sums])
def test_what_cannot_be_estimated_is_refused(estimate):
    with pytest.raises(ValueError, match=r"at least two parts of a batch, got 1\."):
        estimate([4], [1.0])
    with pytest.raises(ValueError, match="got 2 and 1"):
        estimate([4, 4], [1.0])
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite and above 0"):
            estimate([4, bad], [1.0, 2.0])
