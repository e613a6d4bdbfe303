"""fp32 master weights for optimizers that know nothing of low precision."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.numbers import LOW_PRECISION


@torch.no_grad()
def follow(master: Tensor, low: Tensor) -> None:
    """Let a master take over what others wrote into the low-precision weight: loaded, clipped, averaged, swapped.

    Versions would not tell, since writes through `.data` do not count. What still is the rounded master keeps its finer
    bits.
    """
    torch.where(master.to(low.dtype) == low, master, low, out=master)


class MasterWeights:
    """Lets an optimizer move fp32 copies of the low-precision parameters in its groups.

    The copies take the parameters' places in `param_groups`; after each update the parameters are rounded from
    them. Updates too small for the low precision are thus not lost.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._pairs: list[tuple[Tensor, nn.Parameter]] = []
        for group in optimizer.param_groups:
            group["params"] = [self._stand_in(parameter, optimizer) for parameter in group["params"]]

    def __len__(self) -> int:
        return len(self._pairs)

    def originals(self, parameters: list[Tensor]) -> list[Tensor]:
        """The model's own parameters behind those of the optimizer."""
        behind = {id(master): parameter for parameter, master in self._pairs}
        return [behind.get(id(parameter), parameter) for parameter in parameters]

    def take_gradients(self) -> None:
        """Show the optimizer the merged gradients, on masters that follow what others wrote into the model."""
        self._follow()
        for parameter, master in self._pairs:
            master.grad = parameter.grad

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model, and let go of the gradients."""
        torch._foreach_copy_([parameter for parameter, _ in self._pairs], [master for _, master in self._pairs])
        for _, master in self._pairs:
            master.grad = None

    def state_dict(self, copy: bool = True) -> list[Tensor]:
        """The masters, in the order of the optimizer's groups; without `copy` they are those in use."""
        self._follow()
        return [master.detach().clone() if copy else master.detach() for _, master in self._pairs]

    @torch.no_grad()
    def load_state_dict(self, masters: list[Tensor]) -> None:
        """Put saved masters back, and the parameters with them."""
        for (_, master), saved in zip(self._pairs, masters, strict=True):
            master.copy_(saved)
        self.publish()

    def _follow(self) -> None:
        for parameter, master in self._pairs:
            follow(master, parameter)

    def _stand_in(self, parameter: Any, optimizer: Optimizer) -> Any:
        if parameter.dtype not in LOW_PRECISION:
            return parameter
        master = nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)
        self._pairs.append((parameter, master))
        if parameter in optimizer.state:  # an optimizer that was used before keeps its momentum
            state = optimizer.state.pop(parameter)
            optimizer.state[master] = {key: _raised(value) for key, value in state.items()}
        return master


def _raised(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW_PRECISION else value
