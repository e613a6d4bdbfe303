"""fp32 master weights for optimizers that know nothing of low precision."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.window import LOW_PRECISION


class MasterWeights:
    """Lets an optimizer move fp32 copies of the low-precision parameters in its groups.

    The copies take the parameters' places in `param_groups`; after each update the parameters are rounded from
    them. Updates too small for the low precision are thus not lost.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._pairs: list[tuple[Tensor, nn.Parameter]] = []
        for group in optimizer.param_groups:
            group["params"] = [self._stand_in(parameter) for parameter in group["params"]]

    def __len__(self) -> int:
        return len(self._pairs)

    def originals(self, parameters: list[Tensor]) -> list[Tensor]:
        """The model's own parameters behind those of the optimizer."""
        behind = {id(master): parameter for parameter, master in self._pairs}
        return [behind.get(id(parameter), parameter) for parameter in parameters]

    def take_gradients(self) -> None:
        """Show the optimizer the merged gradients."""
        for parameter, master in self._pairs:
            master.grad = parameter.grad

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model."""
        if self._pairs:
            torch._foreach_copy_([parameter for parameter, _ in self._pairs], [m for _, m in self._pairs])

    def state_dict(self) -> list[Tensor]:
        """The masters, in the order of the optimizer's groups."""
        return [master.detach().clone() for _, master in self._pairs]

    @torch.no_grad()
    def load_state_dict(self, masters: list[Tensor]) -> None:
        """Put saved masters back, and the parameters with them."""
        for (_, master), saved in zip(self._pairs, masters, strict=True):
            master.copy_(saved)
        self.publish()

    def _stand_in(self, parameter: Any) -> Any:
        if parameter.dtype not in LOW_PRECISION:
            return parameter
        master = nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)
        self._pairs.append((parameter, master))
        return master
