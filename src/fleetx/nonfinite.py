"""Counts windows whose loss or gradients were not finite, and stops a run that does not recover."""

import torch
from torch import Tensor

from fleetx.outcome import HostValue


class NonFiniteError(FloatingPointError):
    """Too many windows in a row had no finite loss."""


class NonFiniteWatch:
    """Raises after `limit` unusable windows in a row. On a GPU it looks one window late, so as not to wait."""

    def __init__(self, limit: int) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(f"nonfinite_limit must be an int of at least 1, not {limit!r}.")
        self.limit = limit
        self._in_a_row = torch.tensor(0)
        self._total = torch.tensor(0)
        self._previous: HostValue | None = None

    @property
    def total(self) -> int:
        """Unusable windows so far."""
        return int(self._total)

    def record(self, unusable: Tensor) -> None:
        """Count one window; raise if it was one too many."""
        in_a_row = self._in_a_row.to(unusable.device)
        self._in_a_row = torch.where(unusable, in_a_row + 1, 0)
        self._total = self._total.to(unusable.device) + unusable
        latest = HostValue(self._in_a_row)
        seen = self._previous if unusable.is_cuda else latest
        self._previous = latest
        if seen is not None and seen.get() >= self.limit:
            self._in_a_row.zero_()
            raise NonFiniteError(
                f"the loss or its gradient was inf or NaN in {self.limit} windows in a row ({self.total} in all). "
                "None of them moved a weight. Lower the learning rate or lengthen its warm-up, clip with clip_norm, "
                "look for bad samples, use amp_configs={'dtype': 'bfloat16'} instead of float16, or raise "
                "nonfinite_limit if the run is expected to recover."
            )

    def state_dict(self) -> dict[str, int]:
        """The counts, as plain numbers."""
        return {"in_a_row": int(self._in_a_row), "total": self.total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue counting."""
        self._in_a_row = torch.tensor(state["in_a_row"])
        self._total = torch.tensor(state["total"])
        self._previous = None
