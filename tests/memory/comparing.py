"""Trains a model with a plan beside a plain copy of it: both must stay equal to the last bit."""

import contextlib
import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fleetx import memory
from fleetx.memory.underway import active_run

RATE = 0.05


@dataclass
class Example:
    """A model, what it is fed in each step, where it can be cut, and how its output becomes a loss."""

    model: nn.Module
    batch: Callable[[int], Any]  # of a step: a tuple of arguments, or a dict of keyword arguments
    cuts: dict[str, list[str]] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] = None  # type: ignore[assignment]

    def __post_init__(self):
        self.loss = self.loss or sum_of_squares


@dataclass
class Outcome:
    """What a step left behind."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    random: Tensor
    inputs: list[Tensor | None]


def sum_of_squares(output):
    """A loss for any structure of tensors."""
    tensors = [value for value in pytree.tree_leaves(output) if isinstance(value, Tensor) and value.requires_grad]
    return sum(tensor.square().mean().to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors)


def in_precision(example: Example, precision: str) -> Example:
    """The example in fp32, fp64, or bf16 (autocast, so the weights stay fp32)."""
    if precision != "fp64":
        return example
    make = example.batch

    def batch(step):
        def widened(value):
            return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

        return pytree.tree_map(widened, make(step))

    return Example(example.model.double(), batch, example.cuts, example.loss)


@contextlib.contextmanager
def autocast_for(precision):
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    with contextlib.ExitStack() as stack:
        for device in devices if precision == "bf16" else ():
            stack.enter_context(torch.autocast(device, torch.bfloat16))
        yield


def random_state():
    """Of all generators that a model may draw from."""
    there = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return torch.cat([torch.get_rng_state(), *there])


def call(model, batch):
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    return model(*args, **kwargs)


def step(model, batch, loss_of, precision="fp32", update=True) -> Outcome:
    """Forward, backward, and a step of gradient descent."""
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.grad = None
    with autocast_for(precision):
        loss = loss_of(call(model, batch))
    loss.backward()
    gradients = {name: p.grad if p.grad is None else p.grad.clone() for name, p in parameters.items()}
    if update:
        descend(model)
    inputs = [value.grad for value in pytree.tree_leaves(batch) if isinstance(value, Tensor)]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return Outcome(loss.detach().clone(), gradients, buffers, random_state(), inputs)


@torch.no_grad()
def descend(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter -= RATE * parameter.grad


def assert_equal_outcomes(ours: Outcome, plain: Outcome) -> None:
    assert_same(ours.loss, plain.loss, "the loss")
    for kind in ("gradients", "buffers"):
        mine, theirs = getattr(ours, kind), getattr(plain, kind)
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert_same(mine[name], theirs[name], f"{kind} of {name}")
    for index, (mine, theirs) in enumerate(zip(ours.inputs, plain.inputs, strict=True)):
        assert_same(mine, theirs, f"the gradient of input {index}")
    assert_same(ours.random, plain.random, "the random state")


def assert_same(mine: Tensor | None, theirs: Tensor | None, what: str) -> None:
    if mine is None or theirs is None:
        assert mine is theirs, f"{what}: {mine} and {theirs}"
        return
    mine, theirs = (tensor.to_dense() if tensor.is_sparse else tensor for tensor in (mine, theirs))
    same = mine.dtype == theirs.dtype and mine.shape == theirs.shape and torch.equal(_bits(mine), _bits(theirs))
    assert same, f"{what} differ by {(mine.double() - theirs.double()).abs().max() if mine.numel() else 'shape'}"


def _bits(tensor):
    """NaNs are equal if their bits are."""
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return tensor.contiguous().view(kinds[tensor.element_size()]) if tensor.is_floating_point() else tensor


def assert_exact(
    example: Example,
    segments: Sequence[Any],
    precision: str = "fp32",
    steps: int = 3,
    step: Callable[..., Outcome] = step,
    **options: Any,
) -> memory.Applied:
    """Train a plain copy and the model with a plan side by side; gives the plan.

    With `compile` the copy is compiled in the same parts, and saves everything.
    """
    example = in_precision(example, precision)
    plain, ours = copy.deepcopy(example.model), example.model
    applied = memory.apply(ours, segments, **options)
    if options.get("compile"):
        names = [one if isinstance(one, str) else one.until for one in segments]
        compiling = {name: options[name] for name in ("compile", "options", "backend") if name in options}
        memory.apply(plain, names, save="everything", **compiling)
    for number in range(steps):
        outcomes = []
        for model in (plain, ours):
            torch.manual_seed(seed_of(number))
            outcomes.append(step(model, example.batch(number), example.loss, precision))
        assert_equal_outcomes(outcomes[1], outcomes[0])
        # Where a graph breaks, the compiler knows the frames that called it until garbage is collected.
        assert_nothing_left(applied, collect=bool(options.get("compile")))
    return applied


def seed_of(number: int) -> int:
    """Of the random numbers of a step."""
    return 1000 + number


def assert_nothing_left(applied: memory.Applied, collect: bool = False) -> None:
    """No mode, no hook, no host memory in use."""
    if collect:
        gc.collect()
    assert active_run() is None
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    offloader = applied.experience.offloader
    assert offloader is None or offloader.arena.in_use == 0


def cycled(names: Sequence[str], states: Sequence[tuple[str, str]]) -> list[memory.Segment]:
    """Segments that take turns through (save, home)."""
    return [memory.Segment(name, *states[index % len(states)]) for index, name in enumerate(names)]


STATES = {
    "inputs": [("inputs", "device")],
    "inputs-host": [("inputs", "host")],
    "dear": [("dear", "device")],
    "dear-host": [("dear", "host")],
    "everything": [("everything", "device")],
    "everything-host": [("everything", "host")],
    "mixed": [("inputs", "host"), ("dear", "device"), ("everything", "host"), ("inputs", "device"), ("dear", "host")],
}
QUICK = ("inputs", "dear-host", "mixed")
is_thorough = False  # set where slow tests are run too


def some_states() -> list[list[tuple[str, str]]]:
    """What tests of many cases go through: all in a slow run."""
    return [STATES[name] for name in (STATES if is_thorough else QUICK)]


class Census(TorchDispatchMode):
    """Knows all memory that operations made inside, as long as it is in use."""

    def __init__(self):
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self.known[reference.cdata] = (reference, storage.nbytes())
        return output

    def in_use(self, applied: memory.Applied) -> int:
        """Bytes that are still in use, without those of the model and of the host's arena."""
        offloader = applied.experience.offloader
        slabs = [] if offloader is None else [slab.memory for slab in offloader.arena.slabs]
        model = [value for module in applied.model.modules() for value in vars(module).values()]
        model += [*applied.model.parameters(), *applied.model.buffers()]
        others = {t.untyped_storage()._cdata for t in model + slabs if isinstance(t, Tensor)}
        return sum(
            size for key, (reference, size) in self.known.items() if key not in others and not reference.expired()
        )
