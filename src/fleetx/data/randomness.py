"""Random decisions about samples: each a function of seed, epoch and sample, never of who decides or in which order."""

import hashlib
import random
import struct
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fleetx.data.checks import whole_number

# Independent purposes draw from independent streams of the same epoch.
SAMPLE_STREAM, SWAP_STREAM, READING_STREAM, COLLATING_STREAM = range(4)
LARGEST_SEED = 2**40


class Epoch(NamedTuple):
    """One pass over a data set. Together with a sample's index it fixes every random decision about that sample."""

    seed: int
    number: int

    def rng(self, index: int, stream: int = SAMPLE_STREAM) -> np.random.Generator:
        """A generator of its own for each sample, the same in whichever process it is made."""
        # Philox is counter-based: an index in the upper half of the counter starts a sequence that meets no other.
        key = np.array([self.seed, self.number], dtype=np.uint64)
        counter = np.array([0, 0, index, stream], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))

    def seed_generators(self, index: int, stream: int) -> None:
        """Seed the global generators of torch (on the host), numpy and Python, which data sets of others draw from."""
        words = struct.pack("<4Q", self.seed, self.number, index, stream)
        # Each gets bits of its own: from equal seeds numpy and Python would draw equal numbers.
        for_torch, for_python, for_numpy = struct.unpack("<2QI", hashlib.blake2b(words, digest_size=20).digest())
        torch.default_generator.manual_seed(for_torch)  # torch.manual_seed would seed every device too
        random.seed(for_python)
        np.random.seed(for_numpy)

    def order(self, size: int) -> Tensor:
        """All indices, shuffled; equal on all workers."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.number)
        return torch.randperm(size, generator=generator)


@contextmanager
def generators_kept() -> Generator[None]:
    """Put the three global generators back as they were: dropout must not follow the samples."""
    on_host, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        torch.set_rng_state(on_host)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def check_seed(seed: int) -> int:
    """The seed, if it can be used."""
    seed = whole_number("the seed", seed, "0 is usual")
    if not 0 <= seed < LARGEST_SEED:
        raise ValueError(f"the seed must be from 0 to 2**40 - 1, got {seed}.")
    return seed
