"""`Step`: the door for people who think in whole batches."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx import amp, inference, slicing
from fleetx.comm import batch_norms, beats, world
from fleetx.fleet import checks, oom
from fleetx.fleet.model import distributed_model, is_prepared
from fleetx.fleet.optimizer import DistributedOptimizer, distributed_optimizer
from fleetx.losses import Losses, named_losses
from fleetx.numbers import Number
from fleetx.optim.scaling import refuse_scaled_loss
from fleetx.outcome import HostValue, Outcome
from fleetx.shares import SAMPLES, Counts, Shares
from fleetx.slicing import Batch
from fleetx.step import Weighed
from fleetx.strategy import DistributedStrategy
from fleetx.window import Weighing

if TYPE_CHECKING:
    from fleetx.fleet.planned_step import PlannedStep
    from fleetx.planner import Plan


class Step:
    """One call, one update: cuts a batch into micro-batches, merges them and updates the weights.

    `batch` is `(inputs, target)` and the loss `loss_fn(model(inputs), target)`; a tuple or dict of inputs is
    spread over the model's arguments. Without `loss_fn` the whole batch goes to the model, which returns its loss
    (or something with `.loss`, or a dict of losses). Anything else: `compute(model, micro_batch)`.

    `items(micro_batch)` tells how many items the loss averages over, where that is not the number of samples:
    a count, or for a dict of losses a dict of counts. Counts are summed over the whole window and all workers
    first, so that the update is the big batch's however tokens are spread.

    A worker whose last batch of an epoch is empty takes part without calling its model; `items` is called with that
    empty batch, for the names of the counts.

    >>> import torch
    >>> model = torch.nn.Linear(4, 2)
    >>> strategy = DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 4})
    >>> step = Step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.cross_entropy, strategy)
    >>> out = step((torch.randn(64, 4), torch.randint(0, 2, (64,))))
    >>> out.updated, out.samples
    (True, 64)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        strategy: DistributedStrategy | None = None,
        *,
        compute: Callable[[nn.Module, Batch], Any] | None = None,
        items: Callable[[Batch], Number | Counts] | None = None,
        scheduler: Any | None = None,
        **options: Any,
    ) -> None:
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(
                f"loss_fn must be a function of (output, target), not a {type(loss_fn).__name__}. "
                "A strategy is given by name: Step(model, optimizer, loss_fn, strategy=strategy)."
            )
        if loss_fn is not None and compute is not None:
            raise ValueError("give loss_fn or compute, not both: compute(model, batch) returns the loss itself.")
        if items is not None and not callable(items):
            raise TypeError(
                f"items must be a function of a micro-batch, not {items!r}: for example "
                "items=lambda batch: (batch[1] != -100).sum()"
            )
        if not is_prepared(model):
            model = distributed_model(model, strategy)
        if not isinstance(optimizer, DistributedOptimizer):
            optimizer = distributed_optimizer(optimizer, strategy, scheduler=scheduler, **options)
        elif scheduler is not None or options:
            given = ", ".join([*(["scheduler"] if scheduler is not None else []), *options])
            raise ValueError(f"the optimizer is distributed already: give {given} to fleet.distributed_optimizer.")
        if strategy is not None and strategy != optimizer.strategy:
            raise ValueError(
                "Step was given another strategy than the optimizer. Leave it out here, or give both the same one."
            )
        self.model = model
        self.optimizer = optimizer
        self.strategy = optimizer.strategy
        self._loss_fn = loss_fn
        self._compute = compute
        self._items = items
        self._engine = optimizer.engine
        if items is not None and not self._engine.average:
            raise ValueError(checks.ITEMS_OR_SUM)
        self._planned = _planned_step(self, loss_fn, compute)
        self._note_door()

    @property
    def plan(self) -> "Plan | None":
        """What the planner chose with the first batch, where checkpoints = "auto" leaves the choice to it."""
        return self.optimizer.plan

    def __call__(self, batch: Batch) -> Outcome:
        """Train on one batch: exactly one update, or one that is skipped and says so."""
        inference.refuse_mode("Step")
        self._require_empty_window()
        self.optimizer.require_alone()
        if self._planned is not None:
            return self._planned.run(batch)
        self._engine.stopwatch.start()
        return self.close(self.merge(batch))

    def close(self, shares: Shares) -> Outcome:
        """The update, after all micro-batches were merged."""
        return self._engine.close(HostValue(shares.total(SAMPLES)))

    def merge(self, batch: Batch, *, reduce_later: bool = False) -> Shares:
        """Merge all micro-batches of a batch; gives what each of them counts.

        Gradients leave for the other workers during the last backward, or `reduce_later`, when the window closes.
        """
        self._note_door()
        if world.size() > 1 and slicing.is_empty(batch):
            return self._merge_nothing(batch)
        micro_batches = self._cut(batch)
        self._require_forwards(len(micro_batches), slicing.batch_size(batch))
        self._engine.window.discard()  # the last gradients need not live through the forward
        device = self._engine.updater.device
        shares = self._opened([self._count(micro) for micro in micro_batches])
        names: tuple[str, ...] = ()
        low_runs = amp.entries(self.model)
        try:
            for index, micro in enumerate(micro_batches):
                # A copy: a model that works in place on its input must not overwrite the user's batch.
                moved = slicing.map_tensors(micro, lambda tensor: tensor.to(device, non_blocking=True, copy=True))
                losses = self._losses(moved)
                self._require_low_precision(low_runs)
                if self._engine.is_first and not index:
                    for loss in losses.values.values():
                        refuse_scaled_loss(loss)
                names = names or tuple(sorted(losses.values))  # in the same order on all workers
                _require_names(names, losses.values)
                weighted = [self._weigh(shares, index, name, losses) for name in names]
                self._require_backward(weighted)
                ends = index == len(micro_batches) - 1 and not reduce_later
                self._engine.merge(weighted, Weighing("sum"), weight=1, ends=ends, names=names)
        except BaseException as error:
            samples = slicing.batch_size(micro_batches[0])
            oom.explain(error, self._engine.updater.parameters(), self.optimizer, self.strategy, samples)
            if self._engine.window.held:  # else the window has given up by itself
                self._engine.window.fail(error)
            raise
        return shares

    def _merge_nothing(self, batch: Batch) -> Shares:
        """A worker without samples, at the end of an epoch, only takes part in what the others send.

        Its model is not called: few models and losses can do with no samples.
        """
        beats.beat()
        if batch_norms.exchange_in_training(self.model):
            raise ValueError(f"this worker's batch is empty (first dimension 0), {_SAMPLES_FOR_NORMS}")
        self._engine.window.discard()
        return self._opened([dict.fromkeys([SAMPLES, *map(_items_of, self._items_in(batch))], 0)])

    def _opened(self, counts: list[Counts]) -> Shares:
        shares = Shares(counts, self._engine.updater.device)
        if self._engine.needs_all:
            self._engine.require_all(shares.leaving())
        return shares

    def _note_door(self) -> None:
        """Tell `flush` how this worker takes part in the others' windows, once its own data has ended."""
        self._engine.is_of_step = True
        self._engine.needs_all = ""
        if self._planned is not None:
            self._engine.needs_all = "the planner measures the updates of all workers"
        elif batch_norms.exchange_in_training(self.model):
            self._engine.needs_all = "the model has SyncBatchNorm layers, which wait for all workers in each forward"

    def _cut(self, batch: Batch) -> list[Batch]:
        self.require_enough(slicing.batch_size(batch))
        return slicing.split(batch, self._engine.k_steps)

    def require_enough(self, size: int) -> None:
        """The first batch must have a sample for each micro-batch."""
        k_steps = self._engine.k_steps
        if self._engine.is_first and size < k_steps:
            raise ValueError(
                f"gradient_merge_configs.k_steps is {k_steps}, but the first batch has only {size} samples: "
                f"it cannot be cut into {k_steps} micro-batches. Lower k_steps or raise the batch size. "
                "(Only a later, shorter batch may have fewer.)"
            )

    def _require_forwards(self, count: int, samples: int) -> None:
        """Norms over all workers wait in each forward, so all workers must have equally many."""
        k_steps = self._engine.k_steps
        if count < k_steps and world.size() > 1 and batch_norms.exchange_in_training(self.model):
            raise ValueError(
                f"gradient_merge_configs.k_steps is {k_steps}, but this worker's batch has only {samples} samples, "
                f"{_SAMPLES_FOR_NORMS}"
            )

    def _require_backward(self, losses: list[Weighed]) -> None:
        """So must the backwards be, in which they wait again."""
        if any(loss.value.requires_grad for loss in losses) or world.size() == 1:
            return
        if batch_norms.exchange_in_training(self.model):
            raise ValueError(
                "all losses of a micro-batch are constants here, and the model has SyncBatchNorm layers, which wait "
                "for all workers in each backward. Compute the losses from the model's output also where a task has "
                "no items: Step gives them a zero gradient."
            )

    def _count(self, micro: Batch) -> Counts:
        counts: dict[str, Number] = {SAMPLES: slicing.batch_size(micro)}
        return counts | {_items_of(name): _as_count(name, value) for name, value in self._items_in(micro).items()}

    def _items_in(self, micro: Batch) -> Mapping[str, Any]:
        if self._items is None:
            return {}
        items = self._items(micro)
        return items if isinstance(items, Mapping) else {"loss": items}

    def _losses(self, micro: Batch) -> Losses:
        if self._compute is not None:
            result = self._compute(self.model, micro)
        elif self._loss_fn is None:
            result = _call(self.model, micro)
        else:
            if not isinstance(micro, tuple | list) or len(micro) != 2:
                raise TypeError(
                    f"with loss_fn a batch is (inputs, target), not a {type(micro).__name__}"
                    + (f" of {len(micro)}" if isinstance(micro, tuple | list) else "")
                    + ". Use compute=lambda model, batch: ... for any other shape."
                )
            inputs, target = micro
            result = self._loss_fn(_call(self.model, inputs), target)
        return named_losses(result)

    def _weigh(self, shares: Shares, index: int, name: str, losses: Losses) -> Weighed:
        trained = name in losses.trained
        loss = losses.values[name] if trained else losses.values[name].detach()
        if not self._engine.average:
            return Weighed(loss, trained=trained)
        counted = self._counted_by(name, shares, trained)
        return Weighed(shares.weigh(loss, index, counted), shares.count(index, counted), trained)

    def _counted_by(self, name: str, shares: Shares, trained: bool) -> str:
        """Whose items weigh a loss; what is only reported need not have a count of its own."""
        if self._items is None:
            return SAMPLES
        own, common = _items_of(name), _items_of("loss")
        if trained or own in shares.names:
            return own
        return common if common in shares.names else SAMPLES

    def _require_low_precision(self, runs_before: int | None) -> None:
        if runs_before is not None and amp.entries(self.model) == runs_before:
            raise ValueError(
                "amp is on, but the loss was computed without calling model(...): other methods of a model run in its "
                "own precision. Call the model itself, or set amp = False."
            )

    def _require_empty_window(self) -> None:
        if self._engine.window.held:
            raise RuntimeError(
                f"the window already holds {self._engine.window.held} micro-batches from optimizer.minimize(): "
                "call optimizer.flush() before Step."
            )


def _planned_step(step: Step, loss_fn: Any, compute: Any) -> "PlannedStep | None":
    planning = step.optimizer.planning
    if planning is None or planning.model is not step.model:
        return None
    from fleetx.fleet.planned_step import PlannedStep
    from fleetx.planner.feeding import Feeding

    return PlannedStep(step, planning, Feeding(step.model, loss_fn, compute=compute))


def _call(model: nn.Module, inputs: Batch) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _require_names(names: tuple[str, ...], losses: dict[str, Tensor]) -> None:
    if tuple(sorted(losses)) != names:
        raise ValueError(
            f"every micro-batch must give the same losses: {', '.join(names)} at first, {', '.join(losses)} now."
        )


_SAMPLES_FOR_NORMS = (
    "and the model has SyncBatchNorm layers, whose statistics all workers exchange in each forward. Give each worker "
    "samples: ShardedBatches(..., last='wrap') or last='drop' does."
)


def _items_of(name: str) -> str:
    return f"items of {name!r}"


def _as_count(name: str, value: Any) -> Number:
    return checks.as_count(value, f"items of {name!r}")
