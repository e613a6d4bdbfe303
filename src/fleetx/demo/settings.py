"""What a run was asked for, as its folder keeps it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fleetx.applications.digits import default_strategy
from fleetx.strategy import DistributedStrategy

SETTINGS, STRATEGY = "settings.json", "strategy.toml"
CHECKPOINTS, WEIGHTS = "checkpoints", "weights.safetensors"


@dataclass(frozen=True)
class Settings:
    """The options of `fleetx train`; the strategy as used has a file of its own."""

    workers: int
    global_batch: int
    epochs: int
    seed: int
    baseline: bool
    checks: bool
    default_strategy: bool
    command: str

    def save(self, folder: Path, strategy: DistributedStrategy) -> None:
        """Write both files."""
        (folder / SETTINGS).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        strategy.save(folder / STRATEGY)

    def strategy(self, folder: Path) -> DistributedStrategy:
        """The strategy of the run in this folder."""
        # In a file every setting looks as if the user had given it, and some that rest would be reported.
        return default_strategy() if self.default_strategy else DistributedStrategy.load(folder / STRATEGY)

    @classmethod
    def load(cls, folder: Path) -> "Settings":
        """Read what `save` wrote."""
        return cls(**json.loads((folder / SETTINGS).read_text(encoding="utf-8")))
