"""rich's classes for terminals. A random number that rich draws while it is imported is put back."""

import random

_before = random.getstate()

from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402

random.setstate(_before)  # else the first call that needs a terminal would change what a script draws next

__all__ = ["Console", "Progress"]
