"""fp32 master weights for optimizers that know nothing of low precision."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.numbers import LOW_PRECISION


class MasterWeights:
    """Lets an optimizer move fp32 copies of the low-precision parameters in its groups.

    The copies take the parameters' places in `param_groups`; after each update the parameters are rounded from
    them. Updates too small for the low precision are thus not lost.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._pairs: list[tuple[Tensor, nn.Parameter]] = []
        self._versions: list[int] = []
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
        for (parameter, master), version in zip(self._pairs, self._versions, strict=True):
            if parameter._version != version:  # weights were loaded, say
                with torch.no_grad():
                    master.copy_(torch.where(master.to(parameter.dtype) == parameter, master, parameter.float()))
            master.grad = parameter.grad

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model, and let go of the gradients."""
        torch._foreach_copy_([parameter for parameter, _ in self._pairs], [master for _, master in self._pairs])
        for _, master in self._pairs:
            master.grad = None
        self._versions = [parameter._version for parameter, _ in self._pairs]

    def state_dict(self, copy: bool = True) -> list[Tensor]:
        """The masters, in the order of the optimizer's groups; without `copy` they are those in use."""
        return [master.detach().clone() if copy else master.detach() for _, master in self._pairs]

    @torch.no_grad()
    def load_state_dict(self, masters: list[Tensor]) -> None:
        """Put saved masters back, and the parameters with them."""
        for (_, master), saved in zip(self._pairs, masters, strict=True):
            master.copy_(saved)
        self.publish()

    def _stand_in(self, parameter: Any, optimizer: Optimizer) -> Any:
        if parameter.dtype not in LOW_PRECISION:
            return parameter
        master = nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)
        self._pairs.append((parameter, master))
        self._versions.append(parameter._version)
        if parameter in optimizer.state:  # an optimizer that was used before keeps its momentum
            state = optimizer.state.pop(parameter)
            optimizer.state[master] = {key: _raised(value) for key, value in state.items()}
        return master


def _raised(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW_PRECISION else value
