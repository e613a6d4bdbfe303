"""What of a run is saved, and how it is put back.

Workers of a job have much in common: weights, the optimizer's state, the schedule. That is saved once ("shared").
The rest is each worker's own: buffers, the gradients of a window in progress, the loaders' positions, random state.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fleetx import names
from fleetx.checkpoint.errors import CheckpointError
from fleetx.checkpoint.manifest import Job
from fleetx.checkpoint.randomness import random_state, set_derived_state, set_random_state
from fleetx.checkpoint.replaying import WindowStart
from fleetx.checkpoint.tensor_file import Outline, outline
from fleetx.checkpoint.trees import TensorSet, encode, encoded_dict
from fleetx.fleet.optimizer import DistributedOptimizer
from fleetx.notices import tell_once

Tree = dict[str, Any]


@dataclass
class Run:
    """The objects whose state makes up a run, each by a name."""

    models: dict[str, nn.Module]
    optimizers: dict[str, Any]
    loaders: dict[str, Any]
    also: dict[str, Any]
    start: WindowStart | None

    def job(self, name: str | None) -> Job:
        """What a checkpoint must fit to be this run's."""
        called = {
            id(parameter): ".".join((*self.model_path(model), name))
            for model, module in self.models.items()
            for name, parameter in module.named_parameters()
        }
        return Job(name, {key: _outline_of(optimizer, called) for key, optimizer in self.optimizers.items()})

    def model_outline(self) -> Outline:
        """The tensors that `model.safetensors` holds."""
        tensors = TensorSet("model")
        for name, model in self.models.items():
            weights, others, _ = _parts(model)
            encode({**weights, **others}, tensors, self.model_path(name))
        return outline(tensors.tensors)

    @property
    def devices(self) -> list[torch.device]:
        """Where the models are."""
        return list({parameter.device for model in self.models.values() for parameter in model.parameters()})

    @property
    def epoch(self) -> int | None:
        """The epoch of the first loader that counts them."""
        epochs = [getattr(loader, "epoch", None) for loader in self.loaders.values()]
        return next((epoch for epoch in epochs if isinstance(epoch, int)), None)

    def model_path(self, name: str) -> tuple[str, ...]:
        """Weights have their plain names where there is one model, so that any tool can read the file."""
        return () if len(self.models) == 1 else (name,)


@dataclass
class Collected:
    """The state of a run as JSON, and the tensors it refers to."""

    shared: Tree
    own: Tree
    model: TensorSet
    optimizer: TensorSet
    mine: TensorSet


def collect(run: Run, extra: Mapping[str, Any], rank: int) -> Collected:
    """The present state. Its tensors are still those in use."""
    model, optimizer, mine = TensorSet("model"), TensorSet("optimizer"), TensorSet("own")
    # The first worker's buffers stand beside the weights: the file is then a whole model.
    buffers = model if rank == 0 else mine
    models: Tree = {}
    optimizers: Tree = {}
    own_buffers: Tree = {}
    windows: Tree = {}
    for name, module in run.models.items():
        weights, others, metadata = _parts(module)
        models[name] = encoded_dict(
            {"weights": encode(weights, model, run.model_path(name)), "metadata": encode(metadata, model)}
        )
        own_buffers[name] = encode(others, buffers, run.model_path(name))
    for name, its in run.optimizers.items():
        state, window = _optimizer_state(its)
        optimizers[name] = encode(state, optimizer, (name,))
        windows[name] = encode(window, mine, ("window", name))
    rest = {
        "loaders": {name: loader.state_dict() for name, loader in run.loaders.items()},
        "start": run.start.state() if run.start is not None else None,
        "also": {name: _get_state(thing) for name, thing in run.also.items()},
        "random": random_state(run.devices),
        "extra": dict(extra),
    }
    own = {"buffers": encoded_dict(own_buffers), "windows": encoded_dict(windows)}
    own |= {name: encode(value, mine, (name,)) for name, value in rest.items()}
    shared = {"models": encoded_dict(models), "optimizers": encoded_dict(optimizers)}
    return Collected(encoded_dict(shared), encoded_dict(own), model, optimizer, mine)


def sums_of_weights(run: Run) -> list[tuple[str, int]]:
    """Name and checksum of each weight that all workers should share, where they are compared now and then."""
    guards = [its.engine.guard for its in run.optimizers.values() if isinstance(its, DistributedOptimizer)]
    return [one for guard in guards if guard is not None for one in guard.sums()]


def require_parts(run: Run, own: Tree) -> None:
    """Raise, before anything is put back, if a loader or something beside was not saved; tell what is left out."""
    for kind, argument in (("loaders", "loader"), ("also", "also")):
        here, saved = getattr(run, kind), own[kind]
        missing = [name for name in here if name not in saved]
        if missing:
            known = ", ".join(map(repr, saved)) or "none"
            raise CheckpointError(
                f"{argument}= names {missing[0]!r}, and the checkpoint has {known}: give what was saved under the name "
                f"that it had, or leave {argument}= out and begin with it anew."
            )
        left_out = [name for name in saved if name not in here]
        if left_out:
            tell_once(
                f"checkpoint.left_out.{kind}",
                f"the checkpoint has the state of {', '.join(map(repr, left_out))}, which is not put back: give it "
                f"with {argument}= to go on where it was.",
            )


@dataclass
class Pieces:
    """What each object of a run is given by a checkpoint."""

    models: dict[str, Tree]
    optimizers: dict[str, Tree]
    also: dict[str, Any]
    loaders: dict[str, Any]
    random: Tree
    start: Tree | None = None
    """Where the window in progress began, if it goes on."""
    buffers: Tree | None = None
    """Those of the models at the start of a window that begins again."""
    new_rank: int | None = None
    """The number of a worker that was not there when this was saved: its random state is derived."""


def pieces_here(run: Run, shared: Tree, own: Tree) -> Pieces:
    """For the same worker of the same number of workers."""
    return Pieces(
        models=_model_states(run, shared, own),
        optimizers={name: _with_window(shared["optimizers"][name], own["windows"][name]) for name in run.optimizers},
        also=own["also"],
        loaders=own["loaders"],
        random=own["random"],
        start=own["start"] if run.start is not None else None,
    )


def pieces_elsewhere(run: Run, shared: Tree, first: Tree, mine: Tree | None, rank: int) -> Pieces:
    """For another number of workers, where a window in progress begins again.

    `first` is the own state of worker 0, `mine` that of the worker with this number, if there was one.
    """
    begun = first["start"]
    return Pieces(
        models=_model_states(run, shared, first),
        optimizers={name: _with_window(shared["optimizers"][name], None) for name in run.optimizers},
        also=(mine or first)["also"],
        loaders=first["loaders"] | (begun["loaders"] if begun is not None else {}),
        random=(mine or first)["random"],
        buffers=begun["buffers"] if begun is not None else None,
        new_rank=rank if mine is None else None,
    )


def check(run: Run, pieces: Pieces) -> None:
    """Raise if an object would refuse its piece; nothing has been written yet."""
    for things, states in ((run.optimizers, pieces.optimizers), (run.loaders, pieces.loaders)):
        for name, thing in things.items():
            if can_check(thing):
                thing.check_state_dict(states[name])


def put_back(run: Run, pieces: Pieces) -> None:
    """Give each object its piece."""
    # First those that are not ours, which can refuse only now, while model and optimizer are still as they were.
    for name, thing in run.also.items():
        _set_state(thing, pieces.also[name])
    for name in sorted(run.loaders, key=lambda name: can_check(run.loaders[name])):
        run.loaders[name].load_state_dict(pieces.loaders[name])
    for name, model in run.models.items():
        model.load_state_dict(pieces.models[name])
    for name, optimizer in run.optimizers.items():
        optimizer.load_state_dict(pieces.optimizers[name])
    if run.start is not None:
        run.start.note_loaded()
        if pieces.buffers is not None:
            run.start.begin_anew(pieces.buffers)
        if pieces.start is not None:
            run.start.load_state(pieces.start)
    if pieces.new_rank is None:
        set_random_state(pieces.random, run.devices)
    else:
        set_derived_state(pieces.random, pieces.new_rank)


def _model_states(run: Run, shared: Tree, own: Tree) -> dict[str, Tree]:
    states: dict[str, Tree] = {}
    for name in run.models:
        saved = shared["models"][name]
        state = states[name] = OrderedDict(saved["weights"] | own["buffers"][name])
        state._metadata = saved["metadata"]  # type: ignore[attr-defined]
    return states


def can_check(thing: Any) -> bool:
    """Whether it can say beforehand what it would refuse."""
    return callable(getattr(thing, "check_state_dict", None))


def _parts(model: nn.Module) -> tuple[Tree, Tree, Any]:
    """The weights, which all workers share, what else a state dict holds, and the versions that torch notes in it."""
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict()
    return (
        {name: value for name, value in state.items() if name in weights},
        {name: value for name, value in state.items() if name not in weights},
        getattr(state, "_metadata", None),
    )


def _optimizer_state(optimizer: Any) -> tuple[Tree, Tree | None]:
    """The state without the window in progress, and that window."""
    if not isinstance(optimizer, DistributedOptimizer):
        return optimizer.state_dict(), None
    state = optimizer.state_in_use()
    ours = dict(state["fleetx"])
    window = ours.pop("window")
    return state | {"fleetx": ours}, window


def _with_window(state: Tree, window: Tree | None) -> Tree:
    if "fleetx" not in state:
        return state
    return state | {"fleetx": state["fleetx"] | {"window": window or {"held": 0}}}


def _outline_of(optimizer: Any, called: Mapping[int, str]) -> list[Any]:
    """Its class, the sizes of its groups, and the names in them."""
    inner = optimizer.inner if isinstance(optimizer, DistributedOptimizer) else optimizer
    groups = getattr(inner, "param_groups", [])
    parameters = [parameter for group in groups for parameter in group["params"]]
    if isinstance(optimizer, DistributedOptimizer):
        parameters = optimizer.engine.updater.parameters()  # fp32 masters have no names
    named = names.in_groups(groups, [called.get(id(parameter)) for parameter in parameters])
    return [type(inner).__name__, [len(group["params"]) for group in groups], named]


# Random generators have a state, but no state dict.


def _get_state(thing: Any) -> Any:
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    if hasattr(thing, "bit_generator"):
        return thing.bit_generator.state
    return thing.state_dict()


def _set_state(thing: Any, state: Any) -> None:
    if isinstance(thing, torch.Generator):
        thing.set_state(state)
    elif hasattr(thing, "bit_generator"):
        thing.bit_generator.state = state
    else:
        thing.load_state_dict(state)


def is_stateful(thing: Any) -> bool:
    """Whether it has a state that can be saved and loaded."""
    if isinstance(thing, torch.Generator) or hasattr(thing, "bit_generator"):
        return True
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))
