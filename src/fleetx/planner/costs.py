"""What a step costs at any micro-batch size: the bytes and seconds of its segments, and of all around them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from fleetx.planner.chain import Chain, Option, Stage, State
from fleetx.planner.lines import NOTHING, Line

_BELIEVED = 0.9  # part of what a real step took less: another plan may be wrong by less
_LITTLE = 1e-3  # part of a backward that recompute and copies take at least: of equally fast plans, the simplest


class Reserve(NamedTuple):
    """What an allocator takes for tensors: so much for each of their bytes, and so much at all events."""

    factor: float = 1.0
    more: int = 0

    def of(self, used: int) -> int:
        """The bytes that it reserves for so many in use."""
        return math.ceil(used * self.factor) + self.more

    def leaves(self, memory: int) -> int:
        """What tensors may take of it."""
        return max(0, int((memory - self.more) / self.factor))


EXACTLY = Reserve()
_KEEPS_ALL = State()


@dataclass(frozen=True)
class OptionCost:
    """One state of a segment; see `chain.Option`."""

    state: State
    seconds: Line
    kept: Line
    forward_bytes: Line
    backward_bytes: Line
    sent: Line = NOTHING
    holds: Line = NOTHING
    released: Line = NOTHING
    launches: float = 0.0  # seconds: forward and backward together take no less, with however few samples

    @property
    def bytes(self) -> tuple[Line, ...]:
        """All but the time."""
        return self.kept, self.forward_bytes, self.backward_bytes, self.sent, self.holds, self.released

    def seconds_at(self, micro_batch: int, forward_seconds: float) -> float:
        """Of the backward, where the forward takes so long."""
        return max(self.seconds.at(micro_batch), self.launches - forward_seconds)

    def at(self, micro_batch: int, seconds: float) -> Option:
        """At a micro-batch size, where the backward takes so long."""
        return Option(
            self.state,
            seconds=seconds,
            kept=self.kept.bytes_at(micro_batch),
            forward_bytes=self.forward_bytes.bytes_at(micro_batch),
            backward_bytes=self.backward_bytes.bytes_at(micro_batch),
            sent=self.sent.bytes_at(micro_batch),
            holds=self.holds.bytes_at(micro_batch),
            released=self.released.bytes_at(micro_batch),
        )


@dataclass(frozen=True)
class SegmentCost:
    """A segment: the time of its forward, and its states."""

    name: str
    forward_seconds: Line
    options: tuple[OptionCost, ...]

    def distinct(self) -> "SegmentCost":
        """Without states that save dear outputs where there are none: they save the inputs, and no more.

        Told by their bytes on the device: two measured times are never quite the same, and copies differ in when they
        are over.
        """
        bytes_of = {option.state: option.bytes for option in self.options}
        least = bytes_of.get(State("inputs"))
        repeated = [s for s, size in bytes_of.items() if (s.save, s.home) == ("dear", "device") and size == least]
        differing = [o for o in self.options if o.state._replace(home="device") not in repeated]
        return replace(self, options=tuple(differing))


@dataclass(frozen=True)
class Profile:
    """Everything that planning needs to know of a model, a loss, an optimizer and a device."""

    segments: tuple[SegmentCost, ...]
    tail_bytes: Line = NOTHING
    tail_forward_seconds: Line = NOTHING
    tail_backward_seconds: Line = NOTHING
    fixed: Mapping[str, int] = field(default_factory=dict)  # bytes by kind
    batch_bytes: Line = NOTHING
    update_seconds: float = 0.0
    update_bytes: int = 0
    bandwidth: float = 0.0  # bytes per second to the host and back, while computing; 0: nothing is sent
    reserve: Reserve = EXACTLY
    sizes: tuple[int, int] = (1, 2)  # micro-batches at which times were taken, the two largest
    device: str = ""
    compiled: bool = False
    couples_samples: bool = False  # batch norms, which see a micro-batch at a time
    loss_couples_samples: bool = False  # so that merging gives another gradient than one forward
    notes: tuple[str, ...] = ()
    unexplained: Line = NOTHING  # bytes that a real step took beyond the prediction
    overrated: int = 0  # bytes that a real step did not take, though they were predicted
    gaps: Line = NOTHING  # bytes that the allocator does not find a use for, because they lie apart
    gradient_parts: tuple[int, ...] = ()  # bytes of each segment's gradients and of the tail's, if they may come late
    smallest: int = 1  # micro-batch that the model takes: some batch norms refuse a single sample

    def corrected(self, micro_batch: int, missing: int) -> "Profile":
        """The same, after a real step took so many bytes more than was predicted; or less, if that is negative.

        What was missing grows with the samples. What was too much is taken as constant, as what is added for the
        allocator is: what one sample did not take would be absurd times 64. And a part of it only, to be cautious.
        """
        of_tensors = missing / self.reserve.factor
        if missing > 0:
            return replace(self, unexplained=Line(0.0, self.unexplained.per_sample + of_tensors / micro_batch))
        return replace(self, overrated=self.overrated + int(-of_tensors * _BELIEVED))

    def chain(self, micro_batch: int, *, merged: bool = True) -> Chain:
        """The step at this micro-batch size, as one of several that are `merged`, or as the only one."""
        comes_late = bool(self.gradient_parts) and not merged
        fixed = {kind: 0 if comes_late and kind == "gradients" else size for kind, size in self.fixed.items()}
        fixed |= {"batch": self.batch_bytes.bytes_at(micro_batch), "gaps": self.gaps.bytes_at(micro_batch)}
        differs = self.unexplained.bytes_at(micro_batch) - self.overrated
        stages = [self._stage(segment, micro_batch, number) for number, segment in enumerate(self.segments)]
        return Chain(
            tuple(stages),
            # What is fixed is no less than nothing: the correction may come from a micro-batch with many more samples.
            fixed={**fixed, "unexplained": max(differs, -sum(fixed.values()))},
            tail_bytes=self.tail_bytes.bytes_at(micro_batch),
            tail_forward_seconds=self.tail_forward_seconds.at(micro_batch),
            tail_backward_seconds=self.tail_backward_seconds.at(micro_batch),
            update_bytes=self.update_bytes,
            bandwidth=self.bandwidth,
            gradients=self.gradient_parts if comes_late else (),
        )

    def _stage(self, segment: SegmentCost, micro_batch: int, number: int) -> Stage:
        forward = segment.forward_seconds.at(micro_batch)
        # The last segment is needed first in the backward: moving it away would be in vain.
        is_last = number == len(self.segments) - 1
        costs = [o for o in segment.options if o.state.home == "device" or not (self.bandwidth <= 0 or is_last)]
        # Measurements are not exact; but what does more is not faster.
        least = sum(o.seconds_at(micro_batch, forward) for o in costs if o.state == _KEEPS_ALL)
        options = [o.at(micro_batch, max(o.seconds_at(micro_batch, forward), least * _more(o.state))) for o in costs]
        following = self.tail_forward_seconds if is_last else self.segments[number + 1].forward_seconds
        window = following.at(micro_batch)
        waiting = [self._waiting(option, window) if option.sent else option for option in options]
        return Stage(segment.name, forward, tuple(waiting))

    def _waiting(self, option: Option, window: float) -> Option:
        """The same, with how much longer than the next segment's forward it takes until all is gone."""
        return replace(option, waiting=max(0.0, option.sent / self.bandwidth - window))

    def check(self) -> None:
        """Raise if these figures cannot have been measured; a file may have become anything."""
        wrong = [number for number in _numbers(self.as_dict()) if not 0 <= number < math.inf]
        if wrong:
            raise ValueError(f"what was measured is finite and not negative, got {wrong[0]}")
        if self.reserve.factor < 1 or not 1 <= self.sizes[0] < self.sizes[1] or self.smallest < 1:
            raise ValueError(f"impossible figures: {self.reserve}, sizes {self.sizes}, smallest {self.smallest}")
        chain = self.chain(self.sizes[1])
        if chain.fixed_bytes < 0 or not sum(chain.forward_seconds()) > 0:
            raise ValueError("a step takes memory and time, got less than none")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Profile":
        """From what JSON gave; anything missing or unknown raises."""
        line_names = (
            "tail_bytes",
            "tail_forward_seconds",
            "tail_backward_seconds",
            "batch_bytes",
            "unexplained",
            "gaps",
        )
        made: dict[str, Any] = dict(values) | {name: Line.read(values[name]) for name in line_names}
        made["reserve"] = Reserve(*values["reserve"])
        made["segments"] = tuple(_segment(one) for one in values["segments"])
        made |= {name: tuple(values[name]) for name in ("sizes", "notes", "gradient_parts")}
        return cls(**made)


def _numbers(values: Any) -> Iterator[float]:
    """All numbers in what JSON can hold."""
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, list | tuple):
        for value in values:
            yield from _numbers(value)
    elif isinstance(values, int | float):
        yield values


def _more(state: State) -> float:
    return 1 + _LITTLE * ((state.save != "everything") + (state.home == "host"))


def _segment(values: Mapping[str, Any]) -> SegmentCost:
    made: dict[str, Any] = dict(values)
    made["forward_seconds"] = Line.read(values["forward_seconds"])
    made["options"] = tuple(_option(one) for one in values["options"])
    return SegmentCost(**made)


def _option(values: Mapping[str, Any]) -> OptionCost:
    save, home, dear = values["state"]
    lines = {name: Line.read(value) for name, value in values.items() if name not in ("state", "launches")}
    return OptionCost(state=State(save, home, tuple(dear)), launches=values["launches"], **lines)
