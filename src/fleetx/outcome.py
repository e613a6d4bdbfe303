"""What a call of the step reports, without making anybody wait who does not ask."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fleetx.comm.overlap import Overlap
    from fleetx.optim import TrustRatios


class HostValue:
    """Numbers on their way from the device: the copy is started here, and waited for when they are read."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._value = tensor
        if tensor.is_cuda:
            self._value = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._value.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def on_device(self) -> bool:
        """Whether they come from a GPU, so that reading them may wait."""
        return self._event is not None

    def get(self) -> float:
        """The one number; waits for the device if it is not there yet."""
        return self._arrived().item()

    def tolist(self) -> Any:
        """Several numbers, as nested lists; waits like `get`."""
        return self._arrived().tolist()

    def _arrived(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._value


@dataclass(frozen=True)
class Outcome:
    """What happened to one call of `Step`, `minimize` or `flush`. True if it moved the weights.

    `loss` and `losses` are means over the whole window and all workers once the window has closed; before that
    they are those of the micro-batch at hand. They stay on the device: reading them is what waits. `trust_ratios` are
    those of LARS or LAMB over the last `trust_ratios_every` windows, with the last of these; otherwise None.
    """

    loss: Tensor
    closed: bool
    losses: dict[str, Tensor] = field(default_factory=dict)
    grad_norm: Tensor | None = None
    lr: float | Tensor = 0.0
    seconds: float = 0.0
    trust_ratios: "TrustRatios | None" = None
    _samples: HostValue | None = None
    _finite: HostValue | None = None
    _scale: Tensor | None = None
    _overlap: "Overlap | None" = None

    @property
    def updated(self) -> bool:
        """The window closed and its update was applied."""
        return self.closed and not self.skipped

    @property
    def skipped(self) -> bool:
        """The window closed, but an inf or NaN made its update unusable, and no weight moved."""
        return self._finite is not None and not self._finite.get()

    @property
    def loss_scale(self) -> float:
        """The loss scale that this window was computed with; 1 without scaling."""
        return 1.0 if self._scale is None else self._scale.item()

    @property
    def samples(self) -> int | None:
        """Samples of this window on all workers, where the step was given the batch."""
        return None if self._samples is None else int(self._samples.get())

    @property
    def samples_per_s(self) -> float | None:
        """Throughput of all workers since the previous window closed."""
        return None if self.samples is None or not self.seconds else self.samples / self.seconds

    @property
    def comm_hidden(self) -> float | None:
        """The share of the gradients' communication that this window's backward hid from this worker, 0 to 1.

        1 - the time the step waited for messages / the time messages were under way. None for a worker alone, while the
        window is open, and where gloo carries gradients of a GPU.
        """
        return None if self._overlap is None else self._overlap.hidden()

    def __bool__(self) -> bool:
        return self.updated

    def __repr__(self) -> str:
        if not self.closed:
            return f"Outcome(loss={self.loss.item():.6g}, window still open)"
        norm = float("nan") if self.grad_norm is None else self.grad_norm.item()
        rate = "" if self.samples_per_s is None else f", {self.samples_per_s:,.0f} samples/s"
        return (
            f"Outcome(loss={self.loss.item():.6g}, {'skipped' if self.skipped else 'updated'}, "
            f"grad_norm={norm:.4g}, lr={float(self.lr):.4g}, loss_scale={self.loss_scale:g}{rate})"
        )


class Stopwatch:
    """Seconds between the ends of windows."""

    def __init__(self) -> None:
        self._last: float | None = None

    def start(self) -> None:
        """Begin the very first lap; later laps begin where the one before ended."""
        if self._last is None:
            self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap, which ends here."""
        self.start()
        assert self._last is not None
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds
