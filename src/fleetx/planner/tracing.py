"""One small forward of a model: which modules run, in which order, what they save, and what depends on what."""

import random
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleetx.memory.structures import tensors_in
from fleetx.notices import quiet
from fleetx.planner.feeding import Feeding, placed, resized
from fleetx.planner.untouched import untouched
from fleetx.slicing import Batch

OTHER_SEED = 1_618_033_989  # which nobody else takes


@dataclass(eq=False)
class Call:
    """One call of a module."""

    name: str
    module: nn.Module
    depth: int
    begins: int  # position among all beginnings and ends
    saved_before: int  # bytes saved for the backward until then
    ends: int = -1
    saved: int = 0  # bytes saved inside
    reads: tuple[Any, ...] = ()  # nodes of the graph that made its inputs
    gives: tuple[Any, ...] = ()  # and its outputs
    shapes: tuple[tuple[int, ...], ...] = ()  # of its outputs


@dataclass(eq=False)
class Trace:
    """The calls of a forward, in the order in which they began."""

    calls: list[Call] = field(default_factory=list)
    saved: int = 0  # bytes, for `samples` samples
    samples: int = 0
    blocks: list[int] = field(default_factory=list)  # bytes of each tensor that was saved, in this order
    loss: Tensor | None = None  # holds the graph, which is looked at later
    has_loss: bool = True  # or the model gave something else, which stood for one

    @property
    def once(self) -> list[Call]:
        """Those of modules that ran once; the model itself is none of them."""
        counts: dict[int, int] = {}
        for call in self.calls:
            counts[id(call.module)] = counts.get(id(call.module), 0) + 1
        return [call for call in self.calls if call.name and counts[id(call.module)] == 1]

    def leaves(self) -> list[Call]:
        """Those in which no other module ran, and that ran once."""
        return [c for c in self.once if not any(o.begins > c.begins and o.ends < c.ends for o in self.calls)]

    def depends(self, later: Call, earlier: Call) -> bool:
        """Whether what a call read was made with what an earlier one gave."""
        wanted = set(earlier.gives)
        if not wanted or not later.reads:
            return not wanted or not later.reads  # nothing is known
        oldest = min(node._sequence_nr() for node in wanted)
        seen, stack = set(), list(later.reads)
        while stack:
            node = stack.pop()
            if node in wanted:
                return True
            if node in seen:
                continue
            seen.add(node)
            # Nodes are numbered as they are made; accumulators of gradients have the largest number and no past.
            stack += [up for up, _ in node.next_functions if up is not None and up._sequence_nr() >= oldest]
        return False

    def is_neck(self, outer: Call, inner: Call) -> bool:
        """Whether all that a call still reads after one inside of it has ended, is what that one gave."""
        last = max((node._sequence_nr() for node in inner.gives), default=-1)
        if not outer.reads or not outer.gives or last < 0:
            return False  # nothing is known: what needs no gradient is not in the graph
        if set(inner.gives) & set(outer.reads):
            return False  # it gives back what came in
        passed, seen, stack = set(inner.gives), set(), list(outer.gives)
        while stack:
            node = stack.pop()
            if node in seen or node in passed:
                continue
            if node._sequence_nr() <= last:
                return False
            seen.add(node)
            stack += [up for up, _ in node.next_functions if up is not None]
        return True


def dropped(name: str) -> str:
    """What is said of a module that is left out at random."""
    return (
        f"a model is planned at modules that run in each forward, and {name!r} ran in one and not in another: it seems "
        "to be left out at random. Set the rate of that to 0 while the plan is made, to have room for all of them."
    )


def trace(feeding: Feeding, sample: Batch, samples: int = 2, *, seed: int | None = None) -> Trace:
    """Watch one forward, on two samples because batch norms may refuse one. The model is left as it was.

    Nothing that autograd saves is kept, so that this takes no more memory than a forward without gradients. `seed`: of
    other random numbers than those that come next.
    """
    model = feeding.model
    seen = Trace(samples=samples)
    open_calls: list[Call] = []
    saved = _SavedBytes([*model.parameters(), *model.buffers()])
    clock = 0

    def enter(module: nn.Module, args: Any, kwargs: Any, name: str) -> None:
        nonlocal clock
        reads = tuple(t.grad_fn for t in tensors_in((args, kwargs)) if t.grad_fn is not None)
        call = Call(name, module, len(open_calls), clock, saved.total, reads=reads)
        clock += 1
        seen.calls.append(call)
        open_calls.append(call)

    def leave(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        nonlocal clock
        call, given = open_calls.pop(), tensors_in(output)
        call.ends, call.saved = clock, saved.total - call.saved_before
        call.gives = tuple(t.grad_fn for t in given if t.grad_fn is not None)
        call.shapes = tuple(tuple(t.shape) for t in given)
        clock += 1

    handles: list[Any] = []
    batch = placed(resized(sample, samples), feeding.device)
    with quiet(), untouched(model, feeding.loss_fn, gradients=False), torch.enable_grad():
        for name, module in model.named_modules():
            entering = lambda m, args, kwargs, name=name: enter(m, args, kwargs, name)  # noqa: E731
            handles.append(module.register_forward_pre_hook(entering, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True))
        if seed is not None:
            _seed(seed)
        try:
            with torch.autograd.graph.saved_tensors_hooks(saved.count, _never):
                seen.loss, seen.has_loss = feeding.loss_or_other(batch)
        except Exception as error:
            if feeding.loss_fn is None and feeding.compute is None and isinstance(sample, tuple | list):
                error.add_note("FleetX: without loss_fn the model is called with all of the sample, a target included.")
            raise
        finally:
            for handle in handles:
                handle.remove()
    seen.calls = [call for call in seen.calls if call.ends >= 0]
    seen.saved, seen.blocks = saved.total, saved.blocks
    return seen


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # else it would be seeded so when it starts
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed)


class _SavedBytes:
    """Counts what autograd saves beside the model's own tensors.

    By itself: the graph has hold of it, and the trace of the graph. If it knew the trace, nobody could ever free them.
    """

    def __init__(self, known: list[Tensor]) -> None:
        self.total = 0
        self.blocks: list[int] = []
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known if _has_memory(tensor)}
        self._counted: dict[int, Any] = {}

    def count(self, tensor: Tensor) -> None:
        """Autograd saves a tensor."""
        if _has_memory(tensor):
            storage = tensor.untyped_storage()
            place = storage.data_ptr()
            if place not in self._known and place not in self._counted:
                # Forgotten when the memory is freed, since it may then be another tensor's.
                counted = self._counted
                counted[place] = weakref.ref(storage, lambda _: counted.pop(place, None))
                self.total += storage.nbytes()
                self.blocks.append(storage.nbytes())


def _never(_: Any) -> Tensor:
    raise AssertionError("a traced forward has no backward")


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0
