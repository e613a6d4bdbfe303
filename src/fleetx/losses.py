"""What a model or a loss function gave back: which of it is trained, and which is only reported."""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from fleetx.step import NO_GRADIENT, in_fp32


@dataclass(frozen=True)
class Losses:
    """Losses by name, each a number in at least fp32, and the names of those whose sum is minimised."""

    values: dict[str, Tensor]
    trained: frozenset[str]

    @property
    def total(self) -> Tensor:
        """What is minimised."""
        first, *others = [value for name, value in self.values.items() if name in self.trained]
        return sum(others, start=first)


def named_losses(result: Any, needs_gradient: bool = True) -> Losses:
    """The losses in what was given back.

    Of a dict with an entry "loss" only that is trained, and the others are reported. Of another dict those are trained
    that carry a gradient; where gradients are off, all of them count.
    """
    if not isinstance(result, Tensor) and isinstance(getattr(result, "loss", None), Tensor):
        result = result.loss
    given = dict(result) if isinstance(result, Mapping) else {"loss": result}
    if not given:
        raise ValueError("the step got an empty dict of losses: return at least one.")
    for name, loss in given.items():
        _require_number(name, loss)
    with_gradient = frozenset(name for name, loss in given.items() if loss.requires_grad)
    trained = frozenset(["loss"]) if "loss" in given else with_gradient
    if needs_gradient and not trained & with_gradient:
        raise ValueError(NO_GRADIENT)
    if "loss" in given and given["loss"].requires_grad:
        _require_contained(given["loss"], {name: given[name] for name in with_gradient - trained})
    values = {name: in_fp32(loss.reshape(())) for name, loss in given.items()}
    return Losses(values, trained or frozenset(values))


def _require_number(name: str, loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"{name!r} must be a tensor with one number, not a {type(loss).__name__}. A step differentiates a "
            "scalar loss, or a dict of scalar losses."
        )
    if loss.numel() != 1:
        raise ValueError(
            f"{name!r} has shape {tuple(loss.shape)}: a loss is one number. Take its mean() (the default "
            "averages micro-batches), or its sum() with gradient_merge_configs.avg=False."
        )


def _require_contained(loss: Tensor, others: dict[str, Tensor]) -> None:
    """What carries a gradient beside the entry "loss" must be a part of it, or somebody forgot to add it."""
    wanted = {name: frozenset(_numbers_behind(other)) for name, other in others.items()}
    start = get_gradient_edge(loss).node
    seen, waiting = {start}, deque([start])
    while wanted and waiting:
        node = waiting.popleft()
        wanted = {name: nodes for name, nodes in wanted.items() if node not in nodes}
        following = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= following
        waiting.extend(following)
    if wanted:
        name = next(iter(wanted))
        raise ValueError(
            f"in a dict of losses with an entry 'loss' only that is trained, and {name!r} carries a gradient which "
            f"'loss' does not contain. Add it to 'loss', or give {name!r} as .detach() if it is only to be reported; "
            "without an entry 'loss' all that carry a gradient are added."
        )


def _numbers_behind(entry: Tensor) -> Iterator[Node]:
    """The step that made this number, and those before it that it is a function of, as long as they are numbers too.

    A parameter of one number is none of them: what is a function of it alone, a penalty say, is no part of the loss.
    """
    node = get_gradient_edge(entry).node
    while True:
        yield node
        following = [(child, output) for child, output in node.next_functions if child is not None]
        if len(following) != 1:
            return
        (node, output), *_ = following
        if math.prod(node._input_metadata[output].shape) != 1 or type(node).__name__ == "AccumulateGrad":
            return
