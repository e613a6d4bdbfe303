"""BatchNorm over all workers: its statistics are those of the whole batch, whatever part of it each worker has.

torch's SyncBatchNorm runs on GPUs only. These run wherever torch.distributed does, and take part in recompute.
"""

import weakref
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from fleetx.comm import beats, world
from fleetx.comm.exchanges import exchanged
from fleetx.numbers import Number

# The messages of norms have a group of their own: gradients leave whenever they are there, which may be before a norm's
# message on one worker and after it on another.
_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, Any]" = weakref.WeakKeyDictionary()
_unit: Number = 1


class _Synchronized(_BatchNorm):
    """In training it asks the other workers; else it is torch's."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize by the mean and the variance of what all workers were given."""
        if not self.training or world.size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        wide = torch.promote_types(input.dtype, torch.float32)
        self._require_dtype(input, wide)
        with torch.no_grad():
            mean, var, total = _split(exchanged(lambda: _statistics(input, wide)))
            if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
                self._count(mean, var * (total / (total - 1)))
            invstd = (var + self.eps).rsqrt()
        return _Normalize.apply(input, self.weight, self.bias, mean, invstd, total)

    # torch.compile would have to break its graph at the message; see also fleetx.amp.precision.
    forward._torchdynamo_disable = True  # type: ignore[attr-defined]

    def _count(self, mean: Tensor, unbiased: Tensor) -> None:
        """The running statistics, as torch counts them: by momentum, or without one the mean of all."""
        factor = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            assert running is not None
            running.copy_((1 - factor) * running.to(new.dtype) + factor * new)

    def _require_dtype(self, input: Tensor, wide: torch.dtype) -> None:
        for held in (self.weight, self.running_mean):
            if held is not None and held.dtype not in (input.dtype, wide):
                raise RuntimeError(
                    f"a {type(self).__name__} of {held.dtype} was given {input.dtype}: give it that dtype, or make the "
                    "module and its input the same by .to(dtype)."
                )


class SyncBatchNorm1d(_Synchronized, nn.BatchNorm1d):
    """BatchNorm1d over all workers."""


class SyncBatchNorm2d(_Synchronized, nn.BatchNorm2d):
    """BatchNorm2d over all workers."""


class SyncBatchNorm3d(_Synchronized, nn.BatchNorm3d):
    """BatchNorm3d over all workers."""


_KINDS: dict[type, type] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
}
_THEIRS = (_Synchronized, nn.SyncBatchNorm)


def synchronize(model: nn.Module) -> int:
    """Let all BatchNorm layers of the model take their statistics over all workers; gives how many there are.

    They stay the modules that they were, with their parameters, names and hooks.
    """
    norms = {name: one for name, one in model.named_modules() if isinstance(one, _BatchNorm)}
    for name, norm in norms.items():
        if not isinstance(norm, _THEIRS) and (type(norm) not in _KINDS or "forward" in vars(norm)):
            raise TypeError(
                "sync_batch_norm takes BatchNorm1d, BatchNorm2d and BatchNorm3d of torch.nn, and "
                f"{name or 'the model'!r} is another one, {type(norm).__name__}, whose forward may not ask the other "
                "workers. Put one of torch's in its place, or set sync_batch_norm = False."
            )
    for norm in norms.values():
        norm.__class__ = _KINDS.get(type(norm), type(norm))
    if norms:
        _group()
    return len(norms)


def exchange_in_training(model: nn.Module) -> bool:
    """Whether a forward of the model in its present modes waits for the other workers."""
    return any(isinstance(module, _THEIRS) and module.training for module in model.modules())


def count_synchronized(models: Iterable[nn.Module]) -> int:
    """How many layers of these models take their statistics over all workers."""
    return len({module for model in models for module in model.modules() if isinstance(module, _THEIRS)})


def are_in_use() -> bool:
    """Whether a model of this job has norms over all workers."""
    return len(_groups) > 0


def is_synchronized(node: object) -> bool:
    """Whether this step of a backward is that of a norm over all workers."""
    return type(node).__name__ == "_NormalizeBackward"


@contextmanager
def backward_in_units(unit: Number) -> Generator[None]:
    """Inside, a backward runs whose gradients are going to be multiplied by `unit`, each worker's own."""
    global _unit  # not of this thread: the backward may run in another one
    before, _unit = _unit, unit
    try:
        yield
    finally:
        _unit = before


def _statistics(input: Tensor, wide: torch.dtype) -> Tensor:
    """Mean, variance and count of what all workers have, in one row. A part may be empty."""
    channels, count = input.shape[1], input.numel() // max(1, input.shape[1])
    table = torch.zeros(world.size(), 2 * channels + 1, dtype=wide, device=input.device)
    if count:
        var, mean = torch.var_mean(input.detach().to(wide), _but_channels(input), correction=0)
        table[world.rank()] = torch.cat([mean, var * count, var.new_full((1,), count)])
    _sum_over_workers(table)
    means, squares, counts = table[:, :channels], table[:, channels:-1], table[:, -1:]
    total = counts.sum()
    # Who has several values knows that they are enough; else all workers look.
    if count < 2 and total.item() < 2:
        raise ValueError(
            f"BatchNorm needs more than 1 value per channel in training, over all workers, got {int(total.item())} "
            f"(input {tuple(input.shape)}). Give larger batches, or call eval()."
        )
    mean = (means * counts).sum(0) / total
    squares = squares.sum(0) + (counts * (means - mean).square()).sum(0)
    return torch.cat([mean, squares / total, total[None]])


def _split(row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    channels = len(row) // 2
    return row[:channels], row[channels:-1], row[-1]


class _Normalize(torch.autograd.Function):
    """(input - mean) · invstd · weight + bias, where mean and invstd depend on all workers' inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        invstd: Tensor,
        total: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, invstd, total)
        output = (input.to(mean.dtype) - _as_channels(mean, input)).mul_(_as_channels(invstd, input))
        if weight is not None:
            output.mul_(_as_channels(weight, input))
        if bias is not None:
            output.add_(_as_channels(bias, input))
        return output.to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[bad-override]
        input, weight, mean, invstd, total = ctx.saved_tensors
        grad, centered = grad.to(mean.dtype), input.to(mean.dtype) - _as_channels(mean, input)
        sums = torch.stack([grad.sum(_but_channels(input)), (grad * centered).sum(_but_channels(input))])
        of_weight = (sums[1] * invstd).to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_bias = sums[0].to(weight.dtype) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, of_weight, of_bias, None, None, None
        means = _summed_in_units(sums) / total
        scale = invstd if weight is None else invstd * weight
        shift, slope = _as_channels(means[0], input), _as_channels(means[1] * invstd.square(), input)
        of_input = (grad - shift - centered * slope).mul_(_as_channels(scale, input))
        return of_input.to(input.dtype), of_weight, of_bias, None, None, None


def _summed_in_units(sums: Tensor) -> Tensor:
    """The sums over all workers; each worker's gradients are in units of its own."""
    unit = _unit.to(sums) if isinstance(_unit, Tensor) else _unit
    sums = sums * unit
    _sum_over_workers(sums)
    return sums / unit


@beats.waiting()
def _sum_over_workers(tensor: Tensor) -> None:
    dist.all_reduce(tensor, group=_group())


@beats.waiting()
def _group() -> Any:
    """The group of the norms' messages; all workers make it together."""
    everyone = dist.group.WORLD
    assert everyone is not None
    if everyone not in _groups:
        _groups[everyone] = dist.new_group()
    return _groups[everyone]


def _but_channels(input: Tensor) -> list[int]:
    return [0, *range(2, input.dim())]


def _as_channels(row: Tensor, input: Tensor) -> Tensor:
    return row.view(1, -1, *[1] * (input.dim() - 2))
