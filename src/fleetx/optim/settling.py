"""Who the patterns of an optimizer take, written into its groups as one bool per parameter."""

from collections.abc import Mapping, Sequence

from fleetx import inference, names
from fleetx.optim.exclusion import Exclusion, ExclusionRow, check_patterns, exclude
from fleetx.optim.groups import DTYPES, Group, call_it, infos

Masks = Mapping[str, str]
"""The mask that each setting gives."""

FOLLOWER = "exclude_from_adaptation"
"""The one setting that may be None: it then follows exclude_from_weight_decay."""


def settle(groups: Sequence[Group], masks: Masks) -> None:
    """Check every pattern, and write the masks that they give into the groups."""
    for group in groups:
        for setting in masks.values():
            if setting != FOLLOWER or group[setting] is not None:
                check_patterns(group[setting], setting)
                group[setting] = list(group[setting])
    for mask, setting in masks.items():
        for alike, exclusion in judge(groups, setting):
            excluded = iter(exclusion.mask)
            for group in alike:
                group[mask] = [not next(excluded) for _ in group["params"]]


def judge(groups: Sequence[Group], setting: str) -> list[tuple[list[Group], Exclusion]]:
    """Who the patterns of a setting take, for all groups with the same patterns at once."""
    alike: dict[tuple[str, ...], list[Group]] = {}
    for group in groups:
        patterns = group["exclude_from_weight_decay"] if group[setting] is None else group[setting]
        alike.setdefault(tuple(patterns), []).append(group)
    return [
        (same, exclude(patterns, infos(same), known_kinds=names.KINDS, setting=setting))
        for patterns, same in alike.items()
    ]


def rows(groups: Sequence[Group], setting: str) -> list[ExclusionRow]:
    """Per pattern of a setting: how many parameters it took, and the first of their names."""
    taken: dict[str, tuple[str, ...]] = {}
    for _, exclusion in judge(groups, setting):
        for pattern, took in exclusion.taken.items():
            taken[pattern] = taken.get(pattern, ()) + took
    return Exclusion((), taken).rows()


def check_dtypes(kind: str, group: Group) -> None:
    """Refuse parameters that are not real numbers of 16 bits or more, or that were made in inference mode."""
    inference.refuse_made((call_it(group, index), parameter) for index, parameter in enumerate(group["params"]))
    for index, parameter in enumerate(group["params"]):
        if parameter.dtype not in DTYPES:
            raise TypeError(
                f"{kind} updates parameters of {', '.join(map(str, DTYPES))}, and "
                f"{call_it(group, index)} is {parameter.dtype}: give it another optimizer"
                f"{', or keep it as real (torch.view_as_real)' if parameter.is_complex() else ''}."
            )


def table(title: str, found: Mapping[str, Sequence[ExclusionRow]], counts: Mapping[str, int], of: int) -> str:
    """Per setting a headed part: each pattern, how many parameters it took, and the first of them."""
    heads = ("pattern", "parameters", "such as")
    lines = [
        (row.pattern, str(row.count), ", ".join(row.examples) + (", …" if row.count > len(row.examples) else ""))
        for part in found.values()
        for row in part
    ]
    widths = [max(len(line[column]) for line in [heads, *lines]) for column in range(2)]

    def text(line: Sequence[str]) -> str:
        return f"  {line[0]:<{widths[0]}}  {line[1]:>{widths[1]}}  {line[2]}".rstrip()

    shown = [title]
    body = iter(lines)
    for setting, part in found.items():
        shown.append(f"{setting}: {counts[setting]} of {of} parameters")
        if part:
            shown += [text(heads), *(text(next(body)) for _ in part)]
    return "\n".join(shown)
