"""The dynamic loss scale, by Fleet's rule: n overflows in a row shrink it, n good windows in a row grow it."""

import math
from typing import Any

import torch
from torch import Tensor

from fleetx.notices import tell_once


class LossScaler:
    """Multiplies the loss so that fp16 gradients do not vanish, and adapts the factor.

    An overflow resets the count of good windows, a good window resets the count of overflows. The scale never
    falls below 1 and is not raised to infinity. All state lives in tensors beside the gradients: an update does
    not wait for the device.

    >>> scaler = LossScaler(init_loss_scaling=8.0, decr_every_n_nan_or_inf=2, decr_ratio=0.5)
    >>> scaler.update(found_inf=True)
    >>> scaler.update(found_inf=True)
    >>> scaler.scale
    4.0
    """

    def __init__(
        self,
        init_loss_scaling: float = 32768.0,
        incr_every_n_steps: int = 1000,
        decr_every_n_nan_or_inf: int = 2,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.8,
        use_dynamic_loss_scaling: bool = True,
    ) -> None:
        _require(
            init_loss_scaling >= 1 and math.isfinite(init_loss_scaling),
            "init_loss_scaling",
            ">= 1",
            init_loss_scaling,
        )
        _require(incr_every_n_steps >= 1, "incr_every_n_steps", ">= 1", incr_every_n_steps)
        _require(decr_every_n_nan_or_inf >= 1, "decr_every_n_nan_or_inf", ">= 1", decr_every_n_nan_or_inf)
        _require(incr_ratio > 1, "incr_ratio", "> 1", incr_ratio)
        _require(0 < decr_ratio < 1, "decr_ratio", "between 0 and 1", decr_ratio)
        self.incr_every_n_steps = incr_every_n_steps
        self.decr_every_n_nan_or_inf = decr_every_n_nan_or_inf
        self.incr_ratio = incr_ratio
        self.decr_ratio = decr_ratio
        self.use_dynamic_loss_scaling = use_dynamic_loss_scaling
        self.init_loss_scaling = float(init_loss_scaling)
        self.scale_tensor = torch.tensor(self.init_loss_scaling)
        self._good = torch.tensor(0)
        self._bad = torch.tensor(0)

    @property
    def scale(self) -> float:
        """The present factor, read from the device."""
        return self.scale_tensor.item()

    @property
    def good_windows(self) -> int:
        """Good windows in a row since the scale last grew."""
        return int(self._good)

    @property
    def bad_windows(self) -> int:
        """Overflows in a row since the scale last shrank."""
        return int(self._bad)

    def scale_on(self, device: torch.device) -> Tensor:
        """The present factor; the whole state moves to `device`, beside the gradients."""
        if self.scale_tensor.device != device:
            self.scale_tensor, self._good, self._bad = (
                tensor.to(device) for tensor in (self.scale_tensor, self._good, self._bad)
            )
        return self.scale_tensor

    def update(self, found_inf: bool | Tensor) -> None:
        """Count one window, and adapt the scale when its streak is full."""
        if not self.use_dynamic_loss_scaling:
            return
        overflow = torch.as_tensor(found_inf, device=self.scale_tensor.device).bool()
        good = torch.where(overflow, 0, self._good + 1)
        bad = torch.where(overflow, self._bad + 1, 0)
        shrinks = bad >= self.decr_every_n_nan_or_inf
        grows = good >= self.incr_every_n_steps
        shrunk = (self.scale_tensor * self.decr_ratio).clamp(min=1.0)
        grown = self.scale_tensor * self.incr_ratio
        grown = torch.where(grown.isfinite(), grown, self.scale_tensor)
        self.scale_tensor = torch.where(shrinks, shrunk, torch.where(grows, grown, self.scale_tensor))
        self._good = torch.where(grows, 0, good)
        self._bad = torch.where(shrinks, 0, bad)

    def described(self) -> str:
        """Settings and state in words, so that workers can compare them."""
        rule = f"* {self.incr_ratio} after {self.incr_every_n_steps}, * {self.decr_ratio} after "
        rule = f"{rule}{self.decr_every_n_nan_or_inf}" if self.use_dynamic_loss_scaling else "constant"
        return f"loss scale {self.scale} ({rule}) after {self.good_windows} good and {self.bad_windows} bad windows"

    def state_dict(self) -> dict[str, Any]:
        """The scale, where it began and both counts, as plain numbers."""
        return {
            "scale": self.scale,
            "init": self.init_loss_scaling,
            "good": self.good_windows,
            "bad": self.bad_windows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken. A constant scale is a setting, and stays what it is here."""
        saved = float(state["scale"])
        if not self.use_dynamic_loss_scaling:
            if saved != self.init_loss_scaling:
                tell_once(
                    "scaler.constant",
                    f"the loss scale is {self.init_loss_scaling:g}, as set here and constant; the saved run had "
                    f"{saved:g}.",
                )
            return
        if state.get("init", self.init_loss_scaling) != self.init_loss_scaling:
            tell_once(
                "scaler.init",
                f"the loss scale goes on from the saved {saved:g}: init_loss_scaling, {self.init_loss_scaling:g} here "
                f"and {state['init']:g} in the saved run, is where a new run begins.",
            )
        device = self.scale_tensor.device
        self.scale_tensor = torch.tensor(saved, device=device)
        self._good = torch.tensor(int(state["good"]), device=device)
        self._bad = torch.tensor(int(state["bad"]), device=device)


def _require(holds: bool, name: str, rule: str, value: float) -> None:
    if not holds:
        raise ValueError(f"{name} must be {rule}, not {value}.")
