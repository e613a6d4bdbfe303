"""Windows that moved no weight: a run of a program gives no `Outcome` to read that from, so it is said once."""

from torch import Tensor

from fleetx.nonfinite import NonFiniteWatch
from fleetx.notices import tell_once


class TellingWatch(NonFiniteWatch):
    """Tells of the first unusable window. What a falling loss scale skips is not meant: that is how scales are found.

    On a GPU it looks one window late, as the watch itself does, so as not to wait.
    """

    def record(self, unusable: Tensor) -> None:
        """Count one window; tell or raise."""
        before = self._previous
        super().record(unusable)
        seen = before if unusable.is_cuda else self._previous
        if seen is not None and seen.get():
            tell_once(
                "skipped-window",
                "a window was skipped: its loss or gradient was inf or NaN, and no weight moved. "
                "exe.optimizer(program).nonfinite_windows counts such windows, and "
                f"{self.limit} in a row end the run with an error.",
            )
