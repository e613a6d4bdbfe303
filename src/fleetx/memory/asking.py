"""What is asked of `memory.apply`: what it cannot mean is refused with the rule, the value and the remedy."""

import difflib
from collections.abc import Sequence
from typing import Any

from torch import nn

from fleetx.memory.states import Segment

COMPILE_OPTIONS = ("fullgraph", "dynamic", "backend", "mode", "options")
"""What torch.compile takes besides the function."""


def require_list(segments: object) -> Sequence[Any]:
    """What was given as segments, if it is a list."""
    if isinstance(segments, str):
        raise TypeError(
            f"segments must be a list of names or Segments, got the text {segments!r}: write [{segments!r}]."
        )
    if not isinstance(segments, Sequence) or isinstance(segments, (bytes, bytearray)):
        raise TypeError(
            f"segments must be a list of names or Segments, got a value of type {type(segments).__name__}: write for "
            "example ['encoder.layer.*']."
        )
    return segments


def require_name(number: int, one: object, model: nn.Module) -> None:
    """One of a list of segments is a name, or a Segment."""
    if isinstance(one, (str, Segment)):
        return
    names = [name for name, module in model.named_modules() if module is one and name]
    raise TypeError(
        f"segments must be a list of names or Segments, and segments[{number}] is of type {type(one).__name__}: write "
        + (f"its name, {names[0]!r}." if names else "the name of a module, for example 'encoder.layer.0'.")
    )


def require_use_of_host(host_memory: object, wanted: Sequence[Segment]) -> None:
    """A limit on what is not used would be in vain, and nobody would know."""
    if all(segment.home != "host" for segment in wanted):
        raise ValueError(
            f"host_memory limits what waits on the host, got {host_memory!r} and no segment with home='host': set "
            "home='host', or leave host_memory out."
        )


def require_compile_options(compile: object, options: dict[str, Any], own: Sequence[str]) -> None:
    """`own` are the names of the other options there are."""
    if not isinstance(compile, bool):
        raise TypeError(f"compile must be True or False, got {compile!r}.")
    unknown = [name for name in options if name not in COMPILE_OPTIONS]
    if unknown:
        near = difflib.get_close_matches(unknown[0], [*own, *COMPILE_OPTIONS], n=1, cutoff=0.5)
        raise TypeError(
            f"memory.apply has no option {unknown[0]!r}" + (f"; did you mean {near[0]!r}?" if near else ".")
        )
    if options and not compile:
        raise ValueError(f"{', '.join(options)} are options of torch.compile: set compile = True, or leave them out.")
