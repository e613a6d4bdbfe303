"""Large-batch optimizers, who they leave out, and learning-rate schedules counted in updates."""

from fleetx.optim.exclusion import Exclusion, ExclusionRow, exclude
from fleetx.optim.lamb import Lamb
from fleetx.optim.lars import Lars
from fleetx.optim.muon import Muon
from fleetx.optim.schedules import (
    Schedule,
    as_scheduler,
    constant,
    cosine_annealing,
    cosine_decay,
    linear_warmup,
    noam_decay,
    piecewise_constant,
    polynomial_decay,
    step_decay,
)
from fleetx.optim.watching import Spread, TrustRatios

__all__ = [
    "Exclusion",
    "ExclusionRow",
    "Lamb",
    "Lars",
    "Muon",
    "Schedule",
    "Spread",
    "TrustRatios",
    "as_scheduler",
    "constant",
    "cosine_annealing",
    "cosine_decay",
    "exclude",
    "linear_warmup",
    "noam_decay",
    "piecewise_constant",
    "polynomial_decay",
    "step_decay",
]
