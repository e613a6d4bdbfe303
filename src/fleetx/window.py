"""The merge window: what one update has seen so far.

A window holds the gradients, weights and losses of the micro-batches that belong to one update. Whether a
backward ends the window is said when backward is called, so forwards are free: they may be run for evaluation,
twice, or not at all. Gradients are merged in the parameters' dtype, but never below fp32, and they are summed
over the workers once, during the backward that ends the window.
"""

import json
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from fleetx.comm import sharing, stopping, world
from fleetx.comm.agreement import require_agreement
from fleetx.comm.batch_norms import backward_in_units
from fleetx.comm.overlap import Overlap
from fleetx.comm.reducer import Reducer, ReducerSettings, require_dense
from fleetx.comm.stragglers import OwnTime, Stragglers
from fleetx.gradient_marks import GradientMarks
from fleetx.names import label
from fleetx.notices import tell_once
from fleetx.numbers import LOW_PRECISION, Number, is_at_hand
from fleetx.outcome import HostValue

# Windows that live in this process: a GAN has two.
_windows: "weakref.WeakSet[Window]" = weakref.WeakSet()


@dataclass(frozen=True)
class Weighing:
    """How the micro-batches of one window count against each other.

    "mean": each counts once, and `unit` of them make a full window. "items": each counts as many items as it
    averages over; `unit`, this worker's first count, keeps the scaled losses near their natural size. "sum":
    gradients are added up, and only the mean over workers is taken.
    """

    kind: Literal["mean", "items", "sum"] = "sum"
    unit: Number = 1


@dataclass(frozen=True)
class Merged:
    """A window after reduction: sums over micro-batches and workers, still to be divided by `divisor`."""

    grads: list[Tensor]
    divisor: Number
    losses: list[Tensor]
    # What the losses are called; those of several are followed by whether each is trained.
    names: tuple[str, ...] = ("loss",)
    # How many workers held micro-batches, and how many have come to the end of their data.
    holding: Number = 1
    leaving: Number = 0
    overlap: Overlap | None = None
    # The sums of what travelled with the gradients beside these.
    late: Tensor | None = None


class Window:
    """Gradients, weights and losses of the micro-batches of one update, on this worker."""

    def __init__(
        self,
        parameters: Callable[[], list[Tensor]],
        settings: ReducerSettings | None = None,
        terms: Callable[[], list[str]] = list,
        late: Callable[[], Tensor] | None = None,
    ) -> None:
        self._parameters = parameters
        self._settings = settings or ReducerSettings()
        # What else all workers must agree on, in words: asked for when they compare what they reduce.
        self._terms = terms
        # Numbers that are summed with the gradients, and complete when the last of these has arrived.
        self._late = late
        self._reduced_names: tuple[str, ...] = ()
        self._reducer: Reducer | None = None
        self._is_new = True
        # How many workers held something, gave items=, and would have reduced something else.
        self._facts: list[HostValue] | None = None
        # Whether gradients on a device were written in the middle of the window before this one.
        self._suspicion: HostValue | None = None
        self._failure: BaseException | None = None
        self._own_time = OwnTime()
        self._stragglers: Stragglers | None = None
        self.reductions = 0
        # Called when a window has got its first micro-batch's forward, and when it is over: a checkpoint listens.
        self.on_begin: list[Callable[[], None]] = []
        self.on_end: list[Callable[[], None]] = []
        self.held = 0
        self.clear()
        _windows.add(self)

    @property
    def reducer(self) -> Reducer | None:
        """What sums over the workers; None before the first window ends, and for a worker alone."""
        return self._reducer

    def add(
        self,
        objective: Tensor,
        *,
        losses: Sequence[Tensor],
        weighing: Weighing,
        weight: Number,
        ends: bool,
        retain_graph: bool = False,
        names: tuple[str, ...] = ("loss",),
        items: Number = 1,
    ) -> None:
        """Run one micro-batch's backward; if it `ends` the window, reduce gradients while it runs.

        `losses` are the weighted values to report, called `names` on all workers; `weight` is what this micro-batch
        adds to the divisor, and `items` how much work it is. All micro-batches of a window have the same `weighing`.
        """
        if self.held == 0:
            self._begin(weighing)
            for tell in self.on_begin:
                tell()
        else:
            self._require_untouched()
        before, self._marks = self._marks, None
        self._names = names
        self.held += 1
        self.weight = self.weight + weight
        self._items = self._items + items
        values = [loss.detach() for loss in losses]
        self.losses = [a + b for a, b in zip(self.losses, values, strict=True)] if self.losses else values
        try:
            with self._reducing() if ends and world.size() > 1 else nullcontext():
                # A micro-batch without any items has nothing to differentiate.
                if objective.requires_grad:
                    self._backward(objective, retain_graph)
            if not ends and self._reducer is not None:
                self._reducer.adopt()
        except BaseException as error:
            self.fail(error)
            raise
        if not ends:
            self._marks = GradientMarks(self._members, before)

    def merge(self, weighing: Weighing | None = None, leaving: bool = False) -> Merged:
        """The sums over micro-batches and workers. All workers must call it, also one that holds nothing.

        That one says by `weighing` how windows are weighed where nobody counts items. `leaving` tells the others that
        this worker's data has come to its end.
        """
        if self.held == 0:
            self._begin(weighing or Weighing())
        elif self._marks is not None:
            self._require_untouched()
        self._require_unsuspected()
        if world.size() == 1:
            stopping.note_alone()
            grads = [require_dense(p, p.grad) for p in self._members if p.grad is not None]
            divisor, holding = self._divisor(self.weight), int(self.held > 0)
            return Merged(grads, divisor, self.losses, self._names, holding, int(leaving), late=self._late_now())
        sums = self._summed(leaving)
        if self.held == 0 and _others_changed(sums):
            self._reducer = None
            sums = self._summed(leaving)
        weight, holding, by_items, left, stop, changed, *losses = sums
        stopping.note(stop)
        reducer, stragglers = self._reducer, self._stragglers
        assert reducer is not None
        assert stragglers is not None
        stragglers.note(reducer.of_workers)
        self._check_others(holding, by_items, changed)
        if self.held == 0 and by_items.item() > 0:
            self.weighing = Weighing("items")
        # Workers that have nothing left meet once more, to learn that all are done.
        self.reductions += 1 if self.held or holding.item() > 0 else 0
        names = self._reduced_names
        return Merged(
            reducer.payloads, self._divisor(weight), losses, names, holding, left, reducer.overlap, reducer.late_sums
        )

    def _summed(self, leaving: bool) -> list[Tensor]:
        """What all workers gave beside their gradients, as sums."""
        if not self._has_left:
            with self._reducing(leaving):
                pass
        assert self._reducer is not None
        self._has_left = False
        sums = self._reducer.finish()
        self._own_time.begin(sums[0].device)
        return sums

    def _check_others(self, holding: Tensor, by_items: Tensor, changed: Tensor) -> None:
        """All gave items= or none, and reduce the same; so as not to wait for a device, of the window before."""
        facts = (holding, by_items, changed)
        if self._is_new or is_at_hand(by_items):
            _require_one_mind(*(fact.item() for fact in facts))
            self._is_new, self._facts = False, None
            return
        before, self._facts = self._facts, [HostValue(fact.clone()) for fact in facts]
        if before is not None:
            _require_one_mind(*(fact.get() for fact in before))

    def clear(self) -> None:
        """Forget the micro-batches. Gradients stay readable until the next window begins."""
        ends = self.held > 0
        self.held = 0
        self.weight: Number = 0
        self._items: Number = 0
        self.weighing = Weighing()
        self.losses: list[Tensor] = []
        self._members: list[Tensor] = []
        self._marks: GradientMarks | None = None
        self._differ: Tensor | None = None
        self._names = ("loss",)
        self._has_left = False
        for tell in self.on_end if ends else ():
            tell()

    def discard(self) -> None:
        """Forget the micro-batches and their gradients."""
        self.clear()
        for parameter in self._parameters():
            parameter.grad = None

    def fail(self, error: BaseException) -> None:
        """Give up a window that an error interrupted; with several workers also all that would follow.

        The others wait in the middle of a reduction that this worker left: whatever it sent next, they would take
        for something else.
        """
        error.add_note(f"FleetX: the merge window was discarded with its {self.held} micro-batches.")
        self.discard()
        if world.size() > 1:
            self._failure = error
            self._reducer = None

    def start_over(self) -> None:
        """Forget a window that all workers gave up together, before any gradient had left."""
        self.discard()
        self._failure = None
        self._reducer = None  # on all workers alike: they compare what they reduce when they make it anew

    def state_dict(self, copy: bool = True) -> dict[str, Any]:
        """This worker's part of a window in progress; without `copy` its tensors are the window's own."""
        held = self.held > 0
        return {
            "held": self.held,
            "weight": self.weight,
            "weighing": (self.weighing.kind, self.weighing.unit),
            "losses": [loss.clone() for loss in self.losses],
            "grads": [_copy(p.grad) if copy else p.grad for p in self._parameters()] if held else None,
            "rank": world.rank(),
            "workers": world.size(),
        } | ({"trained": [p.requires_grad for p in self._parameters()]} if held else {})

    def check_state(self, state: dict[str, Any]) -> None:
        """Gradients of a window in progress are a worker's own, so they must come from the same worker.

        And they are those of the parameters that are trained: to freeze some would be to do so in mid-window.
        """
        for parameter, trained in zip(self._parameters(), state.get("trained", ()), strict=False):
            if parameter.requires_grad != trained:
                there, here = ("trained", "frozen") if trained else ("frozen", "trained")
                raise ValueError(
                    f"the window in progress was saved with {label(parameter)} {there}, and it is {here} now: freeze "
                    "and free parameters between windows. Load it as it was saved, or save after flush()."
                )
        if state["held"] and (state["rank"], state["workers"]) != (world.rank(), world.size()):
            raise ValueError(
                f"a window in progress belongs to the worker that saved it: worker {state['rank']} of "
                f"{state['workers']} saved it, worker {world.rank()} of {world.size()} loads it. "
                "Save on every worker, or save after flush(), when no window is in progress."
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a window."""
        self.check_state(state)
        self.discard()
        if not state["held"]:
            return
        self._begin(Weighing(*state["weighing"]))
        parameters = self._parameters()
        self.held = state["held"]
        self.weight = state["weight"]
        self.losses = [loss.clone().to(parameters[0].device) for loss in state["losses"]]
        for parameter, grad in zip(parameters, state["grads"], strict=True):
            parameter.grad = None if grad is None else grad.clone().to(parameter.device)
        self._marks = GradientMarks(self._members)

    def _begin(self, weighing: Weighing) -> None:
        if self._failure is not None:
            raise RuntimeError(
                "an earlier window failed on this worker, so it is out of step with the others: "
                f"{type(self._failure).__name__}: {self._failure}. End this process; the job must be started anew."
            ) from self._failure
        stopping.window_begins()
        self.weighing = weighing
        self._members = self._trainable()
        for parameter in self._parameters():
            parameter.grad = None
            if parameter.dtype in LOW_PRECISION:
                # Autograd then accumulates in fp32 by itself.
                parameter.grad_dtype = torch.float32

    def _backward(self, objective: Tensor, retain_graph: bool) -> None:
        """Only this window's own parameters get gradients: a loss may reach into the window of another optimizer."""
        try:
            # With no other window open the choice is left to autograd, which is faster.
            others_open = any(other.held for other in _windows if other is not self)
            with backward_in_units(self._unit):
                objective.backward(retain_graph=retain_graph, inputs=self._members if others_open else None)
        except RuntimeError as error:
            if "second time" in str(error):
                error.add_note("FleetX: minimize() runs backward itself. Leave out your own loss.backward().")
            raise
        if all(parameter.grad is None for parameter in self._members):
            raise ValueError(
                "the loss reached none of the optimizer's parameters: it was computed by another model. "
                "Give minimize a loss of the model whose parameters the optimizer has."
            )

    def _require_untouched(self) -> None:
        """What others do to gradients or parameters in mid-window would silently change the update."""
        if not _same(self._members, self._trainable()):
            raise RuntimeError(
                f"parameters were frozen or freed while the window held {self.held} micro-batches. "
                "Do so between windows: call flush() or discard() first."
            )
        assert self._marks is not None
        touched = self._marks.replaced(self._members)
        differ = self._marks.differ()
        if touched is None and differ is True:
            touched = self._marks.first_differing()
        if touched is not None:
            raise RuntimeError(_touched(label(touched), f"while its window held {self.held} micro-batches"))
        if isinstance(differ, Tensor):
            self._differ = differ if self._differ is None else self._differ | differ

    def _require_unsuspected(self) -> None:
        """Values on a device are compared there; the host asks one window later, so as not to wait."""
        before, self._suspicion = self._suspicion, None if self._differ is None else HostValue(self._differ)
        self._differ = None
        if before is not None and before.get():
            raise RuntimeError(_touched("a parameter", "in the window before, whose update was wrong"))

    @contextmanager
    def _reducing(self, leaving: bool = False) -> Generator[None]:
        """Gradients that arrive inside leave for the other workers at once."""
        reducer = self._fitting_reducer()
        # A worker without samples, or whose data ran out first, joins the others with nothing to add.
        losses = self.losses or [torch.zeros(())] * (reducer.extras - len(_FACTS))
        prescale = self._unit
        by_items = self.held > 0 and self.weighing.kind == "items"
        facts = (self.held > 0, by_items, leaving, stopping.is_wanted(), False)
        extras = [self.weight, *map(float, facts), *(loss * prescale for loss in losses)]
        with reducer.overlapping(extras, prescale, self._own_time.latest(), self._late):
            yield
        self._has_left = True
        if self.held:
            self._own_time.end(reducer.of_workers.device, self._items)

    @property
    def _unit(self) -> Number:
        """Counts of different workers have different units, which are taken back before anything is summed."""
        return self.weighing.unit if self.weighing.kind == "items" else 1.0

    def _divisor(self, weight: Number) -> Number:
        if self.weighing.kind == "sum":
            return world.size()
        if self.weighing.kind == "items" and world.size() > 1:
            return weight
        return weight / self.weighing.unit

    def _trainable(self) -> list[Tensor]:
        return [parameter for parameter in self._parameters() if parameter.requires_grad]

    def _fitting_reducer(self) -> Reducer:
        """The reducer, made anew when parameters were frozen or freed, or other losses are reported."""
        reducer = self._reducer
        if reducer is not None and self._fits(reducer):
            return reducer
        if reducer is not None:
            sums = reducer.announce(_FACTS.index("changed"))
            if not _others_changed(sums):
                _refuse_two_minds(sums[_FACTS.index("changed")].item())
        device = self._members[0].device
        names, count = self._names_held(device)
        shapes = [f"{label(p)} {tuple(p.shape)} {p.dtype}" for p in self._members]
        terms = [*self._terms(), f"{self._settings}", f"losses {', '.join(names)}", f"numbers {count}"]
        self._is_new = True
        require_agreement([*terms, *shapes], device, "what a window reduces")
        self._reducer = Reducer(self._members, len(_FACTS) + count, self._settings, own=2, late=self._late_count())
        self._stragglers = Stragglers(sharing.host_names(device))
        self._reduced_names = names
        tell_once("fused", str(self._reducer))
        return self._reducer

    def _fits(self, reducer: Reducer) -> bool:
        # A worker that holds nothing takes any losses.
        losses_fit = (self._names, len(self.losses)) == (self._reduced_names, reducer.extras - len(_FACTS))
        return (losses_fit or not self.held) and reducer.late == self._late_count() and reducer.fits(self._members)

    def _late_now(self) -> Tensor | None:
        return None if self._late is None else self._late()

    def _late_count(self) -> int:
        numbers = self._late_now()
        return 0 if numbers is None else len(numbers)

    def _names_held(self, device: torch.device) -> tuple[tuple[str, ...], int]:
        """What the losses are called, and how many numbers they are; who holds none hears it from one who does."""
        own = (self._names, len(self.losses) if self.held else 1)
        speaker = sharing.least(world.rank() if self.held else world.size(), device)
        if speaker == world.size():
            return own
        names, count = json.loads(sharing.from_worker(speaker, json.dumps(own), device))
        return own if self.held else (tuple(names), count)


_FACTS = ("weight", "holding", "by items", "leaving", "stop", "changed")
"""What each worker says beside its losses; "changed": it would have reduced something else."""


def _others_changed(sums: list[Tensor]) -> bool:
    """Whether all workers that hold something have announced that they reduce something else from now on."""
    return sums[_FACTS.index("changed")].item() > 0 and sums[_FACTS.index("holding")].item() == 0


def _touched(whose: str, when: str) -> str:
    return (
        f"the gradient of {whose} was changed outside of the optimizer {when}: by a backward(), zero_grad() or "
        "clipping of your own. Let minimize() do all of it (clip_norm= clips); for other gradients use "
        "torch.autograd.grad, or flush() first."
    )


def _require_one_mind(holding: float, by_items: float, changed: float) -> None:
    if changed:
        _refuse_two_minds(changed)
    if by_items not in (0, holding):
        raise ValueError(
            f"{by_items:.0f} of {holding:.0f} workers gave items= to minimize, and the others did not: the workers "
            "differ in what a window reduces. Give it on all workers or on none."
        )


def _refuse_two_minds(changed: float) -> NoReturn:
    raise ValueError(
        f"{changed:.0f} of {world.size()} workers added, froze or freed parameters, or report other losses, and the "
        "others did not: the workers differ in what a window reduces. Do so on all workers, before the same window."
    )


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


def _copy(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.clone()
