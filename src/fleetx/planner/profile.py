"""Measures a model: the bytes of each segment in each state at two micro-batches or four, its seconds at up to three.

The whole model runs and is watched at every cut: see `trials`. Nothing is left behind: see `untouched`. It begins with
two samples and takes more only while plenty of memory is free.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from fleetx.planner import cache, link
from fleetx.planner.agreement import ALONE, Agreement
from fleetx.planner.allocator import gaps_on, let_segments_grow, reserve_on
from fleetx.planner.chain import State
from fleetx.planner.costs import Profile
from fleetx.planner.counting import EVERYTHING, Counting
from fleetx.planner.facts import device_name, fact
from fleetx.planner.feeding import Feeding, bytes_per_sample
from fleetx.planner.lines import Line
from fleetx.planner.merging import couples_samples
from fleetx.planner.timing import Timing
from fleetx.planner.tracing import OTHER_SEED, Trace, dropped, trace
from fleetx.planner.trials import Trials
from fleetx.planner.untouched import untouched
from fleetx.planner.updating import cost_of_update, fixed_bytes, moved_by
from fleetx.slicing import Batch
from fleetx.terminal import Console, Progress

_NARROW = State("dear", dear=("attention", "narrow_matmul"))
STATES = (EVERYTHING, State("inputs"), State("dear"), _NARROW)
NO_LOSS = "the model gave no loss, so that the mean of what it gave stood for one: give loss_fn to plan that too."
_NO_BLOCKS = (
    "no modules to cut at were found, each of which must run once in a forward: the plan chooses the micro-batch "
    "alone, and nothing is recomputed."
)
_NOTHING_COMPILED = "segments are what compile=True compiles, and there are none: nothing is compiled."
_NOT_COMPILED = "bytes are those of code that is not compiled: on a CPU others cannot be counted."
COMPILED_STATES = (EVERYTHING, State("inputs"), _NARROW)  # each kind of dear outputs is a compilation of its own


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
    agreement: Agreement = ALONE,
) -> Profile:
    """The profile of a model that is cut at these modules, in each of these states.

    `sizes`: the two micro-batches to measure at; chosen by what the device does with them if not given. `bandwidth`:
    of the host link, measured if not given. `cached`: looked up on disk, and kept there. Workers with an `agreement`
    run the same trials.
    """
    let_segments_grow(feeding.device)
    states = states or (COMPILED_STATES if compile else STATES)
    key = key_of(feeding, sample, cuts, optimizer, compile, states=states, sizes=sizes, bandwidth=bandwidth)
    known = cache.load(key) if cached else None
    if known is not None and {segment.name for segment in known.segments} != set(cuts):
        known = None  # somebody put another one in its place
    if agreement.everywhere(known is not None) and known is not None:
        return known
    measuring = _Measuring(feeding, sample, cuts, compile, states, agreement)
    try:
        profile = measuring.profile(optimizer, sizes, bandwidth)
    finally:
        measuring.trials.free()
    if cached and not measuring.lacked_room:  # else states are missing that there may be room for next time
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
    settings = {"optimizer": _described(optimizer, feeding.model), "compile": compile, "states": list(states)}
    return cache.key_of(feeding, sample, cuts, settings | {"sizes": sizes, "bandwidth": bandwidth})


def _described(optimizer: Optimizer | None, model: nn.Module) -> str:
    """Its kind, its settings, and what it moves: all of that decides what its state takes."""
    if optimizer is None:
        return ""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    moved = [names[id(parameter)] for parameter in moved_by(optimizer, list(model.parameters()))]
    groups = [
        {name: value for name, value in group.items() if name not in ("params", "lr")}
        | {"dtypes": sorted({str(parameter.dtype) for parameter in group["params"]})}
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__qualname__} {fact(groups, depth=4)} {moved}"


class _Measuring:
    def __init__(
        self,
        feeding: Feeding,
        sample: Batch,
        cuts: Sequence[str],
        compile: bool,
        states: Sequence[State],
        agreement: Agreement = ALONE,
    ) -> None:
        self.feeding = feeding
        self.sample = sample
        self.lacked_room = False
        self.seen = trace(feeding, sample)
        self.states = list(states) if cuts else [EVERYTHING]
        self.trials = Trials(feeding, sample, self._once(cuts), compile, agreement)

    def _once(self, cuts: Sequence[str]) -> list[str]:
        once = {call.name: call for call in self.seen.once}
        wrong = [name for name in cuts if name not in once]
        others = {call.name for call in trace(self.feeding, self.sample, seed=OTHER_SEED).once}
        if {*cuts} - {*wrong} - others or {*wrong} & others:
            raise ValueError(dropped(sorted(({*cuts} - others) ^ {*wrong})[0]))
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
        gradient_parts, smallest = self._gradient_parts(), self._smallest()
        more = trace(self.feeding, self.trials.sample, samples=2 * self.seen.samples)
        block = largest_growth(self.seen, more) if device.type == "cuda" else 0.0  # elsewhere none leaves gaps
        grows = max(0, more.saved - self.seen.saved) / (more.samples - self.seen.samples)
        saved = self.seen.saved / self.seen.samples
        counting = Counting(self.trials, saved, grows, sends=self.trials.agreement.everywhere(rate > 0))
        with untouched(model, self.feeding.loss_fn, self.sample), self._progress() as say:
            counted_at = sizes or counting.sizes()
            all_sizes = counted_at if sizes else counting.with_many(counted_at)
            segments = counting.segments(self.states, all_sizes, say)
            counted = Profile(
                segments,
                tail_bytes=counting.tail(all_sizes),
                fixed=fixed_bytes(model, update),
                batch_bytes=Line(0.0, bytes_per_sample(self.trials.sample)),
                update_seconds=update.seconds,
                update_bytes=update.working_bytes,
                bandwidth=rate,
                reserve=reserve_on(device),
                gaps=gaps_on(device, block),
                sizes=counted_at,
                device=device_name(device),
                compiled=self.trials.compile,
                couples_samples=any(isinstance(m, _BatchNorm) and m.training for m in model.modules()),
                loss_couples_samples=couples_samples(self.feeding, self.trials.batch(4)),
                notes=(*update.notes, *counting.notes, *self._notes(counting)),
                gradient_parts=gradient_parts,
                smallest=smallest,
            )
            timing = Timing(self.trials, self.seen, counted, counting.states)
            timed_at = timing.sizes() if sizes is None and self.trials.on_gpu else counted_at
            profile = timing.profile(timed_at, say)
            if timed_at[-1] > all_sizes[-1]:
                tail_bytes = counting.tail_of_many(all_sizes, timed_at[-1], timing.frugal)
                profile = replace(profile, tail_bytes=tail_bytes)
        self.lacked_room = len(profile.notes) > len(counted.notes) or bool(counting.notes)
        return replace(profile, segments=tuple(segment.distinct() for segment in profile.segments))

    @contextmanager
    def _progress(self) -> Iterator[Callable[[str], None]]:
        """Shows what is being done; each state is announced twice, and again if it is timed with fewer samples."""
        console = Console(stderr=True)
        with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
            parts = 2 * len(self.states)
            task, said = progress.add_task("measuring", total=parts), count()

            def say(what: str) -> None:
                done = min(next(said), parts - 1)  # what is announced only begins
                progress.update(task, description=what, completed=done)

            yield say

    def _notes(self, counting: Counting) -> Iterator[str]:
        if counting.is_apart:
            yield _NOT_COMPILED
        if not self.seen.has_loss:
            yield NO_LOSS
        if not self.trials.cuts:
            yield _NO_BLOCKS
            if self.trials.compile:
                yield _NOTHING_COMPILED

    def _smallest(self) -> int:
        """One, if the model takes a single sample: a batch norm over nothing but samples does not."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what it says of a single sample is of no interest
                trace(self.feeding, self.trials.sample, samples=1)
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
        parts = [0] * (len(self.trials.cuts) + 1)
        for parameter in self.feeding.model.parameters():
            if parameter.requires_grad:
                used = last.get(id(parameter), math.inf)
                place = sum(ends[name] < used for name in self.trials.cuts)
                parts[place] += parameter.numel() * max(4, parameter.element_size())
        return tuple(parts)


def largest_growth(few: Trace, more: Trace) -> float:
    """Bytes per sample of the saved tensor that grows most with the samples; copies of weights do not grow."""
    if len(few.blocks) == len(more.blocks):
        grown = max((b - a for a, b in zip(few.blocks, more.blocks, strict=True)), default=0)
    else:  # which of them are the same is not known
        grown = max(more.blocks, default=0) - max(few.blocks, default=0)
    return max(0, grown) / (more.samples - few.samples)
