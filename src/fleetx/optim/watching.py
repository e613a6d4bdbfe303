"""Trust ratios of the last steps, read without making anybody wait.

A step leaves its ratios on the device. Every n steps they are copied to the host together, behind the work that is
already queued; whoever reads them waits for that copy alone, and who reads one window late waits for nothing.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from fleetx.notices import tell_once

FAR = 10.0
"""A raw learning rate this many times the median layer's is told of."""

LOOKS = 10
"""How many steps are looked at until some layer has a ratio: below a head of zeros, all gradients are zero at first."""

_watches = count()


class Spread(NamedTuple):
    """Least, middle and greatest."""

    min: float
    median: float
    max: float


class Entry(NamedTuple):
    """The ratios of one step, on the device, and the numbers of the parameters that they belong to."""

    numbers: Sequence[int]
    values: Tensor


class TrustRatios:
    """The trust ratios of some steps, on their way to the host."""

    def __init__(self, entries: Sequence[Entry], names: Callable[[], list[str]], adapted: Iterable[int]) -> None:
        self.steps = len(entries)
        self._names = names
        self._adapted = frozenset(adapted)
        self._numbers = [entry.numbers for entry in entries]
        values = torch.cat([entry.values for entry in entries])
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
            values = host
        self._values = values

    @property
    def layers(self) -> int:
        """How many parameters have a ratio."""
        return len(self._adapted)

    @property
    def ready(self) -> bool:
        """Whether reading them would not wait."""
        if self._values.is_meta:
            return False
        if self._event is None:
            return True
        # A query would spoil a graph that is being captured.
        return not torch.cuda.is_current_stream_capturing() and self._event.query()

    def by_number(self) -> dict[int, list[float]]:
        """Per parameter that has a ratio, its ratios; steps that were left out are not among them."""
        if self._event is not None:
            self._event.synchronize()
        found: dict[int, list[float]] = {}
        numbers = (number for step in self._numbers for number in step)
        for number, value in zip(numbers, self._values.tolist(), strict=True):
            if number in self._adapted and value == value:  # a step that was left out wrote NaN
                found.setdefault(number, []).append(value)
        return found

    def per_layer(self) -> dict[str, Spread]:
        """Per layer, by name: the least, the median and the greatest ratio of these steps."""
        names = self._names()
        return {
            names[number]: Spread(min(values), statistics.median(values), max(values))
            for number, values in self.by_number().items()
        }

    def metrics(self) -> dict[str, float]:
        """Three numbers for a log: the least of all layers, the median of their medians, the greatest of all."""
        spreads = self.per_layer().values()
        if not spreads:
            return {}
        return {
            "trust_ratio_min": min(spread.min for spread in spreads),
            "trust_ratio_median": statistics.median(spread.median for spread in spreads),
            "trust_ratio_max": max(spread.max for spread in spreads),
        }

    def __repr__(self) -> str:
        return f"TrustRatios(steps={self.steps}, layers={self.layers})"


class Watch:
    """Collects the ratios of an optimizer's steps."""

    def __init__(self) -> None:
        self.every: int | None = None
        self.latest: TrustRatios | None = None
        self._entries: list[Entry] = []
        # What the first steps tell of layers without length.
        self._first: TrustRatios | None = None
        self._looking = True
        self._looks = 0
        self._zeros: dict[int, float] = {}
        self._number = next(_watches)  # each optimizer is told of

    @property
    def wants(self) -> bool:
        """Whether the ratios of this step are asked for."""
        looking = self._looking and self._first is None and not torch.compiler.is_compiling()
        return self.every is not None or looking

    def begin(self, every: int | None) -> None:
        """Hand out every so many steps from now on; what was collected before is dropped."""
        self.every = every
        self.latest = None
        self._entries = []

    def record(self, entry: Entry, read: Callable[[Sequence[Entry]], TrustRatios]) -> None:
        """Take the ratios of one step."""
        if self._looking and self._first is None and not torch.compiler.is_compiling():
            self._first = read([entry])
        if self.every is None:
            return
        self._entries.append(entry)
        if len(self._entries) >= self.every:
            self.latest = read(self._entries)
            self._entries = []

    def tell_of_zeros(self, raw: Callable[[], list[float]], names: Callable[[], list[str]]) -> None:
        """Say once, as soon as the first ratios have arrived, if layers without length stepped far beyond the others.

        Where no layer has a ratio yet, the next step is looked at: what the layers get then is what they should have.
        """
        if self._first is None or not self._first.ready:
            return
        ratios = {number: values[0] for number, values in self._first.by_number().items()}
        raws = raw()
        zeros = {number: ratio for number, ratio in ratios.items() if abs(ratio - raws[number]) <= 1e-6 * ratio}
        others = [ratio for number, ratio in ratios.items() if number not in zeros]
        self._zeros |= zeros
        self._looks += bool(ratios)  # a step that was left out has none
        self._looking = self._first.layers > 0 and not others and self._looks < LOOKS
        self._first = None
        if not self._zeros or not others:
            return
        times = max(self._zeros.values()) / statistics.median(others)
        if times > FAR:
            called = [names()[number] for number in sorted(self._zeros)]
            last = f", {called[-1]} last" if len(called) > 1 else ""  # where a head of zeros is
            tell_once(
                f"zero-norm {self._number}",
                f"{len(called)} layers ({called[0]} first{last}) have weights or gradients of length zero and moved at "
                f"the learning rate itself, {times:,.0f} times that of the median layer. Give zero_norm_lr, a learning "
                "rate for such steps, or exclude them from adaptation and give excluded_lr.",
            )
