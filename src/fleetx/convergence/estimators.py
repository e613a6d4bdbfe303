"""Estimate the signal and the noise of gradients from squared norms.

The gradient of one item is G + noise; G is the gradient of the mean loss, and `spread` is the trace of the noise's
covariance. A *sum* of n items' gradients, a, has E|a|² = n²·|G|² + n·spread. Two sums of different sizes are two
equations for the two unknowns; more sums make the estimate better. Every formula here is linear in the squared norms,
so each is unbiased for any sizes, and sums of several updates may be added before they are divided.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


TWO_PARTS = "a noise scale compares at least two parts of a batch"


class Moments(NamedTuple):
    """Of the gradient of one item: the squared norm of its mean, and the trace of its covariance."""

    signal: float
    spread: float

    @property
    def noise_scale(self) -> float:
        """The batch at which noise and signal are equal."""
        return self.spread / self.signal

    def of_data_set(self, size: int) -> "Moments":
        """The moments around the gradient of a whole training set of `size` items, drawn without replacement.

        Two items of one epoch are never the same, so that products of their gradients are a little too small.
        """
        return Moments(self.signal + self.spread / size, self.spread)


def from_parts(counts: Sequence[float], squares: Sequence[float], total_square: float) -> Moments:
    """Estimate from disjoint parts: `squares` are the squared norms of their sums, `total_square` that of all items."""
    n, items = _checked(counts, squares)
    return from_part_sums(float((np.asarray(squares, dtype=np.float64) / n).sum()), total_square, items, len(n))


def from_part_sums(weighed: float, total_square: float, items: float, parts: float) -> Moments:
    """The same from sums alone: `weighed` is that of each part's squared norm over its items."""
    if parts < 2:
        raise ValueError(f"{TWO_PARTS}, got {parts:g}.")
    spread = (weighed - total_square / items) / (parts - 1)
    return Moments(_signal(total_square, items, spread), spread)


def from_partial_sums(counts: Sequence[float], squares: Sequence[float]) -> Moments:
    """Estimate from sums that grow in place: `squares[k]` is the squared norm after the first k + 1 parts.

    The weights are those of least variance where noise dominates, which is when an estimate is hard to get.
    """
    n, items = _checked(counts, squares)
    spread = float(partial_sum_weights(n) @ np.asarray(squares, dtype=np.float64))
    return Moments(_signal(float(squares[-1]), items, spread), spread)


def partial_sum_weights(counts: Floats) -> Floats:
    """The weight of each squared partial sum in the spread: generalized least squares.

    The covariance of two squared sums is as the square of the number of items that both contain.
    """
    sizes = np.cumsum(counts)
    shared = np.minimum.outer(sizes, sizes) ** 2
    unknowns = np.stack([sizes**2, sizes], axis=1)
    weighted = np.linalg.solve(shared, unknowns).T
    return np.linalg.solve(weighted @ unknowns, weighted)[1]


def _signal(total_square: float, items: float, spread: float) -> float:
    return (total_square - items * spread) / items**2


def _checked(counts: Sequence[float], squares: Sequence[float]) -> tuple[Floats, float]:
    n = np.asarray(counts, dtype=np.float64)
    if len(n) != len(squares):
        raise ValueError(f"each part needs one count and one squared norm, got {len(n)} and {len(squares)}.")
    if len(n) < 2:
        raise ValueError(f"{TWO_PARTS}, got {len(n)}.")
    if not (np.isfinite(n).all() and (n > 0).all()):
        raise ValueError(
            f"the items of each part must be finite and above 0, got {list(counts)}. Leave out empty parts."
        )
    return n, float(n.sum())
