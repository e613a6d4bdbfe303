"""The gradient noise scale of a run, measured from its merge windows."""

import math
from array import array
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from torch import Tensor

from fleetx.convergence.estimators import Moments
from fleetx.convergence.intervals import Interval, ratio
from fleetx.convergence.window_squares import SquaresOnTheirWay, WindowSquares
from fleetx.names import label
from fleetx.numbers import Number

MOST_UPDATES = 4096
"""Of older ones the moments are dropped."""


class NoiseScale:
    """How many items a batch needs until its gradient is as much signal as noise.

    Below this batch, twice the batch does almost the work of twice the updates; far above it, a larger batch is wasted.
    Give it to ``fleet.distributed_optimizer(..., noise_scale=NoiseScale())``. Every `every` windows it compares the
    gradients of the micro-batches, on all workers, with the gradient of the whole window. That takes no further pass,
    and at least two micro-batches or two workers. Items are what the loss averages over: samples in `Step`, or `items`;
    with `minimize` and no `items`, an item is a micro-batch.

    `data_set` is the number of items in the training set. Items drawn without replacement make the raw estimate too
    large once the noise scale is not small against that.
    """

    def __init__(self, *, every: int = 16, data_set: int | None = None) -> None:
        for name, value in (("every", every), ("data_set", data_set)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"NoiseScale's {name} must be a whole number of at least 1, not {value!r}.")
        self.every = every
        self.data_set = data_set
        self._updates = self._left_out = 0
        self._names: list[str] = []
        # Signal and spread of each update in turn, of each parameter; of the whole model under None.
        self._moments: dict[str | None, array[float]] = {}
        self._windows = 0
        self._window: WindowSquares | None = None
        self._arriving: SquaresOnTheirWay | None = None

    # What a training step calls ----------------------------------------------------------------------------

    def numbers(self, parameters: Sequence[Tensor]) -> Tensor:
        """What is to be summed over the workers when the window in progress closes."""
        if self._window is None or len(self._window.parameters) != len(parameters):
            self._window = WindowSquares(parameters)
        return self._window.numbers()

    @contextmanager
    def part(self, parameters: Sequence[Tensor], items: Number, unit: Number) -> Generator[None]:
        """Around the backward of one micro-batch of so many items; what arrives is multiplied by `unit` later."""
        if not self._measures:
            yield
            return
        self.numbers(parameters)
        assert self._window is not None
        with self._window.part(items, unit):
            yield

    def close(self, sums: Tensor, divisor: Number, usable: Tensor) -> None:
        """The window is over: its gradients are summed, and still to be divided by `divisor`."""
        window, measures = self._window, self._measures
        self._window = None
        self._windows += 1
        if not measures or window is None:
            return
        self._take_arrived()
        self._names = [label(parameter) for parameter in window.parameters]
        if not self._updates and not self._left_out:
            window.require_parts()
        self._arriving = window.report(sums, divisor, usable)

    def discard(self) -> None:
        """The window was given up."""
        self._window = None

    # What users ask for ------------------------------------------------------------------------------------

    @property
    def updates(self) -> int:
        """How many updates were measured."""
        self._take_arrived()
        return self._updates

    @property
    def left_out(self) -> int:
        """How many gave nothing: skipped ones, and windows of a single micro-batch."""
        self._take_arrived()
        return self._left_out

    def moments(self, *, layer: str | None = None) -> list[Moments]:
        """What each measured update gave, of the whole model or of one parameter, oldest first."""
        self._take_arrived()
        if layer is not None and layer not in self._moments:
            raise ValueError(f"no layer is called {layer!r}; measured so far: {', '.join(self._names) or 'nothing'}.")
        pairs = self._moments.get(layer, array("d"))
        found = [Moments(*pair) for pair in zip(pairs[::2], pairs[1::2], strict=True)]
        return found if self.data_set is None else [moments.of_data_set(self.data_set) for moments in found]

    def estimate(self, last: int = 0, *, layer: str | None = None, confidence: float = 0.95) -> Interval:
        """The noise scale of the `last` measured updates (0: of all), of the whole model or of one parameter."""
        found = self.moments(layer=layer)[-last:]
        return ratio([moments.spread for moments in found], [moments.signal for moments in found], confidence)

    def per_layer(self) -> dict[str, Interval]:
        """The noise scale of each parameter, by its name."""
        self._take_arrived()
        return {name: self.estimate(layer=name) for name in self._moments if name is not None}

    def metrics(self) -> dict[str, float]:
        """For a log: the estimate and its bounds, as far as they are known."""
        found = self.estimate()
        known = {"noise_scale": found.value, "noise_scale_low": found.low, "noise_scale_high": found.high}
        return {name: value for name, value in known.items() if math.isfinite(value)}

    def __str__(self) -> str:
        found = self.estimate()
        said = f"noise scale {found} items, from {self.updates} updates"
        return said + (f" ({self.left_out} were left out)" if self.left_out else "")

    # ---------------------------------------------------------------------------------------------------------

    @property
    def _measures(self) -> bool:
        return self._windows % self.every == 0

    def _take_arrived(self) -> None:
        """Numbers of the window before: copied while the next one ran, so that nothing waits for the device."""
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            return
        found = arriving.moments()
        if found is None:
            self._left_out += 1
            return
        self._updates += 1
        for name, moments in zip([None, *self._names], found, strict=True):
            pairs = self._moments.setdefault(name, array("d"))
            pairs.extend(moments)
            del pairs[: -2 * MOST_UPDATES]
