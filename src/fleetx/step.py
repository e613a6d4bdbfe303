"""The training step: slice → forward → backward → reduce → unscale → clip → update.

Every door leads here. `optimizer.minimize(loss)` adds one micro-batch to the window, and the one that fills the
window closes it; `Step(batch)` cuts a whole batch, adds all of its micro-batches and closes the window itself.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fleetx import gradients
from fleetx.amp import LossScaler, outside_autocast
from fleetx.buffers import WindowBuffers
from fleetx.comm import beats, opening, world
from fleetx.comm.guard import ParameterGuard
from fleetx.empty_losses import muted
from fleetx.nonfinite import NonFiniteWatch
from fleetx.numbers import LOW_PRECISION, Number
from fleetx.optim.scaling import refuse_scaled_loss
from fleetx.outcome import HostValue, Outcome, Stopwatch
from fleetx.update import Updater
from fleetx.window import Merged, Weighing, Window

if TYPE_CHECKING:
    from fleetx.convergence import NoiseScale

NO_GRADIENT = (
    "the loss depends on no trainable parameter: it was computed under no_grad, detached, or everything is frozen. "
    "Compute it from the model's output with gradients enabled."
)


class Weighed(NamedTuple):
    """A loss of one micro-batch times its share; the items it averages over, and whether it is trained or reported."""

    value: Tensor
    count: Number = 1
    trained: bool = True


@dataclass
class TrainingStep:
    """Merges micro-batches into a window, and turns a full window into one update."""

    window: Window
    updater: Updater
    k_steps: int
    average: bool
    scaler: LossScaler | None
    clip_norm: float | None
    watch: NonFiniteWatch
    guard: ParameterGuard | None = None
    buffers: WindowBuffers = field(default_factory=WindowBuffers)
    noise: "NoiseScale | None" = None

    def __post_init__(self) -> None:
        if self.noise is not None:
            self.window.on_end.append(self.noise.discard)
        self.window.on_begin.append(self.buffers.note_begin)
        self.window.on_end.append(self.buffers.end)
        self.stopwatch = Stopwatch()
        # Whether nothing has been trained yet, here or in the run that was resumed.
        self.is_first = True
        # Whether the last window was that of a `Step`, and why all workers must have called it then.
        self.is_of_step = False
        self.needs_all = ""
        # Called when an update is complete: a planner looks at what it took.
        self.on_update: list[Callable[[], None]] = []

    def minimize(
        self,
        loss: Tensor,
        items: Number | None = None,
        retain_graph: bool = False,
        observe: Callable[[Number], None] | None = None,
    ) -> Outcome:
        """Merge one micro-batch; update if it is the last of its window.

        `observe` is called when the window closes, before anything is divided or clipped, with the number that the
        gradients are going to be divided by.
        """
        if not loss.requires_grad:
            raise ValueError(NO_GRADIENT)
        self.is_of_step = False
        if self.is_first:
            refuse_scaled_loss(loss)
        weighing = self.window.weighing if self.window.held else self._weighing(items)
        self._require_same_weighing(weighing, items)
        ends = self.window.held + 1 >= self.k_steps
        with torch.enable_grad():  # minimize may be called where gradients are off
            loss = in_fp32(loss.reshape(()))
            count = 1 if items is None else items
            weighed = Weighed(_weighted(loss, items, weighing), count)
            self.merge([weighed], weighing, count, ends, retain_graph)
        if ends:
            return self.close(observe=observe)
        scale = None if self.scaler is None else self.scaler.scale_tensor
        detached = loss.detach()
        return Outcome(detached, closed=False, losses={"loss": detached}, lr=self.updater.lr, _scale=scale)

    def merge(
        self,
        losses: Sequence[Weighed],
        weighing: Weighing,
        weight: Number,
        ends: bool,
        retain_graph: bool = False,
        names: tuple[str, ...] = ("loss",),
    ) -> None:
        """Backward of the weighed `losses` of one micro-batch; reduces meanwhile if it ends the window."""
        beats.beat()
        self.stopwatch.start()
        trained = [loss for loss in losses if loss.trained]
        values = [loss.value for loss in trained]
        objective = sum(values[1:], start=values[0])
        if self.scaler is not None:
            objective = objective * self.scaler.scale_on(objective.device)
        reported = [loss.value for loss in losses]
        if len(losses) > 1:  # whether it is trained may differ: a task that a micro-batch lacks may be a constant there
            reported += [loss.value.new_full((), loss.trained) for loss in losses]
        muting = muted(values, [loss.count for loss in trained], self.updater.parameters())
        with muting, outside_autocast(objective.device), self._measuring(weighing, trained):
            self.window.add(
                objective,
                losses=reported,
                weighing=weighing,
                weight=weight,
                ends=ends,
                retain_graph=retain_graph,
                names=names,
                items=sum((loss.count for loss in losses[1:]), start=losses[0].count),
            )

    def _measuring(self, weighing: Weighing, trained: Sequence[Weighed]) -> AbstractContextManager[None]:
        """Around a backward: its gradients are compared with those of the whole window."""
        if self.noise is None or not trained:
            return nullcontext()
        unit = weighing.unit if weighing.kind == "items" and world.size() > 1 else 1.0
        return self.noise.part(self.updater.parameters(), trained[0].count, unit)

    @torch.no_grad()
    def close(
        self,
        samples: HostValue | None = None,
        observe: Callable[[Number], None] | None = None,
    ) -> Outcome:
        """Turn the window into one update: average and reduce, unscale, check, clip, update, clear.

        A worker that holds nothing takes part without adding anything.
        """
        try:
            merged = self.window.merge()
        except BaseException as error:
            self.window.fail(error)
            raise
        if not self.window.held and not merged.holding:
            self.window.clear()
            raise ValueError("the batch is empty (first dimension 0), on all workers. Leave it out, on all alike.")
        return self._update(merged, samples, observe)

    def _update(
        self,
        merged: Merged,
        samples: HostValue | None = None,
        observe: Callable[[Number], None] | None = None,
    ) -> Outcome:
        try:
            # As a tensor: a window without any items is then 0/0, not finite, and skipped like any other.
            share = merged.divisor
            if not isinstance(share, Tensor) and share == 0:
                share = torch.zeros((), device=self.updater.device)
            losses = [loss / share for loss in merged.losses[: len(merged.names)]]
            flags = merged.losses[len(merged.names) :]
            scale = None if self.scaler is None else self.scaler.scale_tensor
            divisor = share if scale is None else scale.double() * share
            norm = gradients.norm_after_division(merged.grads, divisor, losses[0].device)
            if observe is not None:
                observe(divisor)
            trained = _trained(losses, flags)
            usable = trained.isfinite().all()
            finite = norm.isfinite() & usable
            if self.noise is not None and merged.late is not None:
                self.noise.close(merged.late, divisor, finite)
            gradients.divide_and_clip_(merged.grads, divisor, norm, self.clip_norm)
            lr = self.updater.lr
            with outside_autocast(self.updater.device):
                self.updater.update(finite, self.buffers if self.window.held else WindowBuffers())
            torch.clear_autocast_cache()  # inside the user's own autocast it holds casts of the old weights
            if self.scaler is not None:
                self.scaler.update(found_inf=~finite)
        except BaseException as error:
            self.window.fail(error)
            raise
        self.window.clear()
        self.is_first = False
        self.watch.record(self._unusable(finite, usable, scale))
        if self.guard is not None:
            self.guard.after_window()
        seconds = self.stopwatch.lap()
        for tell in self.on_update:
            tell()
        return Outcome(
            loss=losses[0] if len(losses) == 1 else trained.sum(),
            losses=dict(zip(merged.names, losses, strict=True)),
            closed=True,
            grad_norm=norm,
            lr=lr,
            seconds=seconds,
            trust_ratios=self.updater.take_trust_ratios(),
            _samples=samples,
            _finite=HostValue(finite),
            _scale=scale,
            _overlap=merged.overlap,
        )

    @torch.no_grad()
    def flush(self) -> Outcome | None:
        """Close a window that is not full, averaged by what it holds; None if no worker holds anything.

        Workers may come here after different numbers of windows: those whose data has ended first take part in the
        windows of the others, without adding anything, until all are here.
        """
        outcome = None
        if world.size() == 1 and not self.window.held:
            return None
        is_over = False
        while not is_over:
            try:
                if self.is_of_step and self._all_leave():
                    break
                merged = self.window.merge(None if self.is_of_step else self._weighing(None), leaving=True)
            except BaseException as error:
                self.window.fail(error)
                raise
            if merged.holding:
                outcome = self._update(merged)
            self.window.clear()
            beats.beat()
            is_over = merged.leaving == world.size()
        if self.guard is not None:
            self.guard.after_epoch()
        return outcome

    def _all_leave(self) -> bool:
        """Whether no worker calls `Step` any more; if one does, this worker has told it that it takes part."""
        if world.size() == 1:
            return False
        leaving = opening.take_part(self.updater.device)
        self.require_all(leaving)
        return leaving == world.size()

    def require_all(self, leaving: int) -> None:
        """Raise, on all workers, if some have come to `flush` where all must call `Step`."""
        if self.needs_all and 0 < leaving < world.size():
            raise ValueError(
                f"{self.needs_all}, so all workers must call Step equally often, and {leaving} of {world.size()} have "
                "come to flush() before the others. Give each worker as many batches: fleet.evenly(loader) ends the "
                "epoch for all with the first that runs out, ShardedBatches(..., last='wrap') gives each its part."
            )

    def _weighing(self, items: Number | None) -> Weighing:
        if isinstance(items, Tensor):
            return Weighing("items", unit=torch.where(items > 0, items, 1))
        if items is not None:
            return Weighing("items", unit=items or 1)
        return Weighing("mean", unit=self.k_steps) if self.average else Weighing("sum")

    def _require_same_weighing(self, weighing: Weighing, items: Number | None) -> None:
        if (weighing.kind == "items") != (items is not None):
            raise ValueError(
                "items= must be given for all micro-batches of a window or for none: the "
                f"{self.window.held} before this one had {'none' if items is not None else 'it'}, "
                f"and this one has {'it' if items is not None else 'none'}."
            )

    def _unusable(self, finite: Tensor, usable: Tensor, scale: Tensor | None) -> Tensor:
        """Whether the window counts towards the stop: while the scale can fall, an overflow is nothing unusual."""
        if scale is None or self.scaler is None or not self.scaler.use_dynamic_loss_scaling:
            return ~finite
        return ~usable | (~finite & (scale <= 1.0))


def _trained(losses: list[Tensor], flags: list[Tensor]) -> Tensor:
    """The losses, with zeros for those that are only reported: they may be anything."""
    values = torch.stack(losses)
    return torch.where(torch.stack(flags) > 0, values, 0.0) if flags else values


def in_fp32(loss: Tensor) -> Tensor:
    """A low-precision loss would lose digits when it is weighed, and overflow when it is scaled."""
    return loss.float() if loss.dtype in LOW_PRECISION or not loss.is_floating_point() else loss


def weigh(loss: Tensor, count: Number, share: Number) -> Tensor:
    """The loss times its share; the mean over no items is NaN, but it weighs nothing.

    A count on a device, which cannot be refused at once, makes the loss NaN if it is negative: the window is skipped.
    """
    if isinstance(count, Tensor):
        count = count.to(loss.device)
        return torch.where(count > 0, loss * share, torch.where(count < 0, math.nan, 0.0))
    return loss * share if count else torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0)


def _weighted(loss: Tensor, items: Number | None, weighing: Weighing) -> Tensor:
    if items is not None:
        return weigh(loss, items, items / weighing.unit)
    return loss if weighing.kind == "sum" else loss / weighing.unit
