"""One forward of a model that is cut into segments: opens and closes them as their outputs come."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fleetx.memory import dear
from fleetx.memory.buffers import BufferWatch, Snapshot
from fleetx.memory.compiling import SharedCompilations
from fleetx.memory.names import Cuts
from fleetx.memory.offload import Offloader
from fleetx.memory.recompute import Frame, Kept, Saved, unchanged
from fleetx.memory.recording import Recorder
from fleetx.memory.states import Segment
from fleetx.memory.tape import External, Surroundings, Tape

_active = threading.local()
TAIL = Segment("the end", save="everything")


def active_run() -> "Run | None":
    """The forward that is under way in this thread."""
    return getattr(_active, "run", None)


@contextmanager
def no_run() -> Iterator[None]:
    """Inside, modules run as if they were not cut."""
    outer, _active.run = active_run(), None
    try:
        yield
    finally:
        _active.run = outer


@dataclass(eq=False)
class Learned:
    """What earlier forwards showed of a segment."""

    state: Segment
    written: set[int] = field(default_factory=set)  # numbers of the inputs that it writes to
    size: int = 0  # bytes that autograd would save


@dataclass(eq=False)
class Experience:
    """What outlives a forward: which segments come, what they change, and the memory on the host."""

    cuts: Cuts
    watch: BufferWatch = field(default_factory=BufferWatch)
    segments: list[Learned] = field(default_factory=list)
    offloader: Offloader | None = None
    host_memory: int | None = None
    compilations: SharedCompilations | None = None
    inside_dear: int = 0

    def expected(self, ordinal: int) -> Segment:
        """The segment that will probably end next."""
        if self.segments:
            return self.segments[ordinal].state if ordinal < len(self.segments) else TAIL
        listed = self.cuts.in_order()
        return listed[ordinal] if ordinal < len(listed) else TAIL

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a model learns anew: what is known here is about these very modules."""
        options = None if self.compilations is None else self.compilations.fresh()
        return {"cuts": self.cuts, "host_memory": self.host_memory, "compilations": options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def for_device(self, device: torch.device) -> Offloader:
        """The offloader, made when it is first needed."""
        if self.offloader is None or self.offloader.device != device:
            self.offloader = Offloader(device, limit=self.host_memory)
        return self.offloader


class Run:
    """The state of one forward."""

    def __init__(self, experience: Experience, model: nn.Module) -> None:
        self.experience = experience
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.devices = ("cpu",) if self.device.type == "cpu" else ("cpu", self.device.type)
        self.depth = 0  # within modules that run as a whole
        self._is_busy = False
        self.ordinal = -1
        self.is_first = not experience.segments
        self.seen: list[Learned] = []
        self.containers: list[tuple[str, dict[str, int]]] = []
        self._kept = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
        self._leaf: Any = None
        self._outer = active_run()
        self.recorder = Recorder(self)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self._hooks.__enter__()
        self.recorder.__enter__()
        _active.run = self
        self.frame = self._open()

    # Segments -----------------------------------------------------------------------------------------------

    def _open(self) -> Frame:
        self.ordinal += 1
        state = self.experience.expected(self.ordinal)
        group = 0 if state.home == "device" else self.experience.for_device(self.device).new_group()
        frame = Frame(state.until, state, Tape(self.devices), self.device, group)
        frame.is_kept = self.is_kept
        frame.stops_early = self.experience.compilations is None
        return frame

    def cut(self, segment: Segment) -> None:
        """The output that ends a segment is there."""
        frame = self.frame
        frame.name, expected, frame.state = segment.until, frame.state, segment
        learned = self._learned(segment)
        written = {e.number for e in frame.tape.externals if not e.is_kept and _was_written(e)}
        is_lost = bool(written - learned.written) or any(s is None for s in frame.snapshots)
        learned.written |= written
        self.seen.append(learned)
        # Counting takes its time, so it is done once.
        size = frame.bytes_saved() if self.is_first else learned.size
        learned.size = size
        self._settle(frame, expected, is_lost)
        self.frame = self._open()

    def _settle(self, frame: Frame, expected: Segment, is_lost: bool) -> None:
        """Carry out what the segment's state says; what a repetition would need is lost if it was not foreseen."""
        state = frame.state
        on_host = state.home == "host" and not self._is_last()
        offloader = self.experience.for_device(self.device) if on_host else None
        if offloader is not None:
            if expected.home == "device":
                frame.group = offloader.new_group()
            offloader.release_leaving(before=frame.group + 1)
        if is_lost:
            frame.keep()
        elif state.save == "everything" or (state.save == "dear" and self.experience.compilations is not None):
            frame.park_saved(offloader, at_once=self.is_first) if offloader else frame.keep()
        else:
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
        self.recorder.__exit__(None, None, None)
        self.recorder.listener = None  # they know each other
        self._hooks.__exit__(None, None, None)
        self.frame.keep()
        if not failed:
            self.experience.segments = self.seen

    # What autograd saves -------------------------------------------------------------------------------------

    def is_kept(self, tensor: Tensor) -> bool:
        """Whether the tensor is, or lies in, a parameter or buffer, which live anyway."""
        return tensor.untyped_storage().data_ptr() in self._kept

    def pack(self, tensor: Tensor) -> Kept | Saved:
        """Autograd wants to save a tensor."""
        if self.is_kept(tensor):
            return Kept(tensor, tensor._version)
        return self.frame.pack(tensor)

    @staticmethod
    def unpack(saved: Kept | Saved) -> Tensor:
        """Autograd wants it back."""
        if isinstance(saved, Kept):
            return unchanged(saved.tensor, saved.version, "a parameter")
        with no_run():
            return saved.get()

    # What containers do themselves --------------------------------------------------------------------------

    def is_listening(self) -> bool:
        """Whether a container is doing something itself."""
        return self.depth == 0 and not self._is_busy and active_run() is self

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Inside, what is done is ours, and no part of the model."""
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def begin_call(self, args: Any, kwargs: Any) -> Any:
        """A function that may write to its inputs: those from outside are copied before."""
        return self.frame.tape.note_inputs(args, kwargs, self._copied_external)

    def end_call(self, function: Callable[..., Any], args: Any, kwargs: Any, begun: Any, output: Any) -> None:
        """A function gave or changed tensors."""
        inputs, structure = begun or self.frame.tape.note_inputs(args, kwargs, self._external)
        self.frame.tape.note_call(function, inputs, structure, output, Surroundings.now(self.devices))
        segment = self.experience.cuts.operations.get(self._operation(function))
        if segment is not None:
            self.cut(segment)

    def _operation(self, function: Callable[..., Any]) -> str:
        """The name of this call: the container, the function, and a number from the second time on."""
        name, counts = self.containers[-1]
        return operation_name(name, function, counts)

    def _external(self, tensor: Tensor, number: int) -> External:
        known = self.experience.segments
        learned = known[self.ordinal].written if self.ordinal < len(known) else set()
        if number in learned and not self.is_kept(tensor):
            return self._copied_external(tensor, number)
        noted = External(number, tensor, tensor._version, tensor.requires_grad, self.is_kept(tensor))
        if not noted.is_kept:
            noted.tensor = tensor.detach()  # itself it knows the graph, which may come to know the segment
            state = self.frame.state
            if state.home == "host" and state.save == "inputs" and not self.is_first and not self._is_last():
                self.frame.park_input(noted, self.experience.for_device(self.device), at_once=False)
        return noted

    def _copied_external(self, tensor: Tensor, number: int) -> External:
        copy = tensor.detach().clone()
        return External(number, copy, copy._version, tensor.requires_grad, is_kept=False, is_written=True)

    # What runs as a whole -----------------------------------------------------------------------------------

    def enter_leaf(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module that runs as a whole begins."""
        self.depth += 1
        if self.depth > 1:
            return
        inputs, structure = self.frame.tape.note_inputs(args, kwargs, self._external)
        snapshot = self.experience.watch.before(module)
        where = Surroundings.now(self.devices)
        self._leaf = Leaf(self, module, inputs, structure, snapshot, where)

    def leave_leaf(self, module: nn.Module, output: Any) -> None:
        """It ends."""
        self.depth -= 1
        if self.depth > 0:
            return
        leaf = self._end_leaf()
        if leaf is None:
            return
        call = self.frame.tape.note_call(leaf.callee, leaf.inputs, leaf.structure, output, leaf.where)
        call.dear = leaf.saving
        if leaf.snapshot is not None:
            self.frame.snapshots.append(self.experience.watch.after(module, leaf.snapshot))

    def _end_leaf(self) -> "Leaf | None":
        leaf, self._leaf = self._leaf, None
        if leaf is not None:
            leaf.leave()
        return leaf


class Leaf:
    """A module that runs as a whole, while it runs."""

    def __init__(
        self, run: Run, module: nn.Module, inputs: Any, structure: Any, snapshot: Snapshot | None, where: Surroundings
    ) -> None:
        self.module, self.inputs, self.structure, self.snapshot, self.where = module, inputs, structure, snapshot, where
        self.callee: Callable[..., Any] = module
        self.saving: dear.Saving | None = None
        self._undo: list[Callable[[], None]] = []
        state, compilations = run.frame.state, run.experience.compilations
        if run.recorder.is_innermost:  # else it stays, and does not listen
            run.recorder.__exit__(None, None, None)
            self._undo.append(run.recorder.__enter__)
        if compilations is not None:
            self.callee = compilations.callee(module, state)
            self._undo.append(compilations.enter(module, state))
        elif state.save == "dear":
            self.saving = dear.Saving(_kinds(state), run.device, _where_dear(state, run.experience))
            self.saving.__enter__()
            self._undo.append(lambda: self.saving.__exit__(None, None, None))

    def leave(self) -> None:
        """Undo what was done for the module, last first."""
        while self._undo:
            self._undo.pop()()


def operation_name(container: str, function: Callable[..., Any], counts: dict[str, int]) -> str:
    """`container:function`, with a number from the second time on."""
    name = getattr(function, "__name__", type(function).__name__).strip("_")
    number = counts.get(name, 0)
    counts[name] = number + 1
    return f"{container}:{name}" + (f"_{number}" if number else "")


def _kinds(state: Segment) -> tuple[str, ...]:
    named = tuple(kind for kind in state.dear if kind in dear.KINDS)
    return named or tuple(dear.KINDS)


def _where_dear(state: Segment, experience: Experience) -> Callable[[], bool]:
    if all(name in dear.KINDS for name in state.dear):
        return lambda: True
    return lambda: experience.inside_dear > 0


def _was_written(external: External) -> bool:
    if external.parked is not None:
        source = external.parked.parked.source
        return source is not None and source._version != external.parked.parked.version
    return external.tensor is not None and not external.is_written and external.tensor._version != external.version
