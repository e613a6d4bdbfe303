"""Amounts that grow with the micro-batch, in straight lines that follow from measurements at a few sizes."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_BUSY = 1.04  # by so many times, at most, a sample takes longer in half the micro-batch if the device is busy
_WAITING = 1.1  # times the expected seconds: there it waited
_LAUNCHES = 0.3  # part of the seconds: what takes so long at all events are launches, which samples do not wait for


class Bend(NamedTuple):
    """How a line goes on with many samples, where something else decides than with few.

    From `onward` samples on it is `there`, and so much per sample `beyond` that; between `until` and `onward` it goes
    straight from one to the other. None, if `onward` is 0.
    """

    until: int = 0
    onward: int = 0
    there: float = 0.0
    beyond: float = 0.0

    def at(self, micro_batch: int, begun: float) -> float:
        """The amount at a micro-batch size, of a line that is `begun` where it bends."""
        way = min(1.0, (micro_batch - self.until) / (self.onward - self.until))
        return begun + way * (self.there - begun) + self.beyond * max(0, micro_batch - self.onward)


STRAIGHT = Bend()


class Line(NamedTuple):
    """An amount that grows with the micro-batch: so much at all events and so much per sample, or `least` if more."""

    fixed: float = 0.0
    per_sample: float = 0.0
    least: float = 0.0
    bend: Bend = STRAIGHT

    @classmethod
    def through(cls, sizes: Sequence[int], values: Sequence[float]) -> "Line":
        """The line that fits two measurements best; what shrinks with the micro-batch is taken as constant."""
        (small, large), (first, second) = sizes, values
        slope = (second - first) / (large - small)
        if slope < 0:
            return cls(max(0.0, first, second), 0.0)
        fixed = first - slope * small
        # Below zero only by noise: then through the larger size, where noise matters less.
        return cls(fixed, slope) if fixed >= 0 else cls(0.0, max(0.0, second) / large)

    @classmethod
    def bent(cls, sizes: Sequence[int], values: Sequence[float]) -> "Line":
        """Through two measurements with few samples and, if there are four, two with many."""
        near = cls.through(sizes[:2], values[:2])
        if len(sizes) == 2:
            return near
        (onward, most), (there, last) = sizes[2:], values[2:]
        return near._replace(bend=Bend(sizes[1], onward, there, max(0.0, (last - there) / (most - onward))))

    @classmethod
    def of_time(cls, sizes: Sequence[int], values: Sequence[float]) -> "Line":
        """The seconds of something, from those at two sizes and maybe a far smaller one before them.

        Two give a straight line. With three, where a sample takes longer in half the micro-batch, the device waited for
        its next kernel, unless all lie on a line: then it takes so long at all events, and beyond that what the larger
        size takes per sample.
        """
        (small, large), (first, second) = sizes[-2:], values[-2:]
        line = cls.through(sizes[-2:], values[-2:])
        if len(sizes) == 2:
            return line
        waits_when_small = values[0] > line.at(sizes[0]) * _WAITING
        if not waits_when_small and line.fixed < _LAUNCHES * second:
            return line
        floor = min(values)  # not the first: it may have been slow by chance, and then others were faster
        if first / small > second / large * _BUSY:
            return cls(0.0, second / large, least=floor)
        return line._replace(least=floor) if waits_when_small else line

    @classmethod
    def read(cls, values: Sequence[Any]) -> "Line":
        """From what JSON gave."""
        fixed, per_sample, least, bend = values
        return cls(fixed, per_sample, least, Bend(*bend))

    def at(self, micro_batch: int) -> float:
        """The amount at a micro-batch size."""
        if self.bend.onward and micro_batch > self.bend.until:
            return self.bend.at(micro_batch, self._near(self.bend.until))
        return self._near(micro_batch)

    def _near(self, micro_batch: int) -> float:
        return max(self.least, self.fixed + self.per_sample * micro_batch)

    def bytes_at(self, micro_batch: int) -> int:
        """The same, in whole bytes and never too few."""
        return math.ceil(self.at(micro_batch) - 1e-6)


NOTHING = Line()


class Lines:
    """Many lines at once."""

    def __init__(self, lines: Iterable[Line]) -> None:
        numbers = [(line.fixed, line.per_sample, line.least, *line.bend) for line in lines]
        self._columns = np.array(numbers, np.float64).reshape(-1, 3 + len(Bend._fields)).T

    def at(self, micro_batch: int) -> NDArray[np.float64]:
        """The amounts at a micro-batch size, as `Line.at` has them."""
        fixed, per_sample, least, until, onward, there, beyond = self._columns
        is_bent = (onward > 0) & (micro_batch > until)
        near = np.maximum(least, fixed + per_sample * np.where(is_bent, until, micro_batch))
        way = np.minimum(1.0, (micro_batch - until) / np.where(is_bent, onward - until, 1.0))
        far = near + way * (there - near) + beyond * np.maximum(0.0, micro_batch - onward)
        return np.where(is_bent, far, near)
