"""Data sets and how they are dealt out to workers."""

from fleetx.data.digits import Digits, load_digits
from fleetx.data.sampling import ShardedBatches

__all__ = ["Digits", "ShardedBatches", "load_digits"]
