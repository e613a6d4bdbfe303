"""Sums gradients over the workers while the last backward of a window still runs.

Gradients are copied into fixed buckets as autograd finishes them, and a full bucket leaves at once. Beside the
gradients the last bucket carries a few numbers (loss, weights), numbers of which each worker's arrive unsummed, and
one flag per parameter, so that a window costs no further message: a parameter that no worker used keeps `grad = None`,
exactly as in a plain run.
"""

import operator
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fleetx.comm import beats
from fleetx.comm.buckets import MIB, lay_out
from fleetx.comm.groups import Groups, GroupSettings, Message, Pipeline, groups_for
from fleetx.comm.overlap import Overlap, overlap_on
from fleetx.names import label, position
from fleetx.units import format_bytes

_MOST_SHOWN = 8


@dataclass(frozen=True)
class ReducerSettings:
    """How gradients travel, as the strategy says it."""

    bucket_mib: float = 32
    last_bucket_mib: float = 1.0
    fuse: bool = True
    wire_dtype: torch.dtype | None = None
    groups: GroupSettings = field(default_factory=GroupSettings)


@dataclass
class _Bucket:
    """One message: the gradients of some parameters side by side, in the last bucket followed by a tail."""

    number: int
    indices: list[int]
    buffer: Tensor
    payload: Tensor
    missing: set[int] = field(default_factory=set)
    wire: Tensor | None = None
    message: Message | None = None


class Reducer:
    """Sums the gradients of `parameters`, and `extras` numbers beside them, over all workers.

    Each worker also tells `own` numbers of itself, which arrive one by one. Of `late` more numbers the sums are known
    too; they are asked for when the last gradient of the backward has arrived.
    """

    def __init__(
        self, parameters: Sequence[Tensor], extras: int, settings: ReducerSettings, own: int = 0, late: int = 0
    ) -> None:
        self.parameters = list(parameters)
        self.extras = extras
        self.settings = settings
        # When the messages of the window at hand were under way.
        self.overlap: Overlap | None = None
        self._own = own
        self.late = late
        self._late_numbers: Callable[[], Tensor] | None = None
        self._workers = dist.get_world_size()
        self.messages = 0
        self._views: list[Tensor] = [torch.empty(0)] * len(self.parameters)
        self._buckets = self._build()
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.indices}
        self._tail = self._buckets[-1].buffer[self._buckets[-1].payload.numel() :]
        tail = self._tail.split([extras, own * self._workers, late, len(self.parameters)])
        self.of_workers, self.late_sums, self._flags = tail[1].view(own, self._workers), *tail[2:]
        self._next = 0
        self._pipeline = Pipeline()
        self._prescale: float | Tensor = 1.0
        self._applied = self._groups.described(len(self._buckets))  # makes them, as all workers are here together

    @property
    def payloads(self) -> list[Tensor]:
        """The memory that holds all reduced gradients, a tensor for each bucket."""
        return [bucket.payload for bucket in self._buckets if bucket.indices]

    @property
    def _groups(self) -> Groups:
        # Looked up, not held: a reducer outlives the process groups of a job that is shut down.
        return groups_for(self.settings.groups, self._buckets[0].buffer.device)

    @property
    def bucket_count(self) -> int:
        """How many messages one window takes."""
        return len(self._buckets)

    def __str__(self) -> str:
        """How gradients travel, for people."""
        sizes = [b.buffer.numel() * (b.wire if b.wire is not None else b.buffer).itemsize for b in self._buckets]
        shown = [format_bytes(size) for size in sizes[:_MOST_SHOWN]] + ["..."] * (len(sizes) > _MOST_SHOWN)
        wire = self.settings.wire_dtype
        compressed = "" if wire is None else f", rounded to {str(wire).removeprefix('torch.')} on the way"
        sent = f"({', '.join(shown)}){compressed}{self._applied}"
        if not self.settings.fuse:
            return f"{len(sizes)} all-reduces per update, not fused, as fuse_all_reduce_ops = False {sent}"
        return f"{len(self.parameters)} all-reduces, fused into {len(sizes)} per update {sent}"

    def fits(self, parameters: Sequence[Tensor]) -> bool:
        """Whether it was made for these very parameters, which may have been converted since."""
        same = len(self.parameters) == len(parameters) and all(map(operator.is_, self.parameters, parameters))
        same = same and self._workers == dist.get_world_size()
        return same and all(_merge_dtype(p) == view.dtype for p, view in zip(parameters, self._views, strict=True))

    @contextmanager
    def overlapping(
        self,
        extras: Sequence[Tensor | float],
        prescale: float | Tensor = 1.0,
        own: Sequence[Tensor | float] = (),
        late: Callable[[], Tensor] | None = None,
    ) -> Generator[None]:
        """Around the backward that ends a window: each bucket leaves as soon as it is complete.

        The hooks live only here, so any other backward, of ours or of the user's, is left alone.
        """
        self._open(extras, prescale, own)
        self._late_numbers = late
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._arrival(index))
            for index, parameter in enumerate(self.parameters)
        ]
        try:
            yield
        except BaseException:
            self._abandon()
            raise
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self) -> list[Tensor]:
        """Send what has not left yet, wait for all of it, and hand each parameter its sum; gives the extras."""
        for bucket in self._buckets[self._next :]:
            for index in sorted(bucket.missing):
                self._collect(index)
            self._send(bucket)
        self._next = len(self._buckets)
        if self.overlap is not None:
            self.overlap.look()
        with beats.waiting():
            for bucket in self._buckets:
                self._receive(bucket)
            self._hand_out()
        return list(self._tail[: self.extras].unbind())

    @beats.waiting()
    def announce(self, place: int) -> list[Tensor]:
        """Take part in a window with nothing but a 1 as its extra at `place`; gives the sums of all extras.

        For a worker whose gradients do not fit any more, while others may reduce theirs: it sends as many messages.
        What it merged so far lies in the buckets, and stays.
        """
        for bucket in self._buckets:
            numbers = torch.zeros_like(bucket.buffer if bucket.wire is None else bucket.wire)
            if bucket is self._buckets[-1]:
                numbers[bucket.payload.numel() + place] = 1
            self._pipeline.receive(self._depart(bucket, numbers))
        return list(numbers[self._buckets[-1].payload.numel() :][: self.extras].unbind())

    def adopt(self) -> None:
        """Move gradients into the buckets between micro-batches, so that only one copy of them is held."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None and parameter.grad is not self._views[index]:
                self._take(index, parameter.grad)

    # Building ------------------------------------------------------------------------------------------

    def _build(self) -> list[_Bucket]:
        # Backward finishes the last layers first, so the reverse of the model's own order is close to that of arrival;
        # the optimizer's order, with its groups for decay and no decay, is not.
        indices = range(len(self.parameters))
        order = sorted(indices, key=lambda index: (position(self.parameters[index]), index), reverse=True)
        dtypes = [_merge_dtype(self.parameters[index]) for index in order]
        kinds = [(self.parameters[index].device, dtype) for index, dtype in zip(order, dtypes, strict=True)]
        sizes = [self.parameters[index].numel() * dtype.itemsize for index, dtype in zip(order, dtypes, strict=True)]
        limit = int(self.settings.bucket_mib * MIB) if self.settings.fuse else 0
        last_limit = int(self.settings.last_bucket_mib * MIB) if self.settings.fuse else 0
        groups = lay_out(sizes, kinds, limit=limit, last_limit=last_limit)
        tail = self.extras + self._own * self._workers + self.late + len(self.parameters)
        # A compressed message would spoil the counts, so then they travel in a small one of their own.
        separate_tail = self.settings.wire_dtype is not None
        buckets = []
        for number, group in enumerate(groups):
            carries_tail = number == len(groups) - 1 and not separate_tail
            device, dtype = kinds[group[0]]
            indices = [order[item] for item in group]
            buckets.append(self._bucket(number, indices, device, dtype, tail if carries_tail else 0))
        if separate_tail:
            device, dtype = kinds[groups[-1][0]]
            buckets.append(self._bucket(len(groups), [], device, dtype, tail))
        return buckets

    def _bucket(self, number: int, indices: list[int], device: torch.device, dtype: torch.dtype, tail: int) -> _Bucket:
        # Complex numbers travel as pairs of real ones: what is compressed, counted or measured is real.
        reals = 2 if dtype.is_complex else 1
        numels = [reals * self.parameters[index].numel() for index in indices]
        buffer = torch.zeros(sum(numels) + tail, device=device, dtype=dtype.to_real())
        bucket = _Bucket(number, indices, buffer, buffer[: sum(numels)])
        for index, piece in zip(indices, bucket.payload.split(numels), strict=True):
            numbers = torch.view_as_complex(piece.view(-1, 2)) if dtype.is_complex else piece
            self._views[index] = _shaped_like(numbers, self.parameters[index])
        if self.settings.wire_dtype is not None and indices:
            bucket.wire = torch.empty_like(buffer, dtype=self.settings.wire_dtype)
        return bucket

    # One window ----------------------------------------------------------------------------------------

    def _open(self, extras: Sequence[Tensor | float], prescale: float | Tensor, own: Sequence[Tensor | float]) -> None:
        assert (len(extras), len(own)) == (self.extras, self._own)
        self.overlap = overlap_on(self._tail.device)
        self._next = 0
        self._prescale = prescale
        for bucket in self._buckets:
            bucket.missing = set(bucket.indices)
        for place, extra in enumerate(extras):
            self._tail[place] = extra
        self.of_workers.zero_()
        for place, number in enumerate(own):
            self.of_workers[place, dist.get_rank()] = number
        self._flags.fill_(1)

    def _arrival(self, index: int):  # noqa: ANN202 - a closure of one line
        return lambda _parameter: self._arrive(index)

    def _arrive(self, index: int) -> None:
        bucket = self._bucket_of[index]
        if bucket.message is not None:
            raise RuntimeError(
                f"{label(self.parameters[index])} received another gradient in the same backward after its bucket had "
                "left: reentrant checkpointing of a shared module does this. "
                "Use torch.utils.checkpoint(..., use_reentrant=False)."
            )
        self._collect(index)
        bucket.missing.discard(index)
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send(self._buckets[self._next])
            self._next += 1
        self._pipeline.advance()
        if self.overlap is not None:
            self.overlap.look()

    def _collect(self, index: int) -> None:
        """Put one parameter's gradient into its place, or zeros and a lowered flag if there is none."""
        grad = self.parameters[index].grad
        if grad is None:
            self._views[index].zero_()
            self._flags[index] = 0
        elif grad is not self._views[index]:
            self._take(index, grad)

    def _take(self, index: int, grad: Tensor) -> None:
        self._views[index].copy_(require_dense(self.parameters[index], grad))
        self.parameters[index].grad = self._views[index]

    def _send(self, bucket: _Bucket) -> None:
        if bucket is self._buckets[-1] and self._late_numbers is not None:
            self.late_sums.copy_(self._late_numbers())
        if not (isinstance(self._prescale, float) and self._prescale == 1.0):
            bucket.payload.mul_(self._prescale)
        numbers = bucket.buffer
        if bucket.wire is not None:
            # Dividing first keeps the sum of many workers inside fp16's range.
            numbers = bucket.wire.copy_(bucket.buffer.div_(dist.get_world_size()))
        bucket.message = self._depart(bucket, numbers)
        if self.overlap is not None:
            self.overlap.sent(bucket.message)
        self.messages += 1

    def _depart(self, bucket: _Bucket, numbers: Tensor) -> Message:
        """Buckets take the process groups in turn: which one depends on the layout alone."""
        stages = self._groups.stages
        return self._pipeline.send(numbers, stages[bucket.number % len(stages)])

    def _receive(self, bucket: _Bucket) -> None:
        assert bucket.message is not None
        with nullcontext() if self.overlap is None else self.overlap.waiting():
            self._pipeline.receive(bucket.message)
        bucket.message = None
        if bucket.wire is not None:
            bucket.buffer.copy_(bucket.wire).mul_(dist.get_world_size())

    def _hand_out(self) -> None:
        """Give the sums to parameters that only other workers used; leave those that nobody used at None."""
        absent = [index for index, parameter in enumerate(self.parameters) if parameter.grad is None]
        if not absent:
            return
        # Only a worker that missed a parameter has to look at the flags, and thus wait for the device.
        used = self._flags.tolist()
        for index in absent:
            if used[index] > 0:
                self.parameters[index].grad = self._views[index]

    def _abandon(self) -> None:
        self._pipeline = Pipeline()
        self.overlap = None
        for bucket in self._buckets:
            bucket.message = None


def require_dense(parameter: Tensor, grad: Tensor) -> Tensor:
    """The gradient, unless it is sparse."""
    if grad.layout != torch.strided:
        raise TypeError(
            f"{label(parameter)} of shape {tuple(grad.shape)} has a {grad.layout} gradient: only dense gradients can "
            "be merged and reduced. Set sparse=False on the embedding."
        )
    return grad


def _merge_dtype(parameter: Tensor) -> torch.dtype:
    """Low-precision gradients are merged and summed in fp32."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _shaped_like(piece: Tensor, parameter: Tensor) -> Tensor:
    """A view of flat memory with the parameter's shape, and its strides where these leave no gaps."""
    expected, dense = 1, True
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1:
            dense = dense and stride == expected
            expected *= size
    if dense:
        return piece.as_strided(parameter.shape, parameter.stride(), piece.storage_offset())
    return piece.view(parameter.shape)
