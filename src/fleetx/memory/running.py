"""One forward of a model that is cut into segments: opens and closes them as their outputs come."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fleetx.memory import dear, randomness
from fleetx.memory.buffers import modules_of, tensors_of
from fleetx.memory.checking import LateFillers
from fleetx.memory.experience import Experience, Learned
from fleetx.memory.foreign import compiled_among, refuse_gradient_checkpointing
from fleetx.memory.ledger import Inputs, Ledger
from fleetx.memory.names import Cuts, operation_name
from fleetx.memory.recompute import Frame, Kept, Saved, unchanged
from fleetx.memory.recording import Recorder
from fleetx.memory.shielding import shielded, shielded_from_tracing
from fleetx.memory.states import Segment
from fleetx.memory.structures import tensors_in
from fleetx.memory.surroundings import Surroundings, settle_attention
from fleetx.memory.tape import Call, Tape, detached, version_of
from fleetx.memory.underway import active_run, calls_of, end_stale, hooks_on_saved, no_run, set_active
from fleetx.memory.wholes import Wholes

MANY = 128
FEW = 16
"""So much may happen in a segment that is new, or known, before anybody wonders whether the forward is still on."""


class Run:
    """The state of one forward."""

    def __init__(self, experience: Experience, model: nn.Module) -> None:
        end_stale()
        self.experience = experience
        self.model = model
        self._is_told = calls_of(model) > 0  # else nothing can be learned from the stack: compiled code calls it
        self._wonders_at = MANY
        modules = modules_of(model)
        refuse_gradient_checkpointing(model, modules)
        self.compiled = compiled_among(modules, experience.cuts.leaves.values())  # by the user
        self.is_compiled = bool(self.compiled) or experience.compilations is not None
        held = tensors_of(modules, "_parameters", "_buffers")
        self.devices = randomness.devices_of(held)
        _require_one_to_move_from(self.devices, experience.cuts)
        self.device = self.devices[0]  # the one from which tensors move to the host
        settle_attention(self.device)
        self.kinds = tuple(dict.fromkeys(["cpu", *(device.type for device in self.devices)]))
        self.nested = 0  # calls of the model by itself
        self._is_busy = False
        self._is_off = False  # whether the recorder is
        self._is_calling = False
        self.ordinal = -1
        self.is_first = not experience.segments
        self._way = experience.modes.number_of(modules)
        self._forward = next(experience.forwards)
        self.seen: list[Learned] = []
        self.containers: list[tuple[str, dict[str, int]]] = []
        self.ledger = Ledger(experience, modules, held, self.device)
        self.wholes = Wholes(self)
        self._late_fillers = LateFillers()
        self.frame = self._open()
        self._outer = active_run()
        self.recorder = Recorder(self)
        self._pack = shielded(self.pack, self.is_compiled)
        unpack = shielded(self.unpack, True) if self.is_compiled else shielded_from_tracing(self.unpack)
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)
        self._is_alone = hooks_on_saved() is None
        self.hooks.__enter__()
        self.recorder.__enter__()
        if experience.compilations is not None:
            experience.compilations.install(experience.cuts.leaves.values())
        set_active(self)

    # Segments -----------------------------------------------------------------------------------------------

    def _open(self) -> Frame:
        self.ordinal += 1
        state = self.experience.expected(self.ordinal)
        frame = Frame(state.until, state, Tape(self.kinds), self.devices, next(self.experience.numbers))
        frame.kept, frame.within = self.ledger.kept, self.experience.within
        known = self.experience.segments[self.ordinal] if self.ordinal < len(self.experience.segments) else None
        frame.is_compiled = self.is_compiled
        frame.is_divided = known is not None and known.is_divided
        # In the first forward nobody knows how many segments will come.
        is_hopeless = known is not None and known.is_hopeless
        frame.is_checked = (self.is_first or frame.is_repeated) and self._is_unproven() and not is_hopeless
        frame.notes_random = frame.is_checked or (known is not None and known.moves_generators)
        is_sent = state.home == "host" and state.save == "inputs"
        frame.sends_inputs = is_sent and not self.is_first and not self._is_last()
        frame.expected = [] if known is None else known.looks
        self._wonders_at = MANY if known is None else max(FEW, 2 * len(known.looks))
        return frame

    def _is_unproven(self) -> bool:
        """Whether it was not seen lately that the present segment gives the same when it is repeated."""
        known = self.experience.segments
        return self.ordinal >= len(known) or not known[self.ordinal].is_verified(self._way, self._forward)

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
        for hidden in (call.hidden for call in frame.tape.calls if call.hidden is not None):
            frame.lost = frame.lost or hidden.complaint()
        frame.lost = frame.lost or learned.changes_later
        keeps = not frame.is_repeated
        learned.lost = learned.lost + 1 if frame.lost and not keeps else 0
        if learned.lost == 2:  # the first time may have taught us how
            self.experience.complaints.append(
                f"the segment that ends at {state.until} keeps everything, as it could not be repeated: {frame.lost}."
            )
        if frame.lost or keeps:
            frame.park_saved(offloader, at_once=self.is_first) if offloader else frame.keep()
        else:
            learned.fills_late = learned.fills_late or frame.fills_late
            is_sure = frame.is_checked or self._way in learned.proven
            frame.stops_early = is_sure and not learned.fills_late and not frame.is_compiled
            frame.proven = partial(self.experience.note_verified, self.ordinal, learned, self._way, self._forward)
            frame.verified, frame.forward = learned.verified, self._forward
            frame.moved_generators = learned.note_moved_generators
            frame.changed_later = learned.note_changed_later
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
        set_active(self._outer)
        self.wholes.abandon()
        if self._is_calling:  # the recorder is being asked, and torch will put it back: it goes later
            self.recorder.listener = None
        else:
            self._switch_on()
            self.recorder.__exit__(None, None, None)
        if not self.wholes.is_unhooked or self._is_on_top():
            self.hooks.__exit__(None, None, None)
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
        if not self._is_told or calls_of(self.model) > 0:
            return False
        return (self.wholes.is_unhooked or self._is_on_top()) and (
            self._is_off or self._is_calling or self.recorder.is_innermost
        )

    def _is_on_top(self) -> bool:
        """Whether what autograd saves is handed to this forward first."""
        top = hooks_on_saved()
        return top is not None and top[0] == self._pack

    def _wonders(self) -> bool:
        """So much has happened in this segment that the forward may long be over."""
        frame, limit = self.frame, self._wonders_at
        if len(frame.saved) < limit and len(frame.tape.calls) < limit:
            return False
        self._wonders_at *= 2
        return self.is_stale()

    # What autograd saves -------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Kept | Saved:
        """Autograd wants to save a tensor."""
        if self._wonders():
            self.end(failed=True)
            return Kept(detached(tensor), version_of(tensor))
        if self.ledger.is_kept(tensor):
            return Kept(detached(tensor), version_of(tensor))
        if self.wholes.depth == 0 and not self._is_calling:  # by a function of somebody's own, which is not on the tape
            self.experience.note_unseen(self.frame)
            return Kept(detached(tensor), version_of(tensor))
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
        return self.wholes.depth == 0 and not self._is_busy and active_run() is self

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
            if not self.wholes.is_any_running:
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
            noted = self.ledger.note_inputs(self.frame, args, kwargs, written)
        begun = Begun(noted, written, len(self.frame.looks), self.dear_outputs(), self.generators_if_noted())
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
        noted = begun.noted or self.ledger.note_inputs(self.frame, args, kwargs, [])
        call = tape.note_call(function, noted, output, Surroundings.now(self.kinds), saves)
        call.dear = begun.dear  # also if nothing is saved: ctc_loss takes another way inside of a dispatch mode
        self.note_draws(call, begun.random)
        if saves:
            self.frame.undivided = self.frame.undivided or "what is computed between modules is not compiled"
        tape.note_written(begun.written)
        self.ledger.note_written(self.frame, begun.written)
        segment = self.experience.cuts.operations.get(self._operation(function))
        if self.frame.is_checked:
            self.note_late_fillers(tensors_in(output))
        if segment is not None:
            self.cut(segment)

    def overheard(self, written: list[Tensor]) -> None:
        """Something is called inside of vmap or the like that will write to these, and cannot be noted."""
        if written:
            self.frame.lost = "something was written to inside of vmap"

    def generators_if_noted(self) -> randomness.State | None:
        """Where the random generators are, if that is noted of calls that draw."""
        return randomness.state(self.devices) if self.frame.notes_random else None

    def note_draws(self, call: Call, before: randomness.State | None) -> None:
        """A call was made; if it drew numbers, it will draw the same ones when it is repeated."""
        if before is not None and not before.is_same(randomness.state(self.devices)):
            call.random = before

    def _operation(self, function: Callable[..., Any]) -> str:
        """The name of this call: the container, the function, and a number from the second time on."""
        name, counts = self.containers[-1]
        return operation_name(name, function, counts)

    def note_late_fillers(self, outputs: list[Tensor]) -> None:
        """Something made these in the present segment."""
        if self._late_fillers.are_behind(outputs):
            self.frame.fills_late = True

    def dear_outputs(self, module: nn.Module | None = None) -> dear.Noted | None:
        """For the dear outputs of a call, if the segment saves them."""
        state = self.frame.state
        if state.save != "dear" or self.experience.compilations is not None:
            return None
        if module in self.compiled:
            self.experience.note_undivided(state, "you compiled some yourself; memory.apply(..., compile=True) does it")
            return None
        return dear.Noted(
            dear.kinds_of(state.dear), self.devices, _where_dear(state, self.experience), self.frame.is_checked
        )

    def may_be_unhooked(self) -> bool:
        """Whether the present segment keeps what a module saves, as far as is known.

        A function of somebody's own may look for its own objects, and torch gives others where there are hooks. If the
        segment ends otherwise, it keeps everything this once.
        """
        if self.frame.is_repeated or self.frame.state.home != "device" or self.experience.harmless is None:
            return False  # it is not kept, or forwards go different ways
        return self.may_be_unwatched() or (self.is_first and self._is_alone and self._is_on_top())

    def may_be_unwatched(self) -> bool:
        """Whether a module can run as if there were no plan, where the present segment keeps what it saves."""
        if self.is_first or not (self._is_alone and self._is_on_top()):  # else others would have to be asked, or never
            return False
        if self.ordinal < len(self.experience.segments):
            return True
        # It may not be the end yet, though the last forward ended here.
        return len({learned.state.until for learned in self.seen}) == len(self.experience.cuts.in_order())


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

    noted: Inputs | None
    written: list[Tensor]
    first: int  # number of the first tensor that is saved
    dear: dear.Noted | None
    random: randomness.State | None  # before it, if that is noted


def _require_one_to_move_from(devices: tuple[torch.device, ...], cuts: Cuts) -> None:
    accelerators = [device for device in devices if device.type != "cpu"]
    moved = [segment.until for segment in cuts.in_order() if segment.home == "host"]
    if len(accelerators) > 1 and moved:
        raise ValueError(
            "activations move to the host from one accelerator only, and this model lies on "
            f"{', '.join(map(str, accelerators))}; home='host' was asked for until {', '.join(moved)}. Use "
            "home='device' for these segments, or put the model on one accelerator."
        )


def _where_dear(state: Segment, experience: Experience) -> Callable[[], bool]:
    if all(name in dear.KINDS for name in state.dear):
        return lambda: True
    return lambda: experience.inside_dear > 0
