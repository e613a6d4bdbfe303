"""What outlives a forward: which segments come, what they change, and the memory on the host."""

import itertools
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fleetx.memory.buffers import Watch
from fleetx.memory.compiling import SharedCompilations
from fleetx.memory.modes import Modes
from fleetx.memory.names import Cuts
from fleetx.memory.offload import Offloader
from fleetx.memory.recompute import Frame, Look
from fleetx.memory.states import Segment
from fleetx.memory.traced import Traceable

TAIL = Segment("the end", save="everything")
_MOST_PROVEN = 32
VERIFIED_EVERY = 256
"""Forwards after which a segment is verified again; each segment has its turn, so that a step has few or none."""


@dataclass(eq=False)
class Learned:
    """What earlier forwards showed of a segment."""

    state: Segment
    looks: list[Look] = field(default_factory=list)  # of the tensors that autograd saved
    lost: int = 0  # how often in a row it could not be repeated
    fills_late: bool = False  # whether something in it is saved first and filled then
    is_divided: bool = False  # whether the compiler can save its dear outputs alone
    changes_later: str = ""  # what of it would have to be as it was, and is not
    moves_generators: bool = False  # whether something in it that is not repeated draws random numbers, or seeds
    proven: set[int] = field(default_factory=set)  # ways to run in which it gave the same when it was repeated
    verified: int = 0  # the number of the last forward in which it did
    due: int = 0  # that of the one in which this is verified again

    def note_proven(self, way: int, forward: int, due: int) -> None:
        """It did. Who has other hooks in each step must not make us remember all of them."""
        if len(self.proven) >= _MOST_PROVEN:
            self.proven.clear()
        self.proven.add(way)
        self.verified, self.due = forward, due

    def is_verified(self, way: int, forward: int) -> bool:
        """Whether it needs no verification in this forward, which runs in this way."""
        return way in self.proven and forward < self.due

    def note_changed_later(self, kinds: str) -> None:
        """Arguments of these kinds hold other tensors by the time of the backward: from now on it keeps everything."""
        self.changes_later = f"a {kinds} is changed later, into which nobody can look"

    def note_moved_generators(self) -> None:
        """From now on it is noted where they are before each call that draws."""
        self.moves_generators = True

    @property
    def is_hopeless(self) -> bool:
        """Whether it could not be repeated time and again: then nobody needs to prove anything of it."""
        return self.lost >= 2


@dataclass(eq=False)
class Experience:
    """What outlives a forward: which segments come, what they change, and the memory on the host."""

    cuts: Cuts
    traceable: Traceable
    watch: Watch = field(default_factory=Watch)
    modes: Modes = field(default_factory=Modes)
    written: dict[int, set[int]] = field(default_factory=dict)  # by module: inputs that it writes to
    # Modules that were only seen to write to their own buffers; none if forwards go different ways.
    harmless: weakref.WeakSet[nn.Module] | None = field(default_factory=weakref.WeakSet)
    segments: list[Learned] = field(default_factory=list)
    offloader: Offloader | None = None
    host_memory: int | None = None
    numbers: Iterator[int] = field(default_factory=itertools.count)  # of the segments of all forwards
    forwards: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    compilations: SharedCompilations | None = None
    within: Any = field(default_factory=threading.local)  # of each thread: in how many dear modules it is
    missed: set[str] | None = None  # outputs to which the first forward did not come
    unseen: set[str] = field(default_factory=set)  # segments in which somebody saves what cannot be had again
    undivided: set[str] = field(default_factory=set)  # segments whose dear outputs the compiler could not save alone
    complaints: list[str] = field(default_factory=list)  # that nobody was told of yet
    warned: set[str] = field(default_factory=set)  # of what the plan does nothing in

    @property
    def why_not_traced(self) -> str:
        """Why the plan cannot be carried out inside of a compilation from outside, and what to do; empty if it can."""
        if self.compilations is not None:
            return "the plan compiles what runs between the cuts already: leave the other compilation out"
        return self.traceable.refused

    def expected(self, ordinal: int) -> Segment:
        """The segment that will probably end next."""
        if self.segments:
            return self.segments[ordinal].state if ordinal < len(self.segments) else TAIL
        listed = self.cuts.in_order()
        return listed[ordinal] if ordinal < len(listed) else TAIL

    @property
    def inside_dear(self) -> int:
        """In how many dear modules this thread is."""
        return getattr(self.within, "dear", 0)

    @inside_dear.setter
    def inside_dear(self, count: int) -> None:
        self.within.dear = count

    def note_verified(self, ordinal: int, learned: Learned, way: int, forward: int) -> None:
        """A segment gave the same when it was repeated. Its second turn is earlier, to spread turns over forwards."""
        earlier = 0 if learned.verified else ordinal * VERIFIED_EVERY // max(1, ordinal + 1, len(self.segments))
        learned.note_proven(way, forward, forward + VERIFIED_EVERY - earlier)

    def note_unseen(self, frame: Frame) -> None:
        """A tensor was saved by something that is not on the tape."""
        if frame.state.save != "everything" and frame.name not in self.unseen:
            self.unseen.add(frame.name)
            self.complaints.append(
                f"in the segment that ends at {frame.name}, a torch.autograd.Function is called between modules, or "
                "vmap. What it saves is kept: call it in a module of its own to have it computed again."
            )

    def note_undivided(self, state: Segment, reason: str) -> None:
        """The compiler would not save the dear outputs of a segment and compute the rest again."""
        if reason and state.until not in self.undivided:
            self.undivided.add(state.until)
            self.complaints.append(
                f"of the segment that ends at {state.until} only the inputs are saved, and the rest is computed again: "
                f"if compiled, dear outputs need modules that compile as a whole and write to nothing, and {reason}."
            )

    def grievances(self) -> list[str]:
        """What was found in a forward that makes it keep more than was asked for; each is told once."""
        if self.missed is None:
            self.missed = self.cuts.expected - {learned.state.until for learned in self.segments}
            if self.missed:
                self.complaints.append(
                    f"the forward did not come to {', '.join(sorted(self.missed))}, so it was not cut there, and more "
                    "is kept than was asked for. fleetx.memory.outputs(model, batch) lists what a forward comes to."
                )
        told, self.complaints = self.complaints, []
        return told

    def written_by(self, module: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
        """The inputs to which a module writes; all of them as long as nothing is known."""
        places = self.written.get(id(module), range(len(inputs)))
        return [tensor for place, tensor in enumerate(inputs) if place in places]

    def note_written(self, module: nn.Module, places: set[int]) -> None:
        """A module wrote to these of its inputs."""
        self.written[id(module)] = self.written.get(id(module), set()) | places
        if places and self.harmless is not None:
            self.harmless.discard(module)

    def note_harmless(self, module: nn.Module) -> None:
        """A module changed nothing but its buffers, and never did."""
        if self.harmless is not None and not self.written.get(id(module)):
            self.harmless.add(module)

    def is_harmless(self, module: nn.Module) -> bool:
        """Whether nobody needs to watch a module whose activations are all kept."""
        return self.harmless is not None and module in self.harmless

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a model learns anew: what is known here is about these very modules."""
        names = ("cuts", "traceable", "host_memory", "compilations")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def for_device(self, device: torch.device) -> Offloader:
        """The offloader, made when it is first needed."""
        if self.offloader is None or self.offloader.device != device:
            self.offloader = Offloader(device, limit=self.host_memory)
        return self.offloader
