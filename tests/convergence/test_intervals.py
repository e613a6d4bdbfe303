import math

import numpy as np
import pytest

from fleetx.convergence import intervals
from fleetx.convergence.estimators import from_parts
from fleetx.convergence.intervals import ratio, student_quantile

SPECTRUM = 1 / np.arange(1, 101)  # of the noise: a power law
SPECTRUM /= SPECTRUM.sum()


def run(noise_scale, counts, updates, generator):
    """Spread and signal of each update, for Gaussian gradients whose noise scale is known."""
    counts = np.array(counts, dtype=float)
    signal = generator.normal(size=SPECTRUM.size) * np.sqrt(SPECTRUM)
    signal /= np.linalg.norm(signal) * math.sqrt(noise_scale)
    noise = generator.normal(size=(updates, counts.size, SPECTRUM.size)) * np.sqrt(SPECTRUM)
    sums = counts[:, None] * signal + np.sqrt(counts)[:, None] * noise
    found = [from_parts(counts, (part**2).sum(1), (part.sum(0) ** 2).sum()) for part in sums]
    return [moments.spread for moments in found], [moments.signal for moments in found]


@pytest.mark.parametrize(
    "trials", [100, pytest.param(1000, marks=pytest.mark.full)], ids=["a few", "as many as promised"]
)
@pytest.mark.parametrize(("noise_scale", "counts", "updates"), [(400, (4, 64, 16, 44), 96), (40, (32,) * 4, 48)])
def test_an_interval_has_the_truth_in_it_as_often_as_it_says(noise_scale, counts, updates, trials):
    generator = np.random.default_rng(0)
    found = [ratio(*run(noise_scale, counts, updates, generator)) for _ in range(trials)]
    assert all(interval.resolved for interval in found)
    covered = sum(interval.low <= noise_scale <= interval.high for interval in found) / trials
    assert 0.90 <= covered <= 0.97 or (trials == 100 and covered == 0.98)
    assert abs(np.median([interval.value for interval in found]) / noise_scale - 1) < 0.1


def test_noise_far_above_the_batch_gives_a_lower_bound_and_no_figure():
    generator = np.random.default_rng(0)
    found = [ratio(*run(4000, (4,) * 4, 64, generator)) for _ in range(100)]
    unresolved = [interval for interval in found if not interval.resolved]
    assert len(unresolved) > 80
    assert all(math.isnan(interval.value) for interval in unresolved)
    assert sum(interval.low <= 4000 for interval in unresolved) >= 0.95 * len(unresolved)
    assert str(next(interval for interval in unresolved if interval.low > 0)).startswith("above ")


def test_too_few_updates_give_nothing():
    assert math.isnan(ratio([1.0] * 15, [1.0] * 15).low)
    assert str(ratio([], [])) == "unknown"


@pytest.mark.parametrize("degrees", [7, 15, 31])
def test_quantiles_are_those_of_students_distribution(degrees):
    """Against the distribution itself, integrated."""
    t = student_quantile(0.975, degrees)
    x = np.linspace(-t, t, 200_001)
    constant = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    inside = np.trapezoid(constant * (1 + x**2 / degrees) ** (-(degrees + 1) / 2), x)
    assert inside == pytest.approx(0.95, abs=1e-3)


def test_blocks_leave_out_the_oldest_updates():
    """A run of 67 updates makes 32 blocks of two, of the last 64."""
    spreads = [1e9] * 3 + [2.0, 2.1] * 32
    assert ratio(spreads, [1.0, 1.1] * 33 + [1.0]).value < 3
    assert intervals.MOST_BLOCKS == 32
