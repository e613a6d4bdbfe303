"""How large a batch is worth having: measured from the gradients that training computes anyway.

`estimators` is arithmetic on squared norms, `intervals` says how certain a ratio is, `window_squares` measures one
merge window, and `noise_scale` a run. Start reading at `NoiseScale`. The training step calls it; nothing else imports
this package.
"""

from fleetx.convergence.intervals import Interval
from fleetx.convergence.noise_scale import NoiseScale

__all__ = ["Interval", "NoiseScale"]
