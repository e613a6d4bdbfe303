"""Which parameters a list of patterns takes: plain rules over names and kinds, no tensors.

A pattern takes a parameter if it is one of its kinds (``bias``, ``batch_norm``; Fleet's ``.b_0`` means
``bias``), or if it fits its qualified name: the whole name when the pattern is a glob, any part of it
otherwise, which is Fleet's rule. What a wrapper puts before all names (``module.``) counts in neither. A
pattern that takes nothing is an error, because nobody writes one on purpose; only a kind may take nothing,
since one list of kinds serves many models, and ``*``, which is everything.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher, get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from fleetx.notices import tell_once
from fleetx.wrapped_names import unwrapped, unwrapped_pattern

if TYPE_CHECKING:
    from fleetx.names import ParameterInfo

FLEET_ALIASES = {".b_0": "bias"}
EVERYTHING = "*"
"""The one pattern that may take nothing, and needs no names."""
_GLOB_CHARACTERS = frozenset("*?[")


class ExclusionRow(NamedTuple):
    """One line of the overview: how many parameters a pattern took, and the first of them."""

    pattern: str
    count: int
    examples: tuple[str, ...]


@dataclass(frozen=True)
class Exclusion:
    """Who is excluded (one bool per parameter, in their order) and, per pattern, the names it took."""

    mask: tuple[bool, ...]
    taken: Mapping[str, tuple[str, ...]]

    def rows(self, examples: int = 3) -> list[ExclusionRow]:
        """One row per pattern, in the order the patterns were given."""
        return [ExclusionRow(pattern, len(took), took[:examples]) for pattern, took in self.taken.items()]


def exclude(
    patterns: Sequence[str],
    parameters: "Sequence[ParameterInfo | None]",
    *,
    known_kinds: Collection[str],
    setting: str = "exclude_from_weight_decay",
) -> Exclusion:
    """Decide who is excluded; None stands for a parameter nobody named, ``setting`` is named in errors."""
    check_patterns(patterns, setting)
    if not patterns:
        return Exclusion((False,) * len(parameters), {})
    named = _all_named(patterns, parameters, setting)
    plain = {pattern: unwrapped_pattern(pattern, [parameter.name for parameter in named]) for pattern in patterns}
    taken = {}
    for pattern in patterns:
        taken[pattern] = tuple(parameter.name for parameter in named if takes(plain[pattern], parameter, known_kinds))
        if not taken[pattern] and pattern != EVERYTHING:
            _explain_nothing_taken(pattern, named, known_kinds, setting)
    mask = tuple(any(takes(pattern, parameter, known_kinds) for pattern in plain.values()) for parameter in named)
    _tell_of_other_norms(taken, named, mask, setting)
    return Exclusion(mask, taken)


def takes(pattern: str, parameter: "ParameterInfo", known_kinds: Collection[str] = ()) -> bool:
    """Whether one pattern takes one parameter."""
    kind = FLEET_ALIASES.get(pattern, pattern)
    if kind in parameter.kinds:
        return True
    if parameter.kinds_known and kind in known_kinds:
        return False  # "norm" means normalisations, not a layer that happens to be called "normal"
    if _GLOB_CHARACTERS.intersection(pattern):
        return fnmatchcase(parameter.name, pattern)
    return pattern in parameter.name


def check_patterns(patterns: Sequence[str], setting: str) -> None:
    """Refuse anything but a list of non-empty strings."""
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise TypeError(f'{setting} must be a list of patterns, got {patterns!r}: write it as ["bias", "norm"].')
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{setting} must hold strings, got {pattern!r}: write a name, a glob or a kind.")
        if not pattern:
            raise ValueError(f'{setting} holds an empty pattern, which every name contains: write "*" to mean all.')


def _all_named(
    patterns: Sequence[str], parameters: "Sequence[ParameterInfo | None]", setting: str
) -> "list[ParameterInfo]":
    if set(patterns) == {EVERYTHING}:
        return [parameter or _nameless(number) for number, parameter in enumerate(parameters)]
    named = [parameter for parameter in parameters if parameter is not None]
    if missing := len(parameters) - len(named):
        raise ValueError(
            f"{setting}={list(patterns)!r} speaks of names, and {missing} of {len(parameters)} parameters "
            "have none: give the optimizer model.named_parameters() instead of model.parameters(), or call "
            "fleetx.names.record(model) before (fleet.distributed_model does it)."
        )
    plain = unwrapped([parameter.name for parameter in named])
    return [replace(parameter, name=name) for parameter, name in zip(named, plain, strict=True)]


def _nameless(number: int) -> "ParameterInfo":
    from fleetx.names import ParameterInfo  # which imports torch: a strategy does without

    return ParameterInfo(f"parameter {number}")


def _explain_nothing_taken(
    pattern: str, named: "Sequence[ParameterInfo]", known_kinds: Collection[str], setting: str
) -> None:
    """Return for a kind the model does not have; raise for anything else."""
    kind = FLEET_ALIASES.get(pattern, pattern)
    if kind in known_kinds:
        if named and not any(parameter.kinds_known for parameter in named):
            raise ValueError(
                f"{setting}: {pattern!r} is a kind of parameter, and only names were given, so no kind is "
                "known: call fleetx.names.record(model) before building the optimizer "
                "(fleet.distributed_model does it)."
            )
        return
    nearest = ", ".join(_nearest(pattern, [parameter.name for parameter in named]))
    kinds = get_close_matches(pattern.lower(), list(known_kinds), n=1, cutoff=0.8)
    meant = f"Did you mean the kind {kinds[0]!r}? " if kinds else ""
    raise ValueError(
        f"{setting}: {pattern!r} matches no parameter. A pattern is a part of a name, a glob over the whole "
        f"name, or a kind ({', '.join(known_kinds)}). The nearest names are: {nearest}. "
        f"{meant}Correct the pattern or remove it."
    )


def _tell_of_other_norms(
    taken: Mapping[str, Sequence[str]], named: "Sequence[ParameterInfo]", mask: Sequence[bool], setting: str
) -> None:
    """Say once if a kind of norm took nothing while norms of another kind are left in: that is rarely meant."""
    idle = [pattern for pattern, took in taken.items() if pattern.endswith("_norm") and not took]
    left = [parameter for parameter, out in zip(named, mask, strict=True) if "norm" in parameter.kinds and not out]
    if idle and left:
        own = ", ".join(sorted(left[0].kinds - {"norm", "bias"})) or "another kind"
        tell_once(
            f"idle {idle[0]}",
            f"{setting}: {idle[0]!r} takes nothing here, while the norm {left[0].name} is {own}, and is not excluded: "
            "'norm' takes norms of every kind.",
        )


def _nearest(pattern: str, names: Sequence[str], count: int = 3) -> list[str]:
    """The names with the most similar run of as many dotted parts as the pattern has."""
    matcher = SequenceMatcher(b=pattern)  # b is the side difflib prepares once

    def likeness(text: str) -> float:
        matcher.set_seq1(text)
        return matcher.ratio()

    def score(name: str) -> float:
        return max(likeness(run) for run in _runs(name, pattern.count(".") + 1))

    return sorted(names, key=score, reverse=True)[:count]


def _runs(name: str, length: int) -> Iterator[str]:
    parts = name.split(".")
    for start in range(max(1, len(parts) - length + 1)):
        yield ".".join(parts[start : start + length])
