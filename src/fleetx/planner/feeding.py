"""How a model is fed and becomes a loss: as `fleetx.Step` does it, and for models that give no loss too."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fleetx.memory.structures import tensors_in
from fleetx.slicing import Batch, batch_size, map_tensors, require_dense

LossFn = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Feeding:
    """A model with its loss function and precision.

    With `loss_fn` a batch is `(inputs, target)`; without, the whole batch goes to the model. A tuple or dict of inputs
    is spread over the model's arguments. Anything else: `compute(model, batch)`.
    """

    model: nn.Module
    loss_fn: LossFn | None = None
    precision: torch.dtype | None = None  # of autocast
    compute: Callable[[nn.Module, Batch], Any] | None = None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def loss(self, batch: Batch) -> Tensor:
        """One forward."""
        return self.loss_or_other(batch)[0]

    def loss_or_other(self, batch: Batch) -> tuple[Tensor, bool]:
        """One forward, and whether it gave a loss; else something was made of all that it gave."""
        with self._low_precision():
            output = self._output(batch)
            if self.loss_fn is not None and self.compute is None:
                _require_losses(output, batch)
            return _one_number(output), all(one.dim() == 0 for one in _with_gradients(_losses(output)))

    def losses(self, batch: Batch) -> list[Tensor]:
        """The numbers that are trained, one by one; none if the model gives none, and its outputs stand for them."""
        with self._low_precision():
            found = _with_gradients(_losses(self._output(batch)))
        return found if all(one.dim() == 0 for one in found) else []

    def _output(self, batch: Batch) -> Any:
        compute = self.compute or self._computed
        try:
            return compute(self.model, batch)
        except torch.OutOfMemoryError:  # which is reckoned with
            raise
        except Exception as error:
            samples = batch_size(batch)
            error.add_note(f"FleetX: the planner tried the model with {samples:,} samples, made of those it was given.")
            raise

    def _computed(self, model: nn.Module, batch: Batch) -> Any:
        inputs, target = self._parts(batch)
        output = _called(model, inputs)
        return output if self.loss_fn is None else self.loss_fn(output, target)

    def _parts(self, batch: Batch) -> tuple[Any, Any]:
        if self.loss_fn is None:
            return batch, None
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise TypeError(
                f"with loss_fn a sample is (inputs, target), got a {type(batch).__name__}. Give such a pair, or leave "
                "out loss_fn and let the model return its loss."
            )
        return batch[0], batch[1]

    def _low_precision(self) -> AbstractContextManager[Any]:
        if self.precision is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.precision)


def _called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _require_losses(given: Any, batch: Batch) -> None:
    """What a loss function gave must be what `fleetx.Step` trains: it would plan another training otherwise."""
    from fleetx.losses import named_losses  # whose package plans too

    try:
        losses = named_losses(given, needs_gradient=False)
    except (TypeError, ValueError) as error:
        of_samples = f"what loss_fn returned for {batch_size(batch):,} samples"
        raise type(error)(f"{of_samples} is not a loss: {error}") from error
    if not losses.total.requires_grad:
        raise ValueError(
            "what loss_fn returned has no gradient, so there is no backward to plan. Compute "
            "the loss from the model's output, without detach() or no_grad, and let parameters require gradients."
        )


def _one_number(output: Any) -> Tensor:
    """The loss, or the sum of several; of an output that has none, something that has a gradient for all of it."""
    found = _with_gradients(_losses(output)) or _with_gradients(tensors_in(output))
    if not found:
        raise ValueError(
            "the model's output has no tensor with a gradient, so there is no backward to "
            "plan. Call model.train(), let parameters require gradients, or give a loss_fn."
        )
    return torch.stack([t.float().mean() for t in found]).sum()


def _losses(output: Any) -> list[Any]:
    """What is trained: the loss by its name, without scores and the like beside it; else all that was given."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    return [loss] if isinstance(loss, Tensor) else pytree.tree_leaves(output)


def _with_gradients(values: list[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor) and value.requires_grad]


def resized(batch: Batch, size: int) -> Batch:
    """The first samples of a batch, from the beginning again if it has fewer."""
    available = batch_size(batch)
    require_dense(batch, "the planner cannot make larger and smaller batches of")

    def taken(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or len(tensor) != available:  # which does not belong to single samples
            return tensor
        if size <= available:
            return tensor[:size].clone()
        return tensor[torch.arange(size, device=tensor.device) % available]

    return map_tensors(batch, taken)


def placed(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device."""
    return map_tensors(batch, lambda tensor: tensor.to(device))


def bytes_per_sample(batch: Batch) -> float:
    """What one sample of a batch takes."""
    found = []
    map_tensors(batch, lambda tensor: (found.append(tensor.numel() * tensor.element_size()), tensor)[1])
    return sum(found) / batch_size(batch)
