"""A plan: micro-batch, merge, and the state of every segment, with what they are predicted to cost."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fleetx import memory
from fleetx.memory import Applied, Segment, applied_to
from fleetx.memory.experience import Experience
from fleetx.memory.names import Cuts, find_cuts
from fleetx.memory.refusing import HAS_A_PLAN
from fleetx.memory.traced import Traceable
from fleetx.notices import shown
from fleetx.planner.chain import Point, State
from fleetx.planner.field_types import require_types
from fleetx.slicing import Batch, batch_size, split

FORMAT, VERSION = "fleetx.plan", 1
_NOT_OF_A_PLAN = ("format", "version", "is_exact")  # the last one was in plans until November 2026
_COUNTS = {"micro_batch": 1, "k_steps": 1, "global_batch": 1, "memory": 0, "peak": 0, "host_bytes": 0, "fixed_bytes": 0}
_RATES = ("seconds", "samples_per_s")
_RATES_SINCE = ("update_seconds", "planning_seconds")  # that older plans have not


class RunnerUp(NamedTuple):
    """Another plan that fits, and is not as fast: by prediction, or in reality."""

    micro_batch: int
    k_steps: int
    samples_per_s: float
    peak: int
    states: str  # in words


class Purchase(NamedTuple):
    """What another budget would give."""

    memory: int
    samples_per_s: float
    micro_batch: int
    k_steps: int


class Measured(NamedTuple):
    """What a real step took."""

    peak: int
    seconds: float


class Moment(NamedTuple):
    """Bytes on the device at a cut of a real step, and the most since the cut before."""

    name: str
    phase: str
    bytes: int
    peak: int


@dataclass(frozen=True)
class Plan:
    """The fastest way found to train with a global batch within a memory budget.

    `seconds` are those of one update: all micro-batches and the optimizer. `peak` is what the device's allocator
    reserves at most. Both are predictions, until `verified` says that a real step was measured.
    """

    micro_batch: int
    k_steps: int
    global_batch: int
    names: tuple[str, ...]
    states: tuple[State, ...]
    memory: int
    host_memory: int | None
    peak: int
    peak_by_kind: Mapping[str, int]
    host_bytes: int
    seconds: float
    samples_per_s: float
    reason: str
    one_forward: bool = False
    compile: bool = False
    measured: Measured | None = None
    runners_up: tuple[RunnerUp, ...] = ()
    curve: tuple[Purchase, ...] = ()
    timeline: tuple[Point, ...] = ()
    fixed_bytes: int = 0
    update_seconds: float = 0.0  # of the optimizer
    device: str = ""
    notes: tuple[str, ...] = field(default=())
    moments: tuple[Moment, ...] = ()  # of a real step, if one was watched cut by cut
    fingerprint: str = ""  # of the model that was planned, if that is known
    # What it took to measure, plan and verify; 0 if that is not known. Plans are the same however long they took.
    planning_seconds: float = field(default=0.0, compare=False)

    @property
    def verified(self) -> bool:
        """Whether a real step was measured."""
        return self.measured is not None

    @property
    def shorter(self) -> int:
        """How many micro-batches have a sample less than the others."""
        return self.micro_batch * self.k_steps - self.global_batch

    @property
    def gradients_come_late(self) -> bool:
        """Whether there is one micro-batch, before which the last gradients are freed."""
        return any(point.gradients for point in self.timeline)

    @property
    def peak_of_trial(self) -> int:
        """The predicted peak of micro-batches without the update, which is not tried: it may take more than they do."""
        tried = [point.bytes for point in self.timeline if point.phase != "update"]
        return self.peak - (max(point.bytes for point in self.timeline) - max(tried) if tried else 0)

    def with_measurement(self, peak: int, seconds: float, moments: tuple[Moment, ...] = ()) -> "Plan":
        """The same plan, after a real step."""
        return replace(self, measured=Measured(int(peak), float(seconds)), moments=moments or self.moments)

    def measured_as(self, other: "Plan") -> "Plan":
        """This plan with what was measured of another one that does the same."""
        return replace(self, measured=other.measured, moments=other.moments)

    def taking_more(self, missing: int) -> "Plan":
        """The same plan, predicted to take so many bytes more at any moment."""
        unexplained = self.peak_by_kind.get("unexplained", 0) + missing
        return replace(
            self,
            peak=self.peak + missing,
            peak_by_kind={**self.peak_by_kind, "unexplained": unexplained},
            fixed_bytes=self.fixed_bytes + missing,
        )

    def of(self, model: nn.Module) -> "Plan":
        """The same plan, which from now on refuses models with other parameters."""
        return replace(self, fingerprint=fingerprint_of(model))

    def segments(self) -> list[Segment]:
        """What `fleetx.memory.apply` is to be given.

        Segments that keep everything at the end are left out: what follows the last cut is kept anyway. One stays, for
        what is sent to the host must not be the last. A compiled plan names all of them, since they are compiled.
        """
        listed = _segments(self.names, self.states)
        if not self.compile:
            while len(listed) > 1 and _keeps_all(listed[-1]) and _keeps_all(listed[-2]):
                listed.pop()
            if len(listed) == 1 and _keeps_all(listed[0]):
                return []
        return listed

    def apply(self, model: nn.Module, **compile_options: Any) -> Applied:
        """Put the plan on a model; if all activations are kept there is nothing to put, and the model is only checked.

        The caller cuts the batch: `k_steps` micro-batches of `micro_batch` samples. `remove()` of what is returned
        takes the plan off again.
        """
        cuts = self._cuts_of(model)
        segments = self.segments()
        if not segments:
            return self._nothing_on(model, cuts)
        limit = self.host_memory if any(segment.home == "host" for segment in segments) else None
        return memory.apply(model, segments, host_memory=limit, compile=self.compile, **compile_options)

    def split(self, batch: Batch) -> list[Batch]:
        """A batch in micro-batches, as `Step` cuts it: none larger than planned, and no two differ by more than one.

        Any nested tuple, list, dict or dataclass of tensors; smaller batches, such as the last one, have fewer of them.
        """
        size = batch_size(batch)
        if self.one_forward and size > self.micro_batch:
            raise ValueError(
                f"a plan for one forward keeps batches of up to {self.micro_batch:,} samples whole, got {size:,}: make "
                f"a plan with global_batch={size}."
            )
        return split(batch, self.k_steps if size == self.global_batch else math.ceil(size / self.micro_batch))

    def _cuts_of(self, model: nn.Module) -> Cuts:
        """Where the model is cut; another one than was planned is refused, though it may have the names that are used.

        What keeps everything is not installed, but its figures were predicted too.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"a plan is put on an nn.Module, not on a {type(model).__name__}: give the planned model.")
        if self.fingerprint and fingerprint_of(model) != self.fingerprint:
            inside = [name for name, child in model.named_children() if fingerprint_of(child) == self.fingerprint]
            remedy = (
                f"This one is around it: give model.{inside[0]}."
                if inside
                else "Give the planned model, or make a plan for this one."
            )
            raise ValueError(
                f"a plan is put on the model that it was made for, got another one, a {type(model).__name__}: its "
                f"parameters have other names, shapes or dtypes. {remedy}"
            )
        return find_cuts(model, _segments(self.names, self.states))

    def _nothing_on(self, model: nn.Module, cuts: Cuts) -> Applied:
        if applied_to(model) is not None:
            raise ValueError(HAS_A_PLAN)
        return Applied(model, Experience(cuts, Traceable.of(cuts)))

    def to_json(self) -> str:
        """As text that `from_json` reads."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """A plan from what `to_json` wrote."""
        try:
            values = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:  # nested too deep
            raise ValueError(f"a plan is JSON, and this is not ({error}): write it with plan.to_json().") from error
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f"a plan is a JSON object with format {FORMAT!r}, got {shown(values)}: make one anew.")
        if values.get("version") != VERSION:
            raise ValueError(
                f"this FleetX reads plans of version {VERSION}, got {shown(values.get('version'))}: make the plan anew."
            )
        try:
            plan = cls(**_read({name: value for name, value in values.items() if name not in _NOT_OF_A_PLAN}))
            require_types(plan)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            said = str(error).rstrip(".")
            raise ValueError(
                f"this plan is damaged, incomplete or has entries that plans do not have: {said}; make the plan anew."
            ) from error
        return plan

    def save(self, path: str | Path) -> None:
        """Write it to a file."""
        folder = Path(path).parent
        if not folder.is_dir():
            raise FileNotFoundError(f"a plan is saved in a folder that exists, got {str(path)!r}: make {folder} first.")
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read it from a file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"a plan is text in UTF-8, and {str(path)!r} is not ({error}): write it with plan.save()."
            ) from error
        try:
            return cls.from_json(text)
        except ValueError as error:
            raise ValueError(f"{str(path)!r}: {error}") from error

    def __str__(self) -> str:
        from fleetx.planner.table import as_text

        return as_text(self)


def fingerprint_of(model: nn.Module) -> str:
    """What its parameters are called, their shapes, and their dtypes where they are not the usual one."""
    facts = [
        (name, list(parameter.shape), *([] if parameter.dtype == torch.float32 else [str(parameter.dtype)]))
        for name, parameter in model.named_parameters()
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _segments(names: Sequence[str], states: Sequence[State]) -> list[Segment]:
    return [Segment(name, *state) for name, state in zip(names, states, strict=True)]


def _keeps_all(segment: Segment) -> bool:
    return segment.save == "everything" and segment.home == "device"


def _read(values: dict[str, Any]) -> dict[str, Any]:
    measured = values["measured"]
    if len(values["names"]) != len(values["states"]):
        raise ValueError(f"{len(values['names'])} segments have {len(values['states'])} states")
    names, states = (
        tuple(values["names"]),
        tuple(State(save, home, tuple(dear)) for save, home, dear in values["states"]),
    )
    _segments(names, states)  # refuses states that there are not
    _require_figures(values)
    return values | {
        "names": names,
        "states": states,
        "measured": None if measured is None else Measured(*measured),
        "runners_up": tuple(RunnerUp(*one) for one in values["runners_up"]),
        "curve": tuple(Purchase(*one) for one in values["curve"]),
        "timeline": tuple(Point(*one) for one in values["timeline"]),
        "notes": tuple(values["notes"]),
        "moments": tuple(Moment(*one) for one in values["moments"]),
    }


def _require_figures(values: Mapping[str, Any]) -> None:
    """What a training would otherwise stumble over much later."""
    for name, least in _COUNTS.items():
        if type(values[name]) is not int or values[name] < least:
            raise ValueError(f"{name} must be a whole number, {least} or more, got {shown(values[name])}")
    rates = {name: values[name] for name in _RATES} | {name: values.get(name, 0.0) for name in _RATES_SINCE}
    for name, rate in rates.items():
        if type(rate) not in (int, float) or not 0 <= rate < math.inf:
            raise ValueError(f"{name} must be a number, 0 or more, got {shown(rate)}")
    batch, steps = values["global_batch"], values["k_steps"]
    if steps > batch or values["micro_batch"] != math.ceil(batch / steps):
        raise ValueError(
            f"{batch} samples in {steps} micro-batches are {math.ceil(batch / steps)} in each, "
            f"got micro_batch {values['micro_batch']}"
        )
    if not isinstance(values.get("fingerprint", ""), str):
        raise ValueError(f"fingerprint must be text, got {shown(values['fingerprint'])}")
    limit = values["host_memory"]
    if limit is not None and (type(limit) is not int or limit < 0):
        raise ValueError(f"host_memory must be a whole number of bytes or null, got {shown(limit)}")
