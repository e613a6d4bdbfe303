"""Compiles the parts of a model that keeps all its activations."""

from typing import Any

from torch import nn

from fleetx.memory.compiling import SharedCompilations
from fleetx.memory.names import called_children


def compile_parts(model: nn.Module, **options: Any) -> None:
    """From now on the model's children run compiled; those that are alike share one compilation.

    What the model's own forward does between its children stays eager, so it may do anything.
    """
    parts = called_children(model)
    if not parts:
        raise ValueError(
            f"compile = True compiles the children of a model, and this {type(model).__name__} has none. Put it into "
            "another module, or call model.compile() yourself."
        )
    borders = _Borders(parts, SharedCompilations(**options))
    model.register_forward_pre_hook(borders.enter, prepend=True)
    model.register_forward_hook(borders.leave, always_call=True)


class _Borders:
    """Gives the parts their compiled forwards while the model runs, and takes them away again.

    In between the model is what it was: it can be copied, saved and called by others.
    """

    def __init__(self, parts: list[nn.Module], compilations: SharedCompilations) -> None:
        self.parts = parts
        self.compilations = compilations
        self.depth = 0  # a model may call itself

    def enter(self, *_: Any) -> None:
        self.depth += 1
        self.compilations.install(self.parts)

    def leave(self, *_: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.compilations.uninstall(self.parts)


for _hook in (_Borders.enter, _Borders.leave):
    _hook._torchdynamo_disable = True  # type: ignore[attr-defined]
