"""One run of a segment: what autograd wanted to save, and how it is had again in the backward."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fleetx.comm import exchanges
from fleetx.memory import dear, randomness
from fleetx.memory.checking import checksum, is_equal
from fleetx.memory.offload import Offloader, Trip, View, is_worth_moving
from fleetx.memory.shielding import shielded
from fleetx.memory.states import Segment
from fleetx.memory.surroundings import Surroundings
from fleetx.memory.tape import Call, External, Tape, detached, pointer_of, version_of

DEPENDS = (
    "Its forward depends on something that changed in between: a global, a counter, a file, another generator of "
    "random numbers; or it writes to memory where torch does not see it, as through .data. Leave that module out of "
    "recompute (save='everything'), or make its forward depend on its inputs only."
)


class Kept(NamedTuple):
    """A saved tensor that stays: a parameter or buffer, or something that cannot be had again."""

    tensor: Tensor
    version: int


Look = tuple[torch.Size, torch.dtype, torch.device]
"""What a saved tensor looks like: it must look so again."""


def look_of(tensor: Tensor) -> Look:
    """How this one looks."""
    return tensor.shape, tensor.dtype, tensor.device


class Saved:
    """A tensor that autograd saved in a segment: here, on the host, or to be computed again."""

    __slots__ = ("__weakref__", "frame", "number", "parked", "tensor", "version")

    def __init__(self, frame: "Frame", number: int, tensor: Tensor) -> None:
        self.frame = frame
        self.number = number
        self.tensor: Tensor | None = tensor
        self.version = version_of(tensor)
        self.parked: View | None = None

    def get(self) -> Tensor:
        """The tensor."""
        self.frame.prefetch()
        if self.tensor is not None:
            return unchanged(self.tensor, self.version, self.frame.name)
        if self.parked is not None:
            return self.parked.fetch()
        return self.frame.recomputed(self.number)


class Enough(BaseException):  # no Exception: whoever catches those in a forward must not catch this
    """Everything that was asked for has been computed."""


_alive: "weakref.WeakSet[Frame]" = weakref.WeakSet()


def frames_alive() -> list["Frame"]:
    """The segments of all forwards whose backward may still come."""
    return list(_alive)


class Frame:
    """A segment in one forward."""

    def __init__(self, name: str, state: Segment, tape: Tape, devices: tuple[torch.device, ...], number: int) -> None:
        self.name = name
        self.state = state
        self.tape = tape
        self.devices = devices
        self.number = number  # among the segments of all forwards
        self.offloader: Offloader | None = None
        self.random = randomness.state(devices)
        self.saved: list[Saved] = []
        self.expected: list[Look] = []  # those of the last forward
        self.looks: list[Look] = []
        self.references: list[weakref.ref[Saved]] = []
        self.kept: dict[int, Any] = {}  # the memory of parameters and buffers, by where it is
        self.within: Any = threading.local()  # of each thread: in how many dear modules it is
        self.stops_early = False  # whether it may be left in the middle, when everything was saved again
        self.is_hooked = False  # whether a hook after a module may undo what one before it did: it must be called
        self.fills_late = False  # whether something in it is saved first and filled then
        self.sends_inputs = False  # whether they leave for the host as soon as they are read
        self.is_checked = False  # whether what its modules give must be the same again
        self.proven: Callable[[], None] = lambda: None  # called when it was
        self.forward = 0  # its number
        self.verified = 0  # that of the last one whose segment was the same when it was repeated
        self.notes_random = False  # whether it is noted where generators are before calls that draw
        self.changed_later: Callable[[str], None] = lambda _kinds: None  # called if something hidden was changed
        self.moved_generators: Callable[[], None] = lambda: None  # called if that was needed
        self.lost = ""  # what happened that cannot be repeated
        self.ran_freely = False  # whether a module in it was not watched
        self.is_compiled = False
        self.is_divided = False  # whether compiled modules save dear outputs alone, and compute the rest themselves
        self.undivided = ""  # why they could not
        self._again: dict[int, dict[int, tuple[Tensor, int]]] = {}
        self._lock = threading.RLock()
        _alive.add(self)

    @property
    def is_repeated(self) -> bool:
        """Whether it is computed again in the backward; if it is divided, the compiler sees to that."""
        return self.state.save == "inputs" or (self.state.save == "dear" and not self.is_divided)

    def depends(self) -> str:
        """What is said of a segment that is not the same when it is repeated."""
        if not self.verified:
            return DEPENDS
        return (
            f"It was last verified in forward {self.verified} under this plan, and this is forward {self.forward}: "
            f"gradients in between may be wrong. {DEPENDS}"
        )

    def pack(self, tensor: Tensor) -> Saved:
        """Autograd saves this tensor."""
        # Detached: an output of the operation that saves it knows the graph, which would then know itself.
        number = len(self.looks)
        saved = Saved(self, number, detached(tensor))
        look = look_of(tensor)
        if number < len(self.expected) and look == self.expected[number]:
            look = self.expected[number]  # thousands of new ones would keep the garbage collector busy
        self.looks.append(look)
        self.references.append(weakref.ref(saved))
        self.saved.append(saved)
        return saved

    def trip(self, early: bool = False) -> Trip:
        """When what is parked leaves and returns; `early` at the segment's beginning, else at its end."""
        return Trip(self.number, self.number + self.state.lag - early, self.number + self.state.lead)

    def prefetch(self) -> None:
        """The backward has come here."""
        if self.offloader is not None:
            self.offloader.prefetch(self.number)

    def tensors_again(self) -> list[Tensor]:
        """What was computed again and not yet used."""
        return [tensor for tensors in list(self._again.values()) for tensor, _ in list(tensors.values())]

    # When the segment ends --------------------------------------------------------------------------------

    def keep(self) -> None:
        """Leave everything where it is; nothing will be repeated."""
        self.saved = []
        self.tape = Tape(())

    def park_saved(self, offloader: Offloader, at_once: bool) -> None:
        """Send everything that was saved to the host."""
        for saved in self.saved:
            tensor = saved.tensor
            # What was written to stays, to be refused in the backward.
            if tensor is not None and version_of(tensor) == saved.version and is_worth_moving(tensor):
                saved.parked = offloader.park(tensor, self.trip(), at_once=at_once)
                saved.tensor = None
        self.keep()

    def drop(self) -> None:
        """Let go of what can be computed again."""
        for saved in self.saved:
            saved.tensor = None
        self.saved = []
        for call in self.tape.calls:
            if call.dear is not None:
                # What was written to in place is no longer what the operation gave.
                call.dear.saved = [None if one is None or one.written_to() else one for one in call.dear.saved]

    def park_inputs(self, offloader: Offloader, at_once: bool) -> None:
        """Send what the segment needs when it is repeated to the host."""
        for external in self.tape.externals:
            self.park_input(external, offloader, at_once=at_once)
        for call in self.tape.calls:
            for one in [] if call.dear is None else call.dear.saved:
                if one is not None:
                    one.park(lambda tensor: offloader.park(tensor, self.trip(), at_once=at_once))

    def park_input(
        self, external: External, offloader: Offloader, *, early: bool = False, at_once: bool = False
    ) -> None:
        """Send one input to the host, if that is worth it."""
        tensor = external.tensor
        if tensor is not None and not external.is_kept and is_worth_moving(tensor):
            external.parked = offloader.park(tensor, self.trip(early), at_once=at_once)
            external.tensor = None

    # In the backward --------------------------------------------------------------------------------------

    def recomputed(self, number: int) -> Tensor:
        """A saved tensor, after the segment was repeated."""
        with self._lock:
            tensor = self.take_at_hand(number)
            if tensor is None:
                # Of an earlier backward nothing is needed any more.
                self._again = {torch._C._current_graph_task_id(): Repetition(self).run()}
                tensor = self.take_at_hand(number)
            assert tensor is not None
            return tensor

    def take_at_hand(self, number: int) -> Tensor | None:
        """A saved tensor, once, if the segment was repeated already in this backward."""
        with self._lock:
            tensors = self._again.get(torch._C._current_graph_task_id())
            found = None if tensors is None else tensors.pop(number, None)
            if found is None:
                return None
            if not tensors:
                self._again = {}
        return unchanged(*found, self.name)


class Repetition:
    """A segment once more, for what autograd saved in it."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.wanted = {number for number, saved in enumerate(frame.references) if saved() is not None}
        self.last = max(self.wanted)
        self.collected: dict[int, tuple[Tensor, int]] = {}
        self.saves = range(0)  # numbers of the tensors that the present call saves
        self.number = 0  # of the next one
        self.copies: dict[int, torch.UntypedStorage] = {}  # memory of buffers' copies, which are not saved
        self._hooks = shielded(self.collect, frame.is_compiled), shielded(self.give, frame.is_compiled)

    def run(self) -> dict[int, tuple[Tensor, int]]:
        """The tensors that are still wanted, with their versions, by number."""
        frame = self.frame
        present, depth = Surroundings.now(frame.tape.kinds), getattr(frame.within, "dear", 0)
        torch.autocast_increment_nesting()
        try:
            with randomness.replaying(frame.random, frame.devices):
                frame.tape.repeat(self.fetch, self.around, self.check, self.is_done)
            if frame.is_checked:
                frame.is_checked = False
                frame.proven()
        except Enough:
            pass
        except dear.Different as different:
            raise RuntimeError(f"the segment that ends at {frame.name!r} {different}. {frame.depends()}") from None
        except torch.OutOfMemoryError as error:
            error.add_note(f"FleetX: in the backward, while the segment that ends at {frame.name!r} was repeated.")
            raise
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            present.restore()
            frame.within.dear = depth  # who stops early does not tell modules that they are left
            collected = self.collected
            self.__dict__.clear()  # torch gives hooks to its threads, which may know them for some time
        return collected

    def is_done(self) -> bool:
        """Whether nothing more is needed."""
        return self.number > self.last and not self.frame.is_checked

    @contextmanager
    def around(self, call: Call) -> Iterator[None]:
        """What is collected during one call."""
        self.saves, self.number = call.saves, call.saves.start
        self._require_same_hidden(call)
        self._put_generators(call)
        giving = nullcontext() if call.dear is None else dear.Giving(call.dear)
        restored = nullcontext([]) if call.snapshot is None else call.snapshot.restored()
        hooks = torch.autograd.graph.saved_tensors_hooks(*self._hooks)
        with restored as buffers, hooks, giving, exchanges.giving(call.exchanged):
            for buffer in buffers:
                self._note_copy(buffer)
            yield
        if self.number < self.saves.stop:
            raise RuntimeError(self.different(None))

    def _put_generators(self, call: Call) -> None:
        """Something that is not repeated may have drawn numbers before this call, or seeded a generator."""
        if call.random is not None and not call.random.is_same(randomness.state(self.frame.devices)):
            randomness.restore(call.random, self.frame.devices)
            self.frame.moved_generators()

    def _require_same_hidden(self, call: Call) -> None:
        changed = call.hidden.changed() if call.hidden is not None else ""
        if changed:
            self.frame.changed_later(changed)
            raise RuntimeError(
                f"a {changed}, which a module in the segment that ends at {self.frame.name!r} was given, holds other "
                "tensors now than in the forward, and nobody can put them back. Hand tensors on in tuples, lists, "
                "dicts or dataclasses. From the next forward on this segment keeps everything."
            )

    def check(self, call: Call, outputs: list[Tensor]) -> None:
        """A call was repeated: where that is proven for the first time, a module must have given the same."""
        if call.sums is None or not self.frame.is_checked:
            return
        for place, (output, expected) in enumerate(zip(outputs, call.sums, strict=True)):
            if expected is not None and not is_equal(checksum(output), expected):
                raise RuntimeError(
                    f"a module in the segment that ends at {self.frame.name!r} gave something else when it was "
                    f"repeated: output {place + 1} of {len(outputs)} has other values, so gradients would be wrong. "
                    f"{self.frame.depends()}"
                )

    def collect(self, tensor: Tensor) -> Any:
        """A tensor is saved again."""
        frame, pointer = self.frame, pointer_of(tensor)
        is_kept = pointer is not None and (pointer in frame.kept or pointer in self.copies)
        if is_kept or not self.saves:  # the model did not save it with us, but in a checkpoint of its own
            return detached(tensor)
        number = self.number
        if number > self.last and self._may_stop():
            raise Enough
        if number >= self.saves.stop or look_of(tensor) != frame.looks[number]:
            raise RuntimeError(self.different(tensor))
        self.number, held = number + 1, detached(tensor)
        if number not in self.wanted:
            return held
        self.collected[number] = (held, version_of(tensor))
        if number == self.last and self._may_stop():
            raise Enough
        return number

    def _may_stop(self) -> bool:
        return self.frame.stops_early and not self.frame.is_checked and not self.frame.is_hooked

    def give(self, noted: Any) -> Tensor:
        """It is asked for while the segment is being repeated: the forward computes a gradient."""
        return self.collected[noted][0] if isinstance(noted, int) else noted

    def fetch(self, external: External) -> Tensor:
        """An input of the segment as the segment met it: with a gradient to come, but no past."""
        if external.is_kept and isinstance(external.tensor, nn.Parameter):
            return _present(external)
        fresh = _present(external).detach()
        if external.requires_grad:
            fresh.requires_grad_()
        if external.is_copy:
            # For another backward the copy must stay; and what is written to must not be a leaf.
            with torch.enable_grad():
                fresh = fresh.clone()
        if external.is_kept:
            self._note_copy(fresh)
        return fresh

    def _note_copy(self, tensor: Tensor) -> None:
        """Its memory is held, not the tensor: that may be given other memory, and this would become somebody else's."""
        pointer = pointer_of(tensor)
        if pointer is not None:
            self.copies[pointer] = tensor.untyped_storage()

    def different(self, tensor: Tensor | None) -> str:
        """What is said if the segment did something else."""
        looks = self.frame.looks
        expected = looks[self.number] if self.number in self.saves else None
        found = None if tensor is None else look_of(tensor)
        return (
            f"the segment that ends at {self.frame.name!r} did something else when it was repeated: saved tensor "
            f"{self.number + 1} of {len(looks)} was {_described(expected)}, and is {_described(found)}. "
            f"{self.frame.depends()}"
        )


def unchanged(tensor: Tensor, version: int, name: str) -> Tensor:
    """The tensor, if nobody wrote to it since it was saved: what autograd checks too, where there are no hooks."""
    if version_of(tensor) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a saved "
            f"tensor {tuple(tensor.shape)} near {name!r} is at version {tensor._version}; expected version {version}."
        )
    return tensor


def _present(external: External) -> Tensor:
    if external.parked is not None:
        return external.parked.fetch()
    assert external.tensor is not None
    if external.was_written():
        raise RuntimeError(
            f"an input {tuple(external.tensor.shape)} of a segment was written in place between its forward and its "
            "backward, so the segment cannot be repeated. Write to a copy of it: x = x.clone()."
        )
    return external.tensor


def _described(look: Look | None) -> str:
    if look is None:
        return "missing"
    shape, dtype, device = look
    return f"{tuple(shape)} {dtype} on {device}"
