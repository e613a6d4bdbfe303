"""Measures a model: the bytes and seconds of each segment in each state, at two small micro-batches.

The whole model runs, with all segments in the same state, and is watched at every cut; segments that are alike share
their median times. Nothing is left behind: see `untouched`. It begins with two samples and takes more only while plenty
of memory is free.
"""

import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn
from torch.optim import Optimizer

from fleetx import memory
from fleetx.memory import Applied, Segment, offload
from fleetx.planner import cache, link
from fleetx.planner.allocator import let_segments_grow, reserve_on
from fleetx.planner.chain import State
from fleetx.planner.costs import Line, OptionCost, Profile, SegmentCost
from fleetx.planner.feeding import Feeding, bytes_per_sample, placed, resized
from fleetx.planner.meter import meter_for
from fleetx.planner.observing import Bytes, Figures, Watch, bytes_of, seconds_of
from fleetx.planner.tracing import Trace, trace
from fleetx.planner.untouched import untouched
from fleetx.planner.updating import cost_of_update, fixed_bytes
from fleetx.slicing import Batch, batch_size

EVERYTHING = State("everything")
_NARROW = State("dear", dear=("attention", "narrow_matmul"))
STATES = (EVERYTHING, State("inputs"), State("dear"), _NARROW)
COMPILED_STATES = (EVERYTHING, State("inputs"), _NARROW)  # each kind of dear outputs is a compilation of its own
_WARM_UP, _ROUNDS = 2, 3
_SHARE = 0.25  # of the free memory that measuring may take
_SATURATED = 1.7  # a forward of twice the samples that takes so many times as long: the device is busy
_LARGEST = 64


class Seen(NamedTuple):
    """A state at one size."""

    seconds: list[Figures]
    bytes: Bytes
    away: Bytes | None  # with all of it on the host


def measure(
    feeding: Feeding,
    sample: Batch,
    cuts: Sequence[str],
    *,
    optimizer: Optimizer | None = None,
    compile: bool = False,
    states: Sequence[State] | None = None,
    sizes: tuple[int, int] | None = None,
    bandwidth: float | None = None,
    cached: bool = True,
    everywhere: Callable[[bool], bool] = bool,
) -> Profile:
    """The profile of a model that is cut at these modules, in each of these states.

    `sizes`: the two micro-batches to measure at; chosen by what the device does with them if not given. `bandwidth`:
    of the host link, measured if not given. `cached`: looked up on disk, and kept there. `everywhere` makes of what is
    so on this worker whether it is so on all of them: a forward in which workers wait for each other must run as often
    on each, whatever its clock, its free memory and its disk say.
    """
    let_segments_grow(feeding.device)
    states = states or (COMPILED_STATES if compile else STATES)
    key = key_of(feeding, sample, cuts, optimizer, compile, states=states, sizes=sizes, bandwidth=bandwidth)
    known = cache.load(key) if cached else None
    if known is not None and {segment.name for segment in known.segments} != set(cuts):
        known = None  # somebody put another one in its place
    if everywhere(known is not None) and known is not None:
        return known
    profile = _Measuring(feeding, sample, cuts, compile, states, everywhere).profile(optimizer, sizes, bandwidth)
    if cached:
        cache.save(key, profile)
    return profile


def key_of(
    feeding: Feeding,
    sample: Batch,
    cuts: Sequence[str],
    optimizer: Optimizer | None,
    compile: bool,
    *,
    states: Sequence[State] | None = None,
    sizes: tuple[int, int] | None = None,
    bandwidth: float | None = None,
) -> str:
    """Under which name `measure` keeps what it finds on disk."""
    states = states or (COMPILED_STATES if compile else STATES)
    settings = {"optimizer": _described(optimizer), "compile": compile, "states": list(states)}
    return cache.key_of(feeding, sample, cuts, settings | {"sizes": sizes, "bandwidth": bandwidth})


def _described(optimizer: Optimizer | None) -> str:
    return "" if optimizer is None else f"{type(optimizer).__qualname__} {optimizer.defaults}"


class _Measuring:
    def __init__(
        self,
        feeding: Feeding,
        sample: Batch,
        cuts: Sequence[str],
        compile: bool,
        states: Sequence[State],
        everywhere: Callable[[bool], bool] = bool,
    ) -> None:
        self.feeding = feeding
        # No more than will be measured: the sample may be a whole global batch.
        self.sample = placed(resized(sample, min(batch_size(sample), _LARGEST)), feeding.device)
        self.compile = compile
        self.states = list(states)
        self.everywhere = everywhere
        self.seen = trace(feeding, sample)
        self.cuts = self._once(cuts)
        self.notes: list[str] = []
        self.sends = True
        self._compilations: Any = None

    def _once(self, cuts: Sequence[str]) -> list[str]:
        once = {call.name: call for call in self.seen.once}
        wrong = [name for name in cuts if name not in once]
        if wrong:
            raise ValueError(
                f"a model is planned at modules that run once in a forward, got {', '.join(wrong)}: name others, or "
                'leave the choice to FleetX with checkpoints = "auto".'
            )
        return sorted(cuts, key=lambda name: once[name].ends)

    def profile(self, optimizer: Optimizer | None, sizes: tuple[int, int] | None, bandwidth: float | None) -> Profile:
        """All of it."""
        model, device = self.feeding.model, self.feeding.device
        update = cost_of_update(model, optimizer)
        rate = link.bandwidth(device) if bandwidth is None else bandwidth
        self.sends = self.everywhere(rate > 0)
        with untouched(model):
            sizes = sizes or self._sizes()
            seen = self._all_states(sizes)
        self._free()
        plain = [seen[EVERYTHING, size] for size in sizes] if (EVERYTHING, sizes[0]) in seen else []
        if not plain:
            first = next(iter(seen))[0]
            plain = [seen[first, size] for size in sizes]
        states = [state for state in self.states if (state, sizes[1]) in seen]
        forward = [_medians(self._alike(), [f.forward_seconds for f in one.seconds]) for one in plain]
        tails = [[statistics.median(f.tail_seconds[half] for f in one.seconds) for one in plain] for half in (0, 1)]
        tail_bytes = [max(seen[state, size].bytes.tail_bytes for state in states) for size in sizes]
        segments = [
            SegmentCost(
                name,
                Line.through(sizes, [figures[i] for figures in forward]),
                tuple(option for state in states for option in self._options(state, i, sizes, seen, forward)),
            )
            for i, name in enumerate(self.cuts)
        ]
        return Profile(
            tuple(segments),
            tail_bytes=Line.through(sizes, tail_bytes),
            tail_forward_seconds=Line.through(sizes, tails[0]),
            tail_backward_seconds=Line.through(sizes, tails[1]),
            fixed=fixed_bytes(model, update),
            batch_bytes=Line(0.0, bytes_per_sample(self.sample)),
            update_seconds=update.seconds,
            update_bytes=update.working_bytes,
            bandwidth=rate,
            reserve=reserve_on(device),
            sizes=sizes,
            device=cache.device_name(device),
            compiled=self.compile,
            couples_samples=any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()),
            notes=(*update.notes, *self.notes),
            gradient_parts=self._gradient_parts(),
            smallest=self._smallest(),
        )

    def _smallest(self) -> int:
        """One, if the model takes a single sample: a batch norm over nothing but samples does not."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what it says of a single sample is of no interest
                trace(self.feeding, self.sample, samples=1)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # in whatever words it refuses
            return 2
        return 1

    def _gradient_parts(self) -> tuple[int, ...]:
        """Bytes of the gradients that come into being in each segment's backward, and in the tail's.

        A gradient is there from the backward of what used its parameter last. What was used by nobody who was seen
        counts as used in the tail: too early is safe.
        """
        ends = {call.name: call.ends for call in self.seen.calls}
        last: dict[int, int] = {}
        for call in self.seen.calls:
            for parameter in call.module._parameters.values():
                last[id(parameter)] = max(call.ends, last.get(id(parameter), -1))
        parts = [0] * (len(self.cuts) + 1)
        for parameter in self.feeding.model.parameters():
            if parameter.requires_grad:
                used = last.get(id(parameter), math.inf)
                place = sum(ends[name] < used for name in self.cuts)
                parts[place] += parameter.numel() * max(4, parameter.element_size())
        return tuple(parts)

    def _options(
        self, state: State, i: int, sizes: tuple[int, int], seen: dict[Any, Seen], forward: list[list[float]]
    ) -> list[OptionCost]:
        """A state of segment i on the device, and on the host."""
        both = [seen[state, size] for size in sizes]
        backward = [_medians(self._alike(), [f.backward_seconds for f in one.seconds]) for one in both]
        own = [_medians(self._alike(), [f.forward_seconds for f in one.seconds]) for one in both]
        # What the state costs in the forward already is counted with its backward.
        seconds = [b[i] + max(0.0, mine[i] - plain[i]) for b, mine, plain in zip(backward, own, forward, strict=True)]
        made = [_cost(state, Line.through(sizes, seconds), sizes, [one.bytes for one in both], i)]
        away = [one.away for one in both if one.away is not None]
        if len(away) == len(both) and away[-1].sent[i] > 0:
            made.append(_cost(state._replace(home="host"), made[0].seconds, sizes, away, i))
        return made

    def _all_states(self, sizes: tuple[int, int]) -> dict[tuple[State, int], Seen]:
        seen: dict[tuple[State, int], Seen] = {}
        console = Console(stderr=True)
        with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
            task = progress.add_task("measuring", total=len(self.states) * len(sizes))
            for state in self.states:
                progress.update(task, description=f"measuring: {state}")
                for size in sizes:
                    found = None
                    if state.save != "everything" or self.everywhere(self._has_room(size)):
                        found = self._state(state, size)
                    if not self.everywhere(found is not None) or found is None:
                        self.notes.append(f"{state} could not be measured: {size} samples do not fit.")
                        break
                    away = self._away(state, resized(self.sample, size), found.bytes)
                    seen[state, size] = found._replace(away=away)
                    progress.advance(task)
        seen = {(s, n): one for (s, n), one in seen.items() if all((s, size) in seen for size in sizes)}
        if not seen:
            raise torch.OutOfMemoryError(
                f"measuring needs memory for {sizes[0]} samples with recompute, and the device has too little free. "
                "Free some, or take shorter inputs."
            )
        return seen

    def _state(self, state: State, size: int) -> Seen | None:
        """All segments in one state; None if that does not fit."""
        batch = resized(self.sample, size)
        segments = [Segment(name, state.save, state.home, state.dear) for name in self.cuts]
        applied = self._applied(segments) if segments else None
        watch = Watch(self.feeding, self.cuts)
        try:
            for _ in range(_WARM_UP):
                watch.step(batch)
            seconds = [seconds_of(watch.step(batch), len(self.cuts)) for _ in range(_ROUNDS)]
            counted = bytes_of(self._metered(watch, batch), len(self.cuts))
        except torch.OutOfMemoryError:
            return None
        finally:
            watch.remove()
            if applied is not None:
                applied.remove()
            self._free()
        return Seen(seconds, counted, None)

    def _away(self, state: State, batch: Batch, here: Bytes) -> Bytes | None:
        """The bytes if everything that is saved waits on the host."""
        if not self.sends or len(self.cuts) < 2:
            return None
        segments = [Segment(name, state.save, "host", state.dear) for name in self.cuts]
        applied = self._applied(segments)
        watch = Watch(self.feeding, self.cuts)
        try:
            with _all_worth_moving():
                for _ in range(2):  # the first is not yet as all others
                    watch.step(batch)
                watch.sent = lambda: applied.statistics()["bytes_to_host"]
                return bytes_of(self._metered(watch, batch), len(self.cuts), state.save, here)
        except torch.OutOfMemoryError:
            return None
        finally:
            watch.remove()
            applied.remove()
            self._free()

    def _applied(self, segments: list[Segment]) -> Applied:
        """The states on the model; what was compiled for one of them serves the others."""
        if not self.compile:
            return memory.apply(self.feeding.model, segments)
        # Each size for itself, as in a training with one micro-batch size.
        applied = memory.apply(self.feeding.model, segments, compile=True, dynamic=False)
        self._compilations = self._compilations or applied.experience.compilations
        applied.experience.compilations = self._compilations
        return applied

    def _metered(self, watch: Watch, batch: Batch) -> Any:
        return watch.step(batch, meter_for(self.feeding.device))

    def _sizes(self) -> tuple[int, int]:
        """Two samples and four; more, if the device is not yet busy with that and has room."""
        size = 2
        if self.feeding.device.type != "cuda":
            return size, 2 * size
        before = 0.0  # not yet known: where there is no room for more, even so few may be too many
        while 2 * size < _LARGEST and self.everywhere(self._has_room(4 * size)):
            before = before or self._forward_seconds(size)
            now = self._forward_seconds(2 * size)
            if self.everywhere(now >= _SATURATED * before):
                break
            size, before = 2 * size, now
        return size, 2 * size

    def _forward_seconds(self, size: int) -> float:
        watch = Watch(self.feeding, [])
        batch = resized(self.sample, size)
        try:
            watch.step(batch)
            figures = [seconds_of(watch.step(batch), 0) for _ in range(2)]
        finally:
            watch.remove()
        return min(one.tail_seconds[0] for one in figures)

    def _has_room(self, size: int) -> bool:
        """Whether all activations of so many samples take but a part of the free memory."""
        if self.feeding.device.type != "cuda":
            return True
        free = torch.cuda.mem_get_info(self.feeding.device)[0]
        free += torch.cuda.memory_reserved(self.feeding.device) - torch.cuda.memory_allocated(self.feeding.device)
        return 1.5 * self.seen.saved / self.seen.samples * size <= _SHARE * free

    def _free(self) -> None:
        if self.feeding.device.type == "cuda":
            torch.cuda.empty_cache()

    def _alike(self) -> list[int]:
        """For each segment the number of its kind: the same modules with the same shapes."""
        kinds: dict[Any, int] = {}
        return [kinds.setdefault(_signature(self.seen, self.cuts, i), len(kinds)) for i in range(len(self.cuts))]


def _cost(state: State, seconds: Line, sizes: tuple[int, int], both: list[Bytes], i: int) -> OptionCost:
    def line(values: list[int]) -> Line:
        return Line.through(sizes, values)

    return OptionCost(
        state,
        seconds,
        kept=line([one.kept[i] for one in both]),
        forward_bytes=line([one.forward_bytes[i] for one in both]),
        backward_bytes=line([one.backward_bytes[i] for one in both]),
        sent=line([one.sent[i] for one in both]),
        holds=line([one.holds[i] for one in both]),
        released=line([min(one.sent[i], one.entering[i]) for one in both]),
    )


@contextmanager
def _all_worth_moving() -> Iterator[None]:
    """Inside, small tensors are sent too: those of a large micro-batch will not be small."""
    smallest, offload.SMALLEST = offload.SMALLEST, 1
    try:
        yield
    finally:
        offload.SMALLEST = smallest


def _signature(seen: Trace, cuts: Sequence[str], number: int) -> Any:
    """What ran in a segment."""
    ends = {call.name: call.ends for call in seen.calls}
    start = ends[cuts[number - 1]] if number else -1
    inside = [call for call in seen.calls if start < call.ends <= ends[cuts[number]]]
    parts = []
    for call in inside:
        sizes = tuple(tuple(parameter.shape) for parameter in call.module.parameters())
        parts.append((type(call.module), call.module.extra_repr(), call.shapes, sizes))
    return tuple(parts)


def _medians(kinds: list[int], rounds: list[list[float]]) -> list[float]:
    """For each segment the median over rounds and over all segments of its kind."""
    values: dict[int, list[float]] = {}
    for figures in rounds:
        for kind, value in zip(kinds, figures, strict=True):
            values.setdefault(kind, []).append(value)
    return [statistics.median(values[kind]) for kind in kinds]
