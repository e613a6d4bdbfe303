"""What every application offers: a model that knows its loss, its inputs, its costs and its data."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

Count = Tensor | int


class Application(nn.Module, ABC):
    """A model with its losses. `model(**batch)` gives a dict of losses, so `Step(model, optimizer, items=model.items)`.

    `inputs` are the entries of a batch in the order of the forward's arguments, so that a batch may be a dict or a
    tuple; `losses` are the names in the dict that the forward returns when it is given labels.
    """

    inputs: ClassVar[tuple[str, ...]]
    losses: ClassVar[tuple[str, ...]]

    @property
    def host_inputs(self) -> tuple[str, ...]:
        """Entries of a batch that are read on the host: they need not be moved to the device."""
        return ()

    @property
    @abstractmethod
    def checkpoints(self) -> list[str]:
        """Names of the modules whose outputs are good places to cut the model for recompute."""

    @abstractmethod
    def items(self, batch: Any) -> dict[str, Count]:
        """How many items each loss of this batch averages over; a count on a device stays there."""

    @abstractmethod
    def flops_per_sample(self) -> int:
        """Floating point operations of forward and backward for one sample.

        Counted are matrix products and convolutions: two operations per multiply-add, and a backward of twice the
        forward (one product for the gradient of the input, one for that of the weight). What recompute repeats is
        not counted, so speed times this number is what the model needs, not what the device does.
        """

    @abstractmethod
    def reset_parameters(self) -> None:
        """Fill all parameters and buffers with initial values: also how a model built on `meta` comes to life."""

    def named_inputs(self, batch: Any) -> dict[str, Any]:
        """The entries of a batch, given as a dict or in feed order, by their names; those that are None are left out.

        >>> from fleetx.applications import Resnet50
        >>> Resnet50(classes=2, depths=(1, 1, 1, 1), width=2).named_inputs([1, None])
        {'images': 1}
        """
        owner = type(self).__name__
        if isinstance(batch, Mapping):
            unknown = [name for name in batch if name not in self.inputs]
            if unknown:
                raise ValueError(
                    f"a batch of {owner} has the entries {', '.join(self.inputs)}, not {', '.join(map(str, unknown))}. "
                    "Rename them, or leave them out."
                )
            named = dict(batch)
        elif isinstance(batch, Sequence) and len(batch) <= len(self.inputs):
            named = dict(zip(self.inputs, batch, strict=False))
        else:
            size = f" of {len(batch)}" if isinstance(batch, Sequence) else ""
            raise TypeError(
                f"a batch of {owner} is a dict, or a tuple in the order {', '.join(self.inputs)}; "
                f"this is a {type(batch).__name__}{size}."
            )
        return {name: value for name, value in named.items() if value is not None}


def whole(labels: Tensor) -> Tensor:
    """Labels as torch's losses take them; arrays of numpy and of other libraries often hold shorter whole numbers."""
    return labels if labels.is_floating_point() else labels.long()
