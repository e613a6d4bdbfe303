"""Mixed precision: which parts of a model run low, and the scale that keeps small gradients alive."""

from fleetx.amp.precision import apply_precision, entries, low_dtype, outside_autocast
from fleetx.amp.scaler import LossScaler

__all__ = ["LossScaler", "apply_precision", "entries", "low_dtype", "outside_autocast"]
