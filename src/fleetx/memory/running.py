"""One forward of a model that is cut into segments: opens and closes them as their outputs come."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fleetx.memory import dear, randomness
from fleetx.memory.buffers import Snapshot, modules_of, tensors_of
from fleetx.memory.checking import LateFillers, checksum
from fleetx.memory.experience import Experience, Learned
from fleetx.memory.leaf import FreeLeaf, Leaf, NotedLeaf
from fleetx.memory.names import Cuts, operation_name
from fleetx.memory.offload import Offloader
from fleetx.memory.readers import Readers, pointers
from fleetx.memory.recompute import Frame, Kept, Saved, unchanged
from fleetx.memory.recording import Recorder, drop_deaf
from fleetx.memory.shielding import shielded
from fleetx.memory.states import DEAR_KINDS, Segment
from fleetx.memory.statistics import is_counting
from fleetx.memory.structures import Structure, tensors_in
from fleetx.memory.surroundings import Surroundings, settle_attention
from fleetx.memory.tape import External, Tape, pointer_of, version_of

_active = threading.local()
MANY = 128
FEW = 16
"""So much may happen in a segment that is new, or known, before anybody wonders whether the forward is still on."""


def active_run() -> "Run | None":
    """The forward that is under way in this thread."""
    return getattr(_active, "run", None)


def end_stale() -> None:
    """End forwards of this thread that were left without a word."""
    drop_deaf()
    while (run := active_run()) is not None and run.is_stale():
        run.end(failed=True)
        drop_deaf()


@contextmanager
def no_run() -> Iterator[None]:
    """Inside, modules run as if they were not cut."""
    outer, _active.run = active_run(), None
    try:
        yield
    finally:
        # Of a model within that has a plan of its own: it is not told if it is left because enough was computed.
        while (left := active_run()) is not None:
            left.end(failed=True)
        _active.run = outer


class Run:
    """The state of one forward."""

    def __init__(self, experience: Experience, model: nn.Module) -> None:
        end_stale()
        self.experience = experience
        self.model = model
        self._is_told = _is_called(model)  # else nothing can be learned from the stack: compiled code calls it
        self._wonders_at = MANY
        modules = modules_of(model)
        held = tensors_of(modules, "_parameters", "_buffers")
        self.devices = randomness.devices_of(held)
        _require_one_to_move_from(self.devices, experience.cuts)
        self.device = self.devices[0]  # the one from which tensors move to the host
        settle_attention(self.device)
        self.generators: Any = self.devices  # on all of them numbers may be drawn
        self.kinds = tuple(dict.fromkeys(["cpu", *(device.type for device in self.devices)]))
        self.nested = 0  # calls of the model by itself
        self.depth = 0  # within modules that run as a whole
        self._is_busy = False
        self._is_off = False  # whether the recorder is
        self._free: FreeLeaf | None = None  # a module that runs without being watched
        self._is_calling = False
        self.ordinal = -1
        self.is_first = not experience.segments
        self._modes = tuple((one.training, *one._forward_pre_hooks, None, *one._forward_hooks) for one in modules)
        self.seen: list[Learned] = []
        self.containers: list[tuple[str, dict[str, int]]] = []
        # Held, so that their memory becomes nobody else's even if the model replaces them.
        kept = [tensor for tensor in held if not is_lazy(tensor)]
        self._kept = {pointer: t.untyped_storage() for t in kept if (pointer := pointer_of(t)) is not None}
        counting = [one for one in modules if is_counting(one)]
        self._statistics = {pointer_of(tensor) for tensor in tensors_of(counting, "_buffers")}
        self._readers = Readers()
        self._leaf: NotedLeaf | None = None
        self._late_fillers = LateFillers()
        self.frame = self._open()
        self._outer = active_run()
        self.recorder = Recorder(self)
        is_compiled = experience.compilations is not None
        self._pack = shielded(self.pack, is_compiled)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, shielded(self.unpack, is_compiled))
        self._is_alone = _top_hooks() is None
        self._hooks.__enter__()
        self.recorder.__enter__()
        if experience.compilations is not None:
            experience.compilations.install(experience.cuts.leaves.values())
        _active.run = self

    # Segments -----------------------------------------------------------------------------------------------

    def _open(self) -> Frame:
        self.ordinal += 1
        state = self.experience.expected(self.ordinal)
        frame = Frame(state.until, state, Tape(self.kinds), self.devices, next(self.experience.numbers))
        frame.kept, frame.within = self._kept, self.experience.within
        known = self.experience.segments[self.ordinal] if self.ordinal < len(self.experience.segments) else None
        frame.is_compiled = self.experience.compilations is not None
        frame.is_divided = known is not None and known.is_divided
        # In the first forward nobody knows how many segments will come.
        frame.is_checked = (self.is_first or _is_repeated(frame)) and self._is_unproven()
        frame.expected = [] if known is None else known.looks
        self._wonders_at = MANY if known is None else max(FEW, 2 * len(known.looks))
        return frame

    def _is_unproven(self) -> bool:
        """Whether nobody has seen yet that the present segment gives the same when it is repeated."""
        known = self.experience.segments
        return self.ordinal >= len(known) or self._modes not in known[self.ordinal].proven

    def cut(self, segment: Segment) -> None:
        """The output that ends a segment is there."""
        frame = self.frame
        if frame.state != segment and not self.is_first:
            self.experience.harmless = None  # what is expected does not always come
        frame.name, frame.state = segment.until, segment
        learned = self._learned(segment)
        self.seen.append(learned)
        learned.looks = frame.looks
        if segment.save == "dear" and self.experience.compilations is not None:
            # If it ran freely, because something else was expected, nobody looked.
            learned.is_divided = not frame.undivided and (frame.is_divided or not frame.ran_freely)
            self.experience.note_undivided(segment, frame.undivided)
        self._settle(frame, learned)
        self.frame = self._open()

    def _settle(self, frame: Frame, learned: Learned) -> None:
        """Carry out what the segment's state says; what cannot be repeated saves everything."""
        state = frame.state
        on_host = state.home == "host" and not self._is_last()
        offloader = self.experience.for_device(self.device) if on_host else None
        frame.offloader = self.experience.offloader
        if frame.offloader is not None:
            frame.offloader.release_due(frame.number)
        if frame.ran_freely:
            frame.lost = frame.lost or "it was expected to keep everything"  # the forward went another way
        if any(external.was_written() for external in frame.tape.externals):
            frame.lost = frame.lost or "something wrote to its inputs"
        keeps = not _is_repeated(frame)
        learned.lost = learned.lost + 1 if frame.lost and not keeps else 0
        if learned.lost == 2:  # the first time may have taught us how
            self.experience.complaints.append(
                f"the segment that ends at {state.until} keeps everything, as it could not be repeated: {frame.lost}."
            )
        if frame.lost or keeps:
            frame.park_saved(offloader, at_once=self.is_first) if offloader else frame.keep()
        else:
            learned.fills_late = learned.fills_late or frame.fills_late
            is_sure = frame.is_checked or self._modes in learned.proven
            frame.stops_early = is_sure and not learned.fills_late and self.experience.compilations is None
            frame.proven = partial(learned.note_proven, self._modes)
            frame.drop()
            if offloader is not None:
                frame.park_inputs(offloader, at_once=self.is_first)

    def _is_last(self) -> bool:
        """Whether this segment is needed first in the backward, so that moving it away would be in vain."""
        return not self.is_first and self.ordinal == len(self.experience.segments) - 1

    def _learned(self, segment: Segment) -> Learned:
        known = self.experience.segments
        if self.ordinal < len(known) and known[self.ordinal].state == segment:
            return known[self.ordinal]
        return Learned(segment)

    def end(self, *, failed: bool) -> None:
        """The forward is over; what ran since the last cut stays as it is."""
        _active.run = self._outer
        self._end_leaf()
        if self._is_calling:  # the recorder is being asked, and torch will put it back: it goes later
            self.recorder.listener = None
        else:
            self._switch_on()
            self.recorder.__exit__(None, None, None)
        if self._free is not None:
            self._free.leave()
        if self._free is None or self._is_on_top():
            self._hooks.__exit__(None, None, None)
        if self.experience.compilations is not None:
            self.experience.compilations.uninstall(self.experience.cuts.leaves.values())
        self.frame.keep()
        self.frame.offloader = self.experience.offloader
        if failed:
            self.experience.inside_dear = 0  # who was interrupted did not count down
        else:
            self.experience.segments = self.seen
        # They know each other; without this they would live until the garbage is collected.
        self.__dict__.clear()

    # When nobody tells that it is over ----------------------------------------------------------------------

    def is_stale(self) -> bool:
        """Whether the model was left without a word, as by an interrupt from the keyboard: torch calls no hooks then.

        Only if what it left behind can be taken away: if nobody put something on top of it since.
        """
        if not self._is_told or _is_called(self.model):
            return False
        return (self._free is not None or self._is_on_top()) and (
            self._is_off or self._is_calling or self.recorder.is_innermost
        )

    def _is_on_top(self) -> bool:
        """Whether what autograd saves is handed to this forward first."""
        top = _top_hooks()
        return top is not None and top[0] == self._pack

    def _wonders(self) -> bool:
        """So much has happened in this segment that the forward may long be over."""
        frame, limit = self.frame, self._wonders_at
        if len(frame.saved) < limit and len(frame.tape.calls) < limit:
            return False
        self._wonders_at *= 2
        return self.is_stale()

    # What autograd saves -------------------------------------------------------------------------------------

    def is_kept(self, tensor: Tensor) -> bool:
        """Whether the tensor is, or lies in, a parameter or buffer, which live anyway."""
        return pointer_of(tensor) in self._kept

    def pack(self, tensor: Tensor) -> Kept | Saved:
        """Autograd wants to save a tensor."""
        if self._wonders():
            self.end(failed=True)
            return Kept(tensor.detach(), version_of(tensor))
        if self.is_kept(tensor):
            return Kept(tensor.detach(), version_of(tensor))
        if self.depth == 0 and not self._is_calling:  # by a function of somebody's own, which is not on the tape
            self.experience.note_unseen(self.frame)
            return Kept(tensor.detach(), version_of(tensor))
        return self.frame.pack(tensor)

    @staticmethod
    def unpack(saved: Kept | Saved) -> Tensor:
        """Autograd wants it back."""
        if isinstance(saved, Kept):
            return unchanged(saved.tensor, saved.version, "a parameter")
        tensor = saved.frame.take_at_hand(saved.number)
        if tensor is not None:
            return tensor
        with no_run():
            return saved.get()

    # What containers do themselves --------------------------------------------------------------------------

    def is_listening(self) -> bool:
        """Whether a container is doing something itself."""
        return self.depth == 0 and not self._is_busy and active_run() is self

    def busy(self) -> "Busy":
        """Inside, what is done is ours, and no part of the model."""
        return Busy(self)

    def become_busy(self) -> None:
        """See busy."""
        self._is_busy = True
        if self.recorder.is_innermost:  # else it stays, and does not listen; but each question costs time
            self.recorder.__exit__(None, None, None)
            self._is_off = True

    def listen_again(self) -> None:
        """See busy."""
        if self.__dict__:  # else it was found to be over
            self._is_busy = False
            if self._leaf is None and self._free is None:
                self._switch_on()

    def _switch_on(self) -> None:
        if self._is_off:
            self.recorder.__enter__()
            self._is_off = False

    @contextmanager
    def calling(self, args: Any, kwargs: Any, written: list[Tensor]) -> Iterator["Begun"]:
        """A function is called inside that will write to these tensors."""
        noted = None
        if written or kwargs.get("generator") is not None:
            noted = self._noted(args, kwargs, written)
        random = randomness.state(self.devices) if self.frame.is_checked else None
        begun = Begun(noted, written, len(self.frame.looks), self._dear(), random)
        self._is_calling = True
        try:
            with nullcontext() if begun.dear is None else dear.Saving(begun.dear):
                yield begun
        finally:
            if self.__dict__:  # else it was found to be over
                self._is_calling = False

    def called(self, function: Callable[..., Any], args: Any, kwargs: Any, output: Any, begun: "Begun") -> None:
        """A function gave or changed tensors."""
        if self._wonders():
            self._is_calling = True  # the recorder is being asked still
            self.end(failed=True)
            return
        tape, saves = self.frame.tape, range(begun.first, len(self.frame.looks))
        noted = begun.noted or self._noted(args, kwargs, [])
        call = tape.note_call(function, noted, output, Surroundings.now(self.kinds), saves)
        call.dear = begun.dear if begun.dear is not None and begun.dear.saved else None
        if begun.random is not None and not begun.random.is_same(randomness.state(self.devices)):
            call.sums = [checksum(one) for one in tensors_in(output)]  # somebody may have seeded a generator before
        if saves:
            self.frame.undivided = self.frame.undivided or "what is computed between modules is not compiled"
        tape.note_written(begun.written)
        self._after_write(begun.written)
        segment = self.experience.cuts.operations.get(self._operation(function))
        if self.frame.is_checked and self._late_fillers.are_behind(tensors_in(output)):
            self.frame.fills_late = True
        if segment is not None:
            self.cut(segment)

    def _operation(self, function: Callable[..., Any]) -> str:
        """The name of this call: the container, the function, and a number from the second time on."""
        name, counts = self.containers[-1]
        return operation_name(name, function, counts)

    def _dear(self) -> dear.Noted | None:
        """For the dear outputs of a call, if the segment saves them."""
        state = self.frame.state
        if state.save != "dear" or self.experience.compilations is not None:
            return None
        return dear.Noted(_kinds(state), self.generators, _where_dear(state, self.experience))

    # What is read and written -------------------------------------------------------------------------------

    def _noted(
        self, args: Any, kwargs: Any, written: list[Tensor], *, is_sure: bool = True, is_likely: bool = True
    ) -> tuple[list[Any], Structure]:
        """The inputs of a call; of those that it will write to, whoever needs them again has a copy now.

        If that is not likely the present segment goes without, since large inputs would be there twice: should it
        happen, the segment keeps everything this once. Those that ended before cannot.
        """
        ids = {id(tensor) for tensor in written}
        noted = self.frame.tape.note_inputs(args, kwargs, lambda t: self._external(t, leaves=id(t) not in ids))
        self._readers.copy_before(written, is_sure, without=None if is_likely else self.frame)
        if self.experience.offloader is not None:
            for pointer in pointers(written):
                self.experience.offloader.finish(pointer)
        return noted

    def _after_write(self, written: list[Tensor]) -> None:
        """Several copies of one memory do not see what is written to each other."""
        if self._readers.share(written, self.frame):
            self.frame.lost = "it writes to memory that several of its inputs share"

    def _external(self, tensor: Tensor, leaves: bool) -> External:
        # Detached: itself it knows the graph, which may come to know the segment.
        held = tensor if isinstance(tensor, nn.Parameter) else tensor.detach()
        noted = External(held, version_of(held), tensor.requires_grad, self.is_kept(tensor))
        if noted.is_kept and pointer_of(tensor) in self._statistics:
            noted.copy(is_sure=True)  # they are written to without a trace, by other forwards too
        if leaves and not noted.is_kept:
            state = self.frame.state
            if state.home == "host" and state.save == "inputs" and not self.is_first and not self._is_last():
                self.frame.park_input(noted, self.experience.for_device(self.device), early=True)
        self._readers.add(tensor, self.frame, noted)
        return noted

    # What runs as a whole -----------------------------------------------------------------------------------

    def enter_leaf(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module that runs as a whole begins."""
        self.depth += 1
        if self.depth > 1:
            return
        tensors = tensors_in((args, kwargs))
        if self._may_run_freely(module):
            self._enter_free(module, tensors)
            return
        is_known = id(module) in self.experience.written
        may_write = self.experience.written_by(module, tensors)
        is_likely = is_known or any(getattr(part, "inplace", False) for part in module.modules())
        noted = self._noted(args, kwargs, may_write, is_sure=is_known, is_likely=is_likely)
        snapshot = self.experience.watch.before(module)
        self._leaf = NotedLeaf(
            module, tensors, noted, snapshot, Surroundings.now(self.kinds), len(self.frame.looks), self._dear()
        )
        if self.experience.compilations is None:
            self._leaf.enter()
        else:
            self._enter_compiled(self._leaf)

    def _enter_compiled(self, leaf: Leaf) -> None:
        assert self.experience.compilations is not None
        dear = self.frame.state.dear if self.frame.is_divided else None
        leaf.enter_compiled(self.experience.compilations, dear, self.frame)

    def _enter_free(self, module: nn.Module, tensors: list[Tensor]) -> None:
        """A module begins that nobody needs to watch, but for what the compiler must be able to compute again."""
        snapshot = self.experience.watch.before(module) if self.frame.is_divided else None
        self._free = FreeLeaf(module, tensors, snapshot)
        if self.experience.compilations is not None:
            self._enter_compiled(self._free)
        self._hooks.__exit__(None, None, None)
        self.frame.ran_freely = True

    def _may_run_freely(self, module: nn.Module) -> bool:
        """Whether all that a module saves stays where it is, and it changes nothing that others may need again.

        Then it runs as in a model that is not cut: to be asked about each tensor that is saved would cost time.
        """
        if _is_repeated(self.frame) or self.frame.state.home != "device":
            return False
        if self.is_first or not self.experience.is_harmless(module):
            return False
        if not (self._is_alone and self._is_on_top()):  # others would have to be asked each time, or never
            return False
        if self.ordinal >= len(self.experience.segments) and not self._has_seen_all():
            return False  # not the end yet, though the last forward ended here
        return not self._readers.read_any(tensors_of(modules_of(module), "_buffers"))

    def _has_seen_all(self) -> bool:
        """Whether no cut is left to which this forward might still come."""
        return len({learned.state.until for learned in self.seen}) == len(self.experience.cuts.in_order())

    def leave_leaf(self, output: Any) -> None:
        """It ends, be it by an error."""
        self.depth -= 1
        if self.depth > 0:
            return
        if self._free is not None:
            self._leave_free(self._free, output)
            return
        leaf = self._end_leaf()
        if leaf is None or (output is None and sys.exc_info()[0] is not None):
            self.frame.lost = "a module failed in it"  # should the container go on after that
            return
        saves = range(leaf.first, len(self.frame.looks))
        call = self.frame.tape.note_call(leaf.callee, leaf.noted, output, leaf.where, saves)
        call.dear = leaf.dear
        if self.frame.is_checked:
            outputs = tensors_in(output)
            call.sums = [checksum(one) for one in outputs]
            if self._late_fillers.are_behind(outputs):
                self.frame.fills_late = True
        self._learn_written(leaf)
        changed = leaf.hidden.changed() if leaf.hidden is not None else ""
        if changed:
            self.frame.lost = f"a {type(leaf.module).__name__} changed a {changed}, into which nobody can look"
        call.snapshot = self.experience.watch.after(leaf.snapshot)
        if call.snapshot is None:
            self.frame.lost = f"a {type(leaf.module).__name__} changed its parameters, or a buffer for the first time"
        elif not call.snapshot.attributes.is_written:
            self.experience.note_harmless(leaf.module)
        if self.experience.compilations is not None:
            self._note_undivided(leaf, call.snapshot)
        for slot, copy in [] if call.snapshot is None else call.snapshot.copies:
            if slot.tensor is not None:
                self._readers.give_copy(slot.tensor, copy, self.frame)

    def _note_undivided(self, leaf: Leaf, after: Snapshot | None) -> None:
        """A compiled module has run: may the compiler save its dear outputs alone next time?"""
        self.frame.undivided = self.frame.undivided or leaf.why_undivided(after)
        if self.frame.is_divided and leaf.writes(after):
            self.experience.segments[self.ordinal].is_divided = False
            self._refuse_new_writes(leaf)

    def _refuse_new_writes(self, leaf: Leaf) -> None:
        raise RuntimeError(
            f"a {type(leaf.module).__name__} in the segment that ends at {self.frame.name!r} wrote to its inputs, or "
            "to what it holds, which it had not done before: its gradients would be wrong, as compiled dear outputs "
            "are computed again from these. The next forward takes that into account; save='inputs' does at once."
        )

    def _leave_free(self, free: FreeLeaf, output: Any) -> None:
        """A module that nobody watched ends. Should it have written to something, it is watched from now on."""
        free.leave()
        self.experience.note_written(free.module, free.inputs.written())
        if _top_hooks() is not None:
            self.end(failed=True)  # it left hooks of somebody's, under which ours cannot be put any more
            return
        self._hooks.__enter__()
        self._free = None
        if output is None and sys.exc_info()[0] is not None:
            return
        if free.snapshot is not None:
            self._note_undivided(free, self.experience.watch.after(free.snapshot))
        if self.experience.offloader is not None:
            _prefetch_when_reached(output, free.inputs.tensors, self.experience.offloader, self.frame.number)

    def _learn_written(self, leaf: NotedLeaf) -> None:
        """A module has run: now it is known to which of its inputs it writes."""
        written = leaf.inputs.written()
        self.experience.note_written(leaf.module, written)
        self._after_write([tensor for place, tensor in enumerate(leaf.inputs.tensors) if place in written])
        self._readers.uncopy(leaf.inputs.tensors)

    def _end_leaf(self) -> NotedLeaf | None:
        leaf, self._leaf = self._leaf, None
        if leaf is not None:
            leaf.leave()
        return leaf


class Busy:
    """See Run.busy; a class, as what is made of a generator takes its time, and modules are many."""

    __slots__ = ("run",)

    def __init__(self, run: Run) -> None:
        self.run = run

    def __enter__(self) -> None:
        self.run.become_busy()

    def __exit__(self, *_: object) -> None:
        self.run.listen_again()


class Begun(NamedTuple):
    """A function of torch that a container calls, while it runs."""

    noted: tuple[list[Any], Structure] | None
    written: list[Tensor]
    first: int  # number of the first tensor that is saved
    dear: dear.Noted | None
    random: randomness.State | None  # before it, if what it gives will be compared


def _require_one_to_move_from(devices: tuple[torch.device, ...], cuts: Cuts) -> None:
    accelerators = [device for device in devices if device.type != "cpu"]
    moved = [segment.until for segment in cuts.in_order() if segment.home == "host"]
    if len(accelerators) > 1 and moved:
        raise ValueError(
            "activations move to the host from one accelerator only, and this model lies on "
            f"{', '.join(map(str, accelerators))}; home='host' was asked for until {', '.join(moved)}. Use "
            "home='device' for these segments, or put the model on one accelerator."
        )


def _is_called(model: nn.Module) -> bool:
    """Whether a call of the model is under way in this thread, as far as Python's stack tells."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back
    return False


def _prefetch_when_reached(output: Any, inputs: list[Tensor], offloader: Offloader, number: int) -> None:
    """When the backward comes to this output, ask for what it needs next: nobody else will say that it came.

    Inputs that are handed on belong to somebody else, to whom the backward comes far later.
    """

    def reached(_gradients: Any) -> None:
        with no_run():
            offloader.prefetch(number)

    passed_on = {tensor.grad_fn for tensor in inputs}
    for function in {tensor.grad_fn for tensor in tensors_in(output)} - passed_on:
        if function is not None:
            function.register_prehook(reached)


def _top_hooks() -> Any:
    """The innermost hooks on what autograd saves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _is_repeated(frame: Frame) -> bool:
    """Whether the segment is computed again in the backward; if it is divided, the compiler sees to that."""
    return frame.state.save == "inputs" or (frame.state.save == "dear" and not frame.is_divided)


def _kinds(state: Segment) -> tuple[str, ...]:
    named = tuple(kind for kind in state.dear if kind in dear.KINDS)
    return named or DEAR_KINDS


def _where_dear(state: Segment, experience: Experience) -> Callable[[], bool]:
    if all(name in dear.KINDS for name in state.dear):
        return lambda: True
    return lambda: experience.inside_dear > 0
