"""Which sizes of feeds come and go, as that of a short last batch: for those nothing is compiled."""

from collections.abc import Mapping

from torch import Tensor

Shapes = dict[str, tuple[object, ...]]
_MOST = 3
"""One feed in so many, at most, may be of a passing size."""


class Sizes:
    """The sizes of feeds that one forward was given, and whether it is compiled for any size by now."""

    def __init__(self) -> None:
        self._first: Shapes | None = None  # what was compiled first
        self._for_any = False
        self._runs = self._passed = 0
        self._passed_last = False

    def is_passing(self, batch: Mapping[str, Tensor]) -> bool:
        """Count a feed, and say whether it should run without being compiled.

        It should if it differs in its sizes from what is compiled, the one before did not, and few others did: feeds
        that vary all the time are compiled for any size.
        """
        shapes: Shapes = {name: (tensor.dtype, *tensor.shape) for name, tensor in batch.items()}
        self._first = self._first or shapes
        self._runs += 1
        if self._for_any or shapes == self._first:
            self._passed_last = False
            return False
        few = (self._passed + 1) * _MOST <= self._runs
        self._passed_last = few and not self._passed_last and _differ_in_sizes(shapes, self._first)
        self._passed += self._passed_last
        self._for_any = not self._passed_last
        return self._passed_last


def _differ_in_sizes(shapes: Shapes, others: Shapes) -> bool:
    """And not in names, dtypes or dimensions."""
    return {(n, s[0], len(s)) for n, s in shapes.items()} == {(n, s[0], len(s)) for n, s in others.items()}
