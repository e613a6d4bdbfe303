"""`CUDAPlace` in scripts that must also run without a GPU: only where the user asked for it, and said."""

import os

from fleetx.launch.devices import ON_HOST
from fleetx.notices import tell_once
from fleetx.static import places


def CUDAPlace(index: int = 0) -> places.Place:  # noqa: N802
    """A GPU; the host where the job was started with `--devices cpu,...`."""
    if os.environ.get(ON_HOST) == "1":
        tell_once("cuda-place", f"CUDAPlace({index}) is the host here: the job was started with --devices cpu.")
        return places.CPUPlace()
    return places.CUDAPlace(index)
