"""Large-batch optimizers, who they leave out, and learning-rate schedules counted in updates."""

from fleetx.optim.exclusion import Exclusion, ExclusionRow, exclude
from fleetx.optim.lamb import Lamb
from fleetx.optim.lars import Lars
from fleetx.optim.schedules import (
    Schedule,
    as_scheduler,
    constant,
    cosine_annealing,
    linear_warmup,
    noam_decay,
    piecewise_constant,
    polynomial_decay,
)

__all__ = [
    "Exclusion",
    "ExclusionRow",
    "Lamb",
    "Lars",
    "Schedule",
    "as_scheduler",
    "constant",
    "cosine_annealing",
    "exclude",
    "linear_warmup",
    "noam_decay",
    "piecewise_constant",
    "polynomial_decay",
]
