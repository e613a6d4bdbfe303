"""What a model can be cut at."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from fleetx.memory import randomness
from fleetx.memory.buffers import Watch
from fleetx.memory.names import operation_name
from fleetx.memory.recording import Recorder


def outputs(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """Everything the model can be cut at, in the order of a forward on these inputs: modules and their operations.

    The forward leaves no trace in the model's buffers, nor in the random generators.
    """
    found: list[str] = []
    stack: list[tuple[str, dict[str, int]]] = []

    class Listing:
        def is_listening(self) -> bool:
            return bool(stack)

        def calling(self, args: Any, kwargs: Any, written: Any) -> AbstractContextManager[None]:  # noqa: ARG002
            return nullcontext()

        def overheard(self, written: Any) -> None:
            pass

        def called(self, function: Any, args: Any, kwargs: Any, output: Any, begun: Any) -> None:  # noqa: ARG002
            found.append(operation_name(stack[-1][0], function, stack[-1][1]))

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: stack.append((name, {})), prepend=True))

        def leave(*_: Any, name: str = name) -> None:
            stack.pop()
            if name:
                found.append(name)

        handles.append(module.register_forward_hook(leave, always_call=True))
    device = randomness.devices_of([*model.parameters(), *model.buffers()])
    present = randomness.state(device)
    try:
        with Watch().before(model).restored(), randomness.replaying(present, device):  # noqa: SIM117
            with Recorder(Listing()), torch.no_grad():
                model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found
