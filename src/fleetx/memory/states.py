"""What may happen to the activations of a segment: how much is saved, and where it waits for the backward."""

from dataclasses import dataclass
from typing import Literal, get_args

from fleetx.notices import shown

Save = Literal["everything", "dear", "inputs"]
Home = Literal["device", "host"]

DEAR_KINDS = ("matmul", "convolution", "attention")
"""Operations whose outputs take long to compute again for the memory they fill."""


@dataclass(frozen=True)
class Segment:
    """The part of a forward that ends with the output `until`, and what is saved of it.

    `until` names a module (a glob names several), or an operation in a module's own forward, such as
    `"encoder.block.0:add"`; `fleetx.memory.outputs(model, ...)` lists both. A segment is everything that ran since the
    previous one ended.

    - `save="inputs"`: only what the segment reads from outside; the rest is computed again in the backward.
    - `save="dear"`: also the outputs of `dear` operations: kinds of them (matmul, convolution, attention), or the
      names of submodules, whose matmuls, convolutions and attentions are meant. Both together mean these kinds inside
      these modules.
    - `save="everything"`: as if there were no segment.
    - `home="host"`: what is saved waits in host memory. Its copy may take the time of `lag` segments to get there,
      and it is asked for `lead` segments ahead of its use; for as long it takes memory on the device, too. Where
      segments are short and tensors large, copies need more of them to stay beside the computation.
    """

    until: str
    save: Save = "inputs"
    home: Home = "device"
    dear: tuple[str, ...] = DEAR_KINDS
    lag: int = 1
    lead: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.until, str) or not self.until:
            raise TypeError(
                f"Segment.until must be the name of a module or operation, got {shown(self.until)}: "
                "fleetx.memory.outputs(model, *inputs) lists them."
            )
        _require_operation(self.until)
        _require_choice("save", self.save, get_args(Save))
        _require_choice("home", self.home, get_args(Home))
        if not isinstance(self.dear, (tuple, list)) or not all(isinstance(name, str) for name in self.dear):
            raise TypeError(f"Segment.dear must be a tuple of names, got {shown(self.dear)}: write ('matmul',).")
        object.__setattr__(self, "dear", tuple(self.dear))
        if not self.dear:
            raise ValueError("Segment.dear must name something, got (): save 'inputs' to save no outputs.")
        if self.save != "dear" and self.dear != DEAR_KINDS:
            raise ValueError(f"Segment.dear is for save='dear', got {self.dear!r} with save={self.save!r}.")
        _require_count("lag", self.lag, least=1)
        _require_count("lead", self.lead, least=0)
        if self.home != "host" and (self.lag, self.lead) != (1, 1):
            raise ValueError(
                f"Segment.lag and lead are for home='host', got lag={self.lag}, lead={self.lead} with "
                f"home={self.home!r}: set home='host', or leave them out."
            )


def _require_operation(until: str) -> None:
    owner, colon, operation = until.partition(":")
    if colon and not operation.strip():
        whole = f"write {owner!r} for the module's output, or " if owner else ""
        raise ValueError(
            f"Segment.until names an operation after ':', and nothing follows in {until!r}: {whole}name one, such as "
            f"'{owner}:add'. fleetx.memory.outputs(model, *inputs) lists them."
        )


def _require_count(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"Segment.{name} must be a number of segments, {least} or more, got {shown(value)}.")


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"Segment.{name} must be one of {', '.join(map(repr, choices))}, got {shown(value)}.")
