"""Where the window in progress began, so that another number of workers can begin it anew.

Its gradients belong to the workers that computed them. Others take the batches again from the window's first one, with
the buffers (running statistics) as they were when the loader gave it: what the loop wrote to them before that is not
lost, and what it writes afterwards it writes again.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fleetx.fleet.optimizer import DistributedOptimizer

Buffers = dict[str, Tensor]


class WindowStart:
    """Watches the window of one optimizer.

    Only loaders that know which batch they gave last (`last_batch`) and announce each (`on_batch`), as
    `fleetx.data.Loader` does, can go back to it.
    """

    def __init__(
        self,
        optimizer: DistributedOptimizer,
        models: Mapping[str, nn.Module],
        loaders: Mapping[str, Any],
    ) -> None:
        self._window = optimizer.engine.window
        self._loaders = {name: loader for name, loader in loaders.items() if hasattr(loader, "on_batch")}
        self._places = _buffer_places(models)
        # Where each batch is a window there is nothing to replay.
        self._keeps_buffers = optimizer.engine.k_steps > 1
        # Whether a batch was given since the last window ended; one given before this was built may be such.
        self._has_batch = True
        self._batches: dict[str, Any] = {}
        self._buffers: Buffers = {}
        self._note_buffers()
        self._window.on_begin.append(self._note_begin)
        self._window.on_end.append(self._note_end)
        for loader in self._loaders.values():
            loader.on_batch.append(self._note_batch)

    def state(self) -> dict[str, Any] | None:
        """The loaders' positions and the models' buffers at the start of the window; None if none is in progress."""
        if not self._window.held:
            return None
        loaders = {name: self._loaders[name].state_dict(at=batch) for name, batch in self._batches.items()}
        return {"held": self._window.held, "loaders": loaders, "buffers": self._buffers}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over where a window, which goes on, had begun."""
        positions = {name: saved for name, saved in state["loaders"].items() if name in self._loaders}
        self._batches = {name: (saved["epoch"], saved["batches"]) for name, saved in positions.items()}
        _copy(state["buffers"], into=self._buffers)

    def require_fitting(self, buffers: Buffers) -> None:
        """Raise unless they are the models' own."""
        live = self._live() if self._keeps_buffers else {}
        if any(name not in buffers or buffers[name].shape != value.shape for name, value in live.items()):
            raise ValueError("the buffers at the start of the window are not those of the models")

    def begin_anew(self, buffers: Buffers) -> None:
        """Give the models what they had when the window began."""
        _copy(buffers, into=self._live())

    def note_loaded(self) -> None:
        """A run was resumed: what a window begins with is noted with its first batch."""
        self._note_buffers()
        self._note_end()

    def _note_end(self) -> None:
        self._has_batch = False

    def _note_batch(self) -> None:
        if not self._window.held:
            self._has_batch = True
            self._note_buffers()

    def _note_begin(self) -> None:
        # A window that begins within the batch of the last one has no batch to go back to.
        known = self._loaders.items() if self._has_batch else ()
        self._batches = {name: loader.last_batch for name, loader in known}

    def _note_buffers(self) -> None:
        if not self._keeps_buffers:
            return
        live = self._live()
        if not _fits(live, self._buffers):
            self._buffers = {name: torch.empty_like(value) for name, value in live.items()}
        _copy(live, into=self._buffers)

    def _live(self) -> Buffers:
        return {name: value for name, module, leaf in self._places if (value := module._buffers[leaf]) is not None}


def _buffer_places(models: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module, str]]:
    """Name, owner and attribute of each buffer that a state dict holds."""
    return [
        (f"{name}/{path}.{leaf}", module, leaf)
        for name, model in models.items()
        for path, module in model.named_modules()
        for leaf in module._buffers
        if leaf not in module._non_persistent_buffers_set
    ]


def _fits(left: Buffers, right: Buffers) -> bool:
    return left.keys() == right.keys() and all(
        value.shape == right[name].shape and value.dtype == right[name].dtype and value.device == right[name].device
        for name, value in left.items()
    )


@torch.no_grad()
def _copy(values: Buffers, into: Buffers) -> None:
    """Few calls for many small tensors: those of a kind together."""
    kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for name, target in into.items():
        source = values[name]
        targets, sources = kinds.setdefault((target.dtype, target.device, source.device), ([], []))
        targets.append(target)
        sources.append(source)
    for targets, sources in kinds.values():
        torch._foreach_copy_(targets, sources)
