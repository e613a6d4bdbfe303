"""Tables that tell the kernels where a list of parameters, their gradients and their state lie.

A plan is made once for a list of parameters and serves every step until something moves. Gradients usually do move at
each step: their addresses, with the learning rates, are one small copy from pinned memory that nobody waits for, and
none where they stayed in place.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fleetx.optim.groups import State, working_dtype

if TYPE_CHECKING:
    from fleetx.optim.layerwise import LayerwiseOptimizer

ALIGNMENT = 16

_dtype_of = attrgetter("dtype")


@dataclass(frozen=True)
class Tuning:
    """How kernels cut their work: elements moved at once, how often per program, and warps of a program."""

    block: int = 2048
    rounds: int = 1
    warps: int = 8

    @property
    def chunk(self) -> int:
        """Elements that a program serves."""
        return self.block * self.rounds


class Place(NamedTuple):
    """Where a parameter stands: among all of the optimizer, in which group, and where in that."""

    number: int
    group: int
    index: int
    parameter: Tensor


@dataclass(frozen=True)
class Member:
    """One parameter of a plan, and the tensors that kernels read and write for it."""

    group: int
    index: int
    parameter: Tensor
    state: State
    weights: Tensor
    low: Tensor | None
    gradient_dtype: torch.dtype
    aligned: bool

    @property
    def kind(self) -> tuple[torch.dtype, torch.dtype, torch.dtype | None, bool]:
        """What members must have in common to be served by one launch."""
        return self.weights.dtype, self.gradient_dtype, None if self.low is None else self.low.dtype, self.aligned


@dataclass(frozen=True)
class Lot:
    """Members of one kind: a run of the plan's chunks."""

    weight: torch.dtype
    gradient: torch.dtype
    low: torch.dtype | None
    aligned: bool
    first: int
    blocks: int


@dataclass(frozen=True)
class Fresh:
    """What may be new at each step, on the device: addresses of gradients, and learning rates of groups."""

    gradient_at: Tensor
    lrs: Tensor


class Plan:
    """The tables of one list of parameters of one device."""

    def __init__(self, optimizer: "LayerwiseOptimizer", places: Sequence[Place], tuning: Tuning) -> None:
        self.tuning = tuning
        self.device = places[0].parameter.device
        gradients: list[Any] = [place.parameter.grad for place in places]
        self._refused = {
            number: place.parameter
            for number, (place, gradient) in enumerate(zip(places, gradients, strict=True))
            if not _same_layout(gradient, _layout(place.parameter))
        }
        readable = [self._in_layout(number, gradient) for number, gradient in enumerate(gradients)]
        found = [_member(optimizer, place, gradient) for place, gradient in zip(places, readable, strict=True)]
        # Members of a kind stand side by side, so that they are one run of chunks.
        order = sorted(range(len(found)), key=lambda number: [str(part) for part in found[number].kind])
        self.members = [found[number] for number in order]
        self.count = len(self.members)
        self.parameters = [member.parameter for member in self.members]
        self.low = [member for member in self.members if member.low is not None]
        self.scattered = list(_scattered(self.members))
        self._states = [member.state for member in self.members]
        if optimizer._counts_steps:
            self._count_on_device()
        self.numbers = [places[number].number for number in order]
        self._refused = {order.index(number): parameter for number, parameter in self._refused.items()}
        self._remember(optimizer)
        self._build(len(optimizer.param_groups))
        self._settings: Any = None
        self._uploaded: Any = None
        self._fresh: Fresh | None = None
        # A graph's own copies: it reads them at each replay.
        self._captured: list[Any] = []
        self._spare: Tensor | None = self._staging()

    # Is the plan still true?

    def _remember(self, optimizer: "LayerwiseOptimizer") -> None:
        gradients: list[Any] = [parameter.grad for parameter in self.parameters]
        self._dtypes = list(map(_dtype_of, gradients))
        self._strides = list(map(Tensor.stride, gradients))
        self._addresses = list(map(Tensor.data_ptr, self.parameters))
        self._optimizer_state = optimizer.state
        self._state_ids = list(map(id, self._optimizer_state.values()))
        names = [*optimizer._buffers, *(["step"] if optimizer._counts_steps else [])]
        self._state_tensors = {name: [state[name] for state in self._states] for name in names}
        self._aligned = [number for number, member in enumerate(self.members) if member.aligned]

    def accept(self, optimizer: "LayerwiseOptimizer", gradients: Sequence[Any]) -> list[Tensor] | None:
        """The gradients in the members' order, as the kernels can read them; None if the plan no longer holds.

        It holds while parameters and state lie where they lay, and gradients are of the same dtypes and strides.
        """
        mine: list[Tensor] = [gradients[number] for number in self.numbers]
        holds = (
            optimizer.state is self._optimizer_state
            and list(map(id, self._optimizer_state.values())) == self._state_ids
            and list(map(Tensor.data_ptr, self.parameters)) == self._addresses
            and list(map(_dtype_of, mine)) == self._dtypes
            and list(map(Tensor.stride, mine)) == self._strides
            and all(
                all(map(is_, map(itemgetter(name), self._states), tensors))
                for name, tensors in self._state_tensors.items()
            )
            and all(optimizer._weights(member.parameter, member.state) is member.weights for member in self.low)
        )
        if not holds:
            return None
        for number in self._refused:
            mine[number] = self._in_layout(number, mine[number])
        self._gradient_at = list(map(Tensor.data_ptr, mine))
        misaligned = any(self._gradient_at[number] % ALIGNMENT for number in self._aligned)
        return None if misaligned else mine

    def _count_on_device(self) -> None:
        """Steps are counted by the kernels, so that one that is left out does not count, and nobody waits for it."""
        strange = [s for s in self._states if s["step"].device != self.device or s["step"].dtype != torch.float32]
        if not strange:
            return
        if all(state["step"].device.type == "cpu" for state in strange):
            counts = self.on_device(np.array([float(state["step"]) for state in strange], dtype=np.float32))
        else:
            counts = torch.stack([state["step"].reshape(()).to(self.device, torch.float32) for state in strange])
        for number, state in enumerate(strange):
            state["step"] = counts[number]

    def _in_layout(self, number: int, gradient: Tensor) -> Tensor:
        """A gradient whose memory is laid out as its parameter's."""
        if number not in self._refused:
            return gradient
        return torch.empty_like(self._refused[number], dtype=gradient.dtype).copy_(gradient)

    # Tables.

    def _build(self, groups: int) -> None:
        sizes = np.array([member.weights.numel() for member in self.members], dtype=np.int64)
        chunks = -(-sizes // self.tuning.chunk)
        ends = np.cumsum(chunks)
        tensors = np.repeat(np.arange(self.count), chunks)
        numbers = np.arange(ends[-1]) - np.repeat(ends - chunks, chunks)
        self.groups = groups
        self.sizes = self.on_device(sizes)
        self.blocks = self.on_device(np.stack([tensors, numbers], axis=1).astype(np.int32))
        self.spans = self.on_device(np.concatenate([[0], ends]).astype(np.int32))
        self.group_of = self.on_device(np.array([member.group for member in self.members], dtype=np.int32))
        self.weight_at = self._table([member.weights for member in self.members])
        self.low_at = self._table([m.weights if m.low is None else m.low for m in self.members])
        self.state_at = {name: self._table(tensors) for name, tensors in self._state_tensors.items()}
        self.lots = list(self._cut(ends))
        parts = [_even(size) for size in (ends[-1], ends[-1], 2 * self.count, 10 * self.count, self.count, 2)]
        scratch = torch.zeros(sum(parts), dtype=torch.float64, device=self.device)
        self.partials_p, self.partials_g, self.sums, self.coefficients, ratios, self.flags = scratch.split(parts)
        self.ratios = ratios[: self.count]
        self.one = torch.ones(1, dtype=torch.float32, device=self.device)

    def _cut(self, ends: np.ndarray) -> Iterator[Lot]:
        number = first = 0
        for kind, members in groupby(self.members, key=attrgetter("kind")):
            number += len(list(members))
            end = int(ends[number - 1])
            yield Lot(*kind, first=first, blocks=end - first)
            first = end

    def _table(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.on_device(np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64))

    def on_device(self, array: np.ndarray) -> Tensor:
        """A copy on the device that nobody waits for."""
        host = torch.from_numpy(array)
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host.clone()

    # What changes from step to step.

    def needs(self, key: Any) -> bool:
        """Whether these settings are not on the device yet."""
        return key != self._settings

    def settings(self, key: Any, rows: Sequence[Sequence[float]], max_norm: float | None) -> tuple[Tensor, Tensor]:
        """Settings as one row each over all members, and the limit of clipping; uploaded when `key` is new."""
        if self.needs(key):
            if self._capturing():
                raise RuntimeError(
                    "settings of the optimizer changed since its last step, and they cannot while a graph is captured: "
                    "run one step with them before the capture."
                )
            limit = [float("inf") if max_norm is None else max_norm, 0.0]
            table = np.array([*zip(*rows, strict=True)], dtype=np.float64).ravel()
            self._hypers = self.on_device(np.concatenate([limit, table]))
            self._settings = key
        return self._hypers[2:], self._hypers[:1]

    def fresh(self, lrs: Sequence[float | Tensor]) -> Fresh:
        """Addresses of the gradients accepted last, and the learning rates."""
        values = [0.0 if isinstance(lr, Tensor) and lr.device.type != "cpu" else float(lr) for lr in lrs]
        if (self._gradient_at, values) != self._uploaded or self._capturing():
            self._fresh = self._upload(self._gradient_at, values)
        assert self._fresh is not None
        for number, lr in enumerate(lrs):
            if isinstance(lr, Tensor) and lr.device.type != "cpu":
                self._fresh.lrs[number].copy_(lr.detach().reshape(()), non_blocking=True)
        return self._fresh

    def _upload(self, addresses: list[int], lrs: list[float]) -> Fresh:
        capturing = self._capturing()
        host = self._spare if capturing and self._spare is not None else self._staging()
        array = host.numpy()
        array[: self.count] = addresses
        array[_even(self.count) :].view(np.float64)[:] = lrs
        # A new tensor: kernels of the last step may still read the old one, and a graph's must stay its own.
        device = host.to(self.device, non_blocking=True) if self.device.type == "cuda" else host
        fresh = Fresh(device[: self.count], device[_even(self.count) :].view(torch.float64))
        if capturing:
            self._captured.append((host, device))
            self._spare = self._uploaded = None
        else:
            self._spare = self._spare if self._spare is not None else self._staging()
            self._uploaded = (addresses, lrs)
        return fresh

    def _staging(self) -> Tensor:
        return torch.empty(_even(self.count) + self.groups, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _even(size: int) -> int:
    """Tables of 64 bit begin at multiples of 16 bytes: Triton compiles anew for each other alignment."""
    return int(size) + int(size) % 2


def _layout(tensor: Tensor) -> Tensor:
    """The order of memory that the kernels keep a parameter's tensors in: its own, without gaps."""
    return torch.empty_like(tensor, device="meta")


def _member(optimizer: "LayerwiseOptimizer", place: Place, gradient: Tensor) -> Member:
    _, group, index, parameter = place
    state = optimizer.state[parameter]
    dense = parameter if _same_layout(parameter, _layout(parameter)) else torch.empty_like(parameter)
    low = dense if parameter.dtype != working_dtype(parameter) else None
    weights = dense if low is None else _laid_out(state, "master", optimizer._weights(parameter, state), dense)
    optimizer._make_state(state, weights)
    buffers = [_laid_out(state, name, state[name], dense) for name in optimizer._buffers]
    touched = [weights, gradient, *buffers, *([] if low is None else [low])]
    aligned = all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in touched)
    return Member(group, index, parameter, state, weights, low, gradient.dtype, aligned)


def _laid_out(state: State, name: str, tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor of the state; made anew if it came in another order of memory, as from a file."""
    if not _same_layout(tensor, like):
        state[name] = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
    return state[name]


def _scattered(members: Sequence[Member]) -> Iterator[tuple[Tensor, Tensor]]:
    """Parameters with gaps in their memory, each with the dense tensor that stands for it."""
    for member in members:
        stand_in = member.weights if member.low is None else member.low
        if stand_in is not member.parameter:
            yield member.parameter, stand_in


def _same_layout(one: Tensor, other: Tensor) -> bool:
    """Whether each element lies at the same offset in both; the stride of a dimension of one entry says nothing."""
    if one.stride() == other.stride():
        return True
    return all(a == b for size, a, b in zip(one.shape, one.stride(), other.stride(), strict=True) if size > 1)
