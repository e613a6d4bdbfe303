"""Cases of torch's own tables of operators and modules, each plain against recompute: equal to the last bit.

The tables are `op_db` and `module_db` of `torch.testing._internal`. Importing them takes seconds, so that only tests
that need them do, and each test goes through many cases.
"""

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fleetx import memory
from tests.memory.comparing import assert_same

WAYS = {"inputs": ("inputs", "device"), "dear": ("dear", "device"), "host": ("inputs", "host")}
"""What a segment saves, and where."""

DIFFERS_FROM_ITSELF = frozenset({"linalg.lstsq"})
"""Operators that do not give the same bits twice. Proof: `differs_from_itself` runs the plain case again."""

FAILS_UNDER_A_MODE = frozenset({"nn.LinearCrossEntropyLoss", "nn.functional.linear_cross_entropy"})
"""Some of their cases give something else in any dispatch mode, and so with dear outputs. Proof: `fails_under_a_mode`
runs the plain case in one."""


@dataclass
class Case:
    """One row of a table: what is called with which inputs."""

    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[Any, dict[str, Any]]
    known: str = field(default="", repr=False)  # its name in the lists of exceptions


class Calling(nn.Module):
    """Calls an operator, as a module of its own."""

    def __init__(self, operator: Callable[..., Any]) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.operator(*args, **kwargs)


class Around(nn.Module):
    """A model whose block is cut: what its inputs and outputs pass through is not part of the segment."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.end = block, nn.Identity()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.end(self.block(*args, **kwargs))


class Between(nn.Module):
    """Calls an operator between its modules, so that it is recorded operation by operation."""

    def __init__(self, block: Calling) -> None:
        super().__init__()
        self.operator, self.block = block.operator, nn.Identity()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.block(self.operator(*args, **kwargs))


def seed(number: int = 0) -> None:
    """Start all generators that a case may draw from."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def operators(shard: int, shards: int, names: tuple[str, ...] = ()) -> Iterator[Case]:
    """The cases of `op_db` whose operators fall into this shard, or have these names."""
    from torch.testing._internal.common_methods_invocations import op_db

    for place, info in enumerate(op_db):
        if info.name not in names if names else place % shards != shard:
            continue
        dtype = next((one for one in (torch.float64, torch.complex128) if _is_differentiable(info, one)), None)
        if dtype is None:
            continue
        seed()
        for number, sample in enumerate(info.sample_inputs("cpu", dtype, requires_grad=True)):
            name = f"{info.name}{'.' if info.variant_test_name else ''}{info.variant_test_name} {number}"
            call = _processed(info.op, sample.output_process_fn_grad)
            inputs = ((sample.input, *sample.args), sample.kwargs)
            yield Case(name, lambda call=call: Calling(call), inputs, info.name)


def modules(shard: int, shards: int, names: tuple[str, ...] = ()) -> Iterator[Case]:
    """The cases of `module_db` that fall into this shard, or whose modules have these names.

    By case: half of the table is one loss.
    """
    from torch.testing._internal.common_modules import module_db

    infos = [info for info in module_db if not names or info.name in names]
    cases = (case for info in infos for training in (True, False) for case in _rows(info, training))
    return (case for number, case in enumerate(cases) if names or number % shards == shard)


def _rows(info: Any, training: bool) -> Iterator[Case]:
    seed()
    rows = info.module_inputs_func(info, "cpu", torch.float32, requires_grad=True, training=training)
    for number, row in enumerate(rows):
        if row.forward_input is not None:
            make = _module_of(info.module_cls, row.constructor_input, training)
            name = f"{info.name} {'train' if training else 'eval'} {number}"
            yield Case(name, make, (tuple(row.forward_input.args), row.forward_input.kwargs), info.name)


def _is_differentiable(info: Any, dtype: torch.dtype) -> bool:
    return info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")


def _processed(operator: Callable[..., Any], process: Callable[[Any], Any]) -> Callable[..., Any]:
    """The operator without the part of its output that is not determined, such as the phase of an eigenvector."""
    return lambda *args, **kwargs: process(operator(*args, **kwargs))


def _module_of(kind: type[nn.Module], given: Any, training: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        seed()
        return kind(*given.args, **given.kwargs).train(training)

    return make


@dataclass
class Outcome:
    """What a case gave, or the error that it raised."""

    error: type[BaseException] | None = None
    message: str = ""
    values: list[tuple[str, Tensor | None]] = field(default_factory=list)

    def difference(self, other: "Outcome") -> str:
        """How it differs from another one; empty if it does not."""
        if self.error is not other.error:
            return f"{self.error and self.error.__name__} {self.message!r} and {other.error} {other.message!r}"
        try:
            assert len(self.values) == len(other.values), f"{len(self.values)} and {len(other.values)} values"
            for (what, mine), (_, theirs) in zip(self.values, other.values, strict=True):
                _assert_same(mine, theirs, what)
        except AssertionError as error:
            return str(error)
        return ""


def _assert_same(mine: Tensor | None, theirs: Tensor | None, what: str) -> None:
    if mine is not None and theirs is not None:
        mine, theirs = (one.to_dense() if one.layout is not torch.strided else one for one in (mine, theirs))
        if mine.is_complex() and theirs.is_complex():
            mine, theirs = (torch.view_as_real(one.resolve_conj()) for one in (mine, theirs))
        mine, theirs = mine.resolve_neg(), theirs.resolve_neg()
    assert_same(mine, theirs, what)


def outcome_of(model: nn.Module, inputs: tuple[Any, dict[str, Any]]) -> Outcome:
    """Run a forward and a backward on copies of these inputs."""
    (args, kwargs), given = _copied(inputs)
    seed(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs = [one for one in pytree.tree_leaves(model(*args, **kwargs)) if isinstance(one, Tensor)]
            gradients = _gradients(outputs, [*given, *model.parameters()])
    except Exception as error:  # the plain case must raise the same
        return Outcome(type(error), str(error).splitlines()[0] if str(error) else "")
    values: list[tuple[str, Tensor | None]] = [(f"output {n}", one.detach()) for n, one in enumerate(outputs)]
    values += [(f"gradient {n}", one) for n, one in enumerate(gradients)]
    values += [(name, buffer.clone()) for name, buffer in model.named_buffers()]
    return Outcome(values=[*values, ("the random state", torch.get_rng_state())])


def _gradients(outputs: list[Tensor], wanted: list[Tensor]) -> list[Tensor | None]:
    depending = [one for one in outputs if one.requires_grad]
    wanted = [one for one in wanted if one.requires_grad]
    if not depending or not wanted:
        return []
    seed(2)
    ways = [torch.randn_like(one) if one.layout is torch.strided else torch.ones_like(one) for one in depending]
    return list(torch.autograd.grad(depending, wanted, ways, allow_unused=True))


def _copied(inputs: Any) -> tuple[Any, list[Tensor]]:
    """Inputs with leaves of their own, and these leaves; the same memory, which cases do not write to."""
    flat, tree = pytree.tree_flatten(inputs)
    for place, one in enumerate(flat):
        if isinstance(one, Tensor) and one.requires_grad:
            flat[place] = one.detach().requires_grad_()
    return pytree.tree_unflatten(flat, tree), [one for one in flat if isinstance(one, Tensor)]


class Nothing(TorchDispatchMode):
    """A dispatch mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def differs_from_itself(case: Case) -> bool:
    """Whether the plain module gives other bits when it is called again: where its memory lies may matter to LAPACK."""
    module, (args, kwargs) = case.make(), case.inputs
    first, held = None, []
    for number in range(1000):
        with torch.no_grad():
            bits = [one.numpy().tobytes() for one in pytree.tree_leaves(module(*args, **kwargs))]
        first = bits if first is None else first
        if bits != first:
            return True
        held = [*held[-20:], torch.ones(len(bits) + number % 7)]
    return False


def fails_under_a_mode(case: Case, plain: Outcome) -> bool:
    """Whether the plain case gives something else inside of any dispatch mode."""
    with Nothing():
        return bool(outcome_of(Around(case.make()), case.inputs).difference(plain))


def complaints(case: Case, ways: dict[str, tuple[str, str]] = WAYS) -> list[str]:
    """How recompute differs from the plain case; nothing, if it is exact or a known exception that is proven."""
    found: list[str] = []
    block = case.make()
    plain = outcome_of(Around(copy.deepcopy(block)), case.inputs)
    models = [("", Around)] + ([(" between modules", Between)] if isinstance(block, Calling) else [])
    for (where, around), (way, (save, home)) in ((model, way) for model in models for way in ways.items()):
        model = around(copy.deepcopy(block))
        memory.apply(model, [memory.Segment("block", save, home)])
        difference = outcome_of(model, case.inputs).difference(plain)
        if difference and not _is_known(case, plain):
            found.append(f"{case.name}{where}, {way}: {difference}")
    return found


def _is_known(case: Case, plain: Outcome) -> bool:
    if case.known in DIFFERS_FROM_ITSELF:
        return differs_from_itself(case)
    return case.known in FAILS_UNDER_A_MODE and fails_under_a_mode(case, plain)
