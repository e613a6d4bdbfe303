"""Squared gradient norms of one merge window: of each micro-batch as it arrives, and of the whole."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from fleetx.comm import world
from fleetx.convergence.estimators import TWO_PARTS, Moments, from_part_sums
from fleetx.numbers import Number
from fleetx.outcome import HostValue


class WindowSquares:
    """Collects them on the device. A micro-batch's own gradient exists only on its way into the sum of all.

    The hooks only compute a norm, since there is one for each parameter and micro-batch.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self._numbers = torch.zeros(len(self.parameters) + 2, dtype=torch.float64, device=self.parameters[0].device)
        self._weight = self._numbers.new_zeros(())
        self._arrived: dict[int, Tensor] = {}
        self._backwards = 0

    @contextmanager
    def part(self, items: Number, unit: Number) -> Generator[None]:
        """Around the backward of one micro-batch; its gradients are multiplied by `unit` before they are summed."""
        self.numbers()
        self._backwards += 1
        count = torch.as_tensor(items, dtype=torch.float64, device=self._numbers.device)
        holds = count > 0
        self._numbers[-2] += count
        self._numbers[-1] += holds
        self._weight = torch.where(holds, unit * unit / count, 0.0)
        hooks = [
            parameter.register_hook(partial(self._note, place))
            for place, parameter in enumerate(self.parameters)
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def numbers(self) -> Tensor:
        """What is summed over the workers, as far as it is known by now.

        For each parameter, the sum over micro-batches of |their summed gradient|² / items; then the counts of items and
        of micro-batches.
        """
        if self._arrived:
            places = torch.tensor(list(self._arrived), device=self._numbers.device)
            norms = torch.stack([norm.to(self._numbers) for norm in self._arrived.values()])
            self._numbers.index_add_(0, places, norms.square() * self._weight)
            self._arrived.clear()
        return self._numbers

    def _note(self, place: int, gradient: Tensor) -> None:
        self._arrived[place] = _norm(gradient.detach())

    def require_parts(self) -> None:
        """Raise if there is nothing to compare."""
        if self._backwards < 2 and world.size() == 1:
            raise ValueError(
                f"{TWO_PARTS}, and this window has one. Set gradient_merge with k_steps = 2 or more, or train with two "
                "workers."
            )

    def report(self, sums: Tensor, divisor: Number, usable: Tensor) -> "SquaresOnTheirWay":
        """The whole window's numbers, sent to the host without waiting.

        `sums` are those of `numbers()` over all workers. Gradients are summed by now, still to be divided by `divisor`.
        """
        whole = [parameter.grad for parameter in self.parameters]
        zero = self._numbers.new_zeros(())
        squares = [zero if grad is None else _norm(grad).to(zero).square() for grad in whole]
        facts = [torch.as_tensor(fact).to(zero) for fact in (divisor, usable)]
        return SquaresOnTheirWay(HostValue(torch.cat([sums.to(zero.dtype), torch.stack([*squares, *facts])])))


class SquaresOnTheirWay:
    """What `report` has sent to the host."""

    def __init__(self, values: HostValue) -> None:
        self._values = values

    def moments(self) -> list[Moments] | None:
        """Of the whole model, then of each parameter; None where there is nothing to compare. May wait for the device.

        A window that was skipped has none, nor has one with a single micro-batch.
        """
        *squares, divisor, usable = self._values.tolist()
        count = (len(squares) - 2) // 2
        weighed, (items, parts), whole = squares[:count], squares[count : count + 2], squares[count + 2 :]
        if not usable or parts < 2:
            return None
        # The mean gradient over all items is the sum of all parts over `divisor`.
        unit = (items / divisor) ** 2
        pairs = [(sum(weighed), sum(whole)), *zip(weighed, whole, strict=True)]
        return [from_part_sums(a * unit, b * unit, items, parts) for a, b in pairs]


def _norm(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
