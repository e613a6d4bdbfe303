"""Masked language modelling: which tokens are hidden from the model, and what stands in their place."""

import math

import numpy as np

from fleetx.data.vocabulary import Vocabulary

SHARE = 0.15
# Of the chosen tokens: this share becomes [MASK], up to the second a random token, the rest stays as it is.
MASKED, REPLACED = 0.8, 0.9


def mask_tokens(
    tokens: np.ndarray, vocabulary: Vocabulary, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens as the model sees them, the chosen positions in order, and the tokens that were there.

    15 % of the tokens that are not special are chosen, rounded, and at least one: the number is exact rather than
    drawn, so that `most_masked` bounds it and batches keep their shape.
    """
    candidates = np.flatnonzero(~vocabulary.special[tokens])
    count = max(1, round(SHARE * len(candidates)))
    positions = np.sort(rng.permutation(candidates)[:count])
    originals = tokens[positions]
    replacements = vocabulary.ordinary[rng.integers(len(vocabulary.ordinary), size=count)]
    draw = rng.random(count)
    seen = tokens.copy()
    seen[positions] = np.where(draw < MASKED, vocabulary["[MASK]"], np.where(draw < REPLACED, replacements, originals))
    return seen, positions, originals


def most_masked(length: int) -> int:
    """How many tokens of a sequence can be chosen at most."""
    return math.ceil(SHARE * length)
