"""One run of a segment: what autograd wanted to save, and how it is had again in the backward."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fleetx.memory import buffers, dear, randomness
from fleetx.memory.offload import Offloader, View, is_worth_moving
from fleetx.memory.states import Segment
from fleetx.memory.tape import Call, External, Surroundings, Tape

IsKept = Callable[[Tensor], bool]


class Kept(NamedTuple):
    """A saved tensor that lives anyway: a parameter or a buffer."""

    tensor: Tensor
    version: int


class Look(NamedTuple):
    """What a saved tensor looks like: it must look so again."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "Look":
        """How this one looks."""
        return cls(tensor.shape, tensor.dtype, tensor.device)


class Saved:
    """A tensor that autograd saved in a segment: here, on the host, or to be computed again."""

    __slots__ = ("__weakref__", "frame", "number", "parked", "tensor", "version")

    def __init__(self, frame: "Frame", number: int, tensor: Tensor) -> None:
        self.frame = frame
        self.number = number
        self.tensor: Tensor | None = tensor
        self.version = tensor._version
        self.parked: View | None = None

    def get(self) -> Tensor:
        """The tensor."""
        if self.tensor is not None:
            return unchanged(self.tensor, self.version, self.frame.name)
        if self.parked is not None:
            return self.parked.fetch()
        return self.frame.recomputed(self.number)


class Enough(Exception):  # noqa: N818 - not an error
    """Everything that was asked for has been computed."""


class Frame:
    """A segment in one forward."""

    def __init__(self, name: str, state: Segment, tape: Tape, device: torch.device, group: int) -> None:
        self.name = name
        self.state = state
        self.tape = tape
        self.device = device
        self.group = group  # of tensors on the host
        self.random = randomness.state(device)
        self.snapshots: list[buffers.Snapshot] = []
        self.saved: list[Saved] = []
        self.looks: list[Look] = []
        self.stops_early = True
        self.is_kept: IsKept = lambda _: False
        self._again: dict[int, dict[int, Tensor]] = {}
        self._lock = threading.RLock()

    def pack(self, tensor: Tensor) -> Saved:
        """Autograd saves this tensor."""
        saved = Saved(self, len(self.looks), tensor)
        self.looks.append(Look.of(tensor))
        self.saved.append(saved)
        return saved

    def bytes_saved(self) -> int:
        """What the saved tensors take, those counted once that share memory."""
        tensors = [saved.tensor for saved in self.saved if saved.tensor is not None]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    # When the segment ends --------------------------------------------------------------------------------

    def keep(self) -> None:
        """Leave everything where it is; nothing will be repeated."""
        self.saved = []
        self.snapshots = []
        self.tape = Tape(())

    def park_saved(self, offloader: Offloader, at_once: bool) -> None:
        """Send everything that was saved to the host."""
        for saved in self.saved:
            if saved.tensor is not None and is_worth_moving(saved.tensor):
                saved.parked = offloader.park(saved.tensor, self.group, at_once=at_once)
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
                call.dear.saved = [None if one.written_to() else one for one in call.dear.saved]

    def park_inputs(self, offloader: Offloader, at_once: bool) -> None:
        """Send what the segment needs when it is repeated to the host."""
        for external in self.tape.externals:
            self.park_input(external, offloader, at_once)
        for call in self.tape.calls:
            for one in [] if call.dear is None else call.dear.saved:
                if one is not None:
                    one.park(lambda tensor: offloader.park(tensor, self.group, at_once=at_once))

    def park_input(self, external: External, offloader: Offloader, at_once: bool) -> None:
        """Send one input to the host, if that is worth it."""
        tensor = external.tensor
        if tensor is not None and not external.is_kept and is_worth_moving(tensor):
            external.parked = offloader.park(tensor, self.group, at_once=at_once)
            external.tensor = None

    # In the backward --------------------------------------------------------------------------------------

    def recomputed(self, number: int) -> Tensor:
        """A saved tensor, after the segment was repeated."""
        task = torch._C._current_graph_task_id()
        with self._lock:
            tensors = self._again.get(task)
            if tensors is None or number not in tensors:
                tensors = self._repeat()
                self._again = {task: tensors}  # of an earlier backward nothing is needed any more
            tensor = tensors.pop(number)
            if not tensors:
                self._again = {}
            return tensor

    def _repeat(self) -> dict[int, Tensor]:
        collected: dict[int, Tensor] = {}
        count = 0
        copies: set[int] = set()
        stops = False

        def collect(tensor: Tensor) -> Tensor | None:
            nonlocal count
            if self.is_kept(tensor) or tensor.untyped_storage().data_ptr() in copies:
                return None
            if count >= len(self.looks) or Look.of(tensor) != self.looks[count]:
                raise RuntimeError(self._different(count, tensor))
            collected[count] = tensor.detach()
            count += 1
            if count == len(self.looks) and stops:
                raise Enough
            return None

        @contextmanager
        def around(call: Call) -> Iterator[None]:
            nonlocal stops
            stops = self.stops_early
            giving = nullcontext() if call.dear is None else dear.Giving(call.dear)
            with torch.autograd.graph.saved_tensors_hooks(collect, _never), giving:
                yield

        present = Surroundings.now(self.tape.devices)
        torch.autocast_increment_nesting()
        try:
            with buffers.replaced(self.snapshots) as replaced, randomness.replaying(self.random, self.device):
                copies = {tensor.untyped_storage().data_ptr() for tensor in replaced}
                self.tape.repeat(_fetch, around, lambda: count == len(self.looks))
        except Enough:
            pass
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            present.restore()
        if count < len(self.looks):
            raise RuntimeError(self._different(count, None))
        return collected

    def _different(self, count: int, tensor: Tensor | None) -> str:
        expected = self.looks[count] if count < len(self.looks) else None
        return (
            f"the segment that ends at {self.name!r} did something else when it was repeated: saved tensor {count + 1} "
            f"of {len(self.looks)} was {_described(expected)}, and is {_described(tensor and Look.of(tensor))}. Its "
            "forward depends on something that changed in between: a global, a counter, a file, another generator of "
            "random numbers. Leave that module out of recompute, or make its forward depend on its inputs only."
        )


def unchanged(tensor: Tensor, version: int, name: str) -> Tensor:
    """The tensor, if nobody wrote to it since it was saved: what autograd checks too, where there are no hooks."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a saved "
            f"tensor {tuple(tensor.shape)} near {name!r} is at version {tensor._version}; expected version {version}."
        )
    return tensor


def _fetch(external: External) -> Tensor:
    if external.parked is not None:
        return external.parked.fetch()
    assert external.tensor is not None
    if not external.is_kept and not external.is_written and external.tensor._version != external.version:
        raise RuntimeError(
            f"an input {tuple(external.tensor.shape)} of a segment was written in place between its forward and its "
            "backward, so the segment cannot be repeated. Write to a copy of it: x = x.clone()."
        )
    return external.tensor


def _described(look: Look | None) -> str:
    return "missing" if look is None else f"{tuple(look.shape)} {look.dtype} on {look.device}"


def _never(_: Any) -> Tensor:
    raise AssertionError("nobody asks for the saved tensors of a repeated segment")
