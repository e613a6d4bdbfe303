"""What `fleetx.plan` was asked: what cannot be meant is refused at once, and what is doubtful becomes a note."""

import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fleetx import inference
from fleetx.comm import batch_norms, world
from fleetx.memory import Segment
from fleetx.memory.names import find_cuts, matches
from fleetx.memory.structures import tensors_in
from fleetx.notices import shown
from fleetx.planner.fitting import Words
from fleetx.planner.search import check_batch
from fleetx.planner.updating import moved_by
from fleetx.slicing import Batch
from fleetx.units import parse_bytes

_PRECISIONS = (torch.bfloat16, torch.float16)


def check(
    model: object,
    sample: Batch,
    loss_fn: Callable[[Any, Any], Any] | None,
    optimizer: object,
    checkpoints: object,
    precision: object,
    *,
    global_batch: object = None,
    k_steps: object = None,
    bandwidth: object = None,
    **flags: object,
) -> None:
    """Raise for whatever would otherwise fail in other words, or much later; `flags` are all that must be bools."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"fleetx.plan takes an nn.Module, not a {type(model).__name__}.")
    inference.refuse_mode("fleetx.plan")
    inference.refuse_model(model)
    _check_alone(model)
    _check_compiled(model)
    _check_optimizer(optimizer)
    _check_precision(precision)
    if global_batch is not None:
        check_batch(global_batch)
    if k_steps is not None and (isinstance(k_steps, bool) or not isinstance(k_steps, int)):
        raise TypeError(
            f"k_steps must be a number of micro-batches or None, got {shown(k_steps)}: write for example k_steps=4, or "
            "leave it out to have it chosen."
        )
    _check_bandwidth(bandwidth)
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {shown(value)}: write {name}=True or {name}=False.")
    check_checkpoints(model, checkpoints)
    _check_sample(sample)
    _check_memory(model, sample)
    _check_loss(loss_fn)
    _check_call(model, sample, has_loss=loss_fn is not None)


def _check_alone(model: nn.Module) -> None:
    if world.size() > 1 and batch_norms.exchange_in_training(model):
        raise ValueError(
            "fleetx.plan tries a model on one worker, and this one has SyncBatchNorm layers, which wait for all "
            f"{world.size()} workers in each forward. Plan with nn.BatchNorm layers, before fleet.distributed_model."
        )


class CannotBeCut(ValueError):  # noqa: N818 - it reads as what it says
    """A batch does not have so many micro-batches."""


def check_slices(
    batch: int, k_steps: int | None, words: Words, *, one_forward: bool = False, even: bool = False
) -> None:
    """Raise if a batch cannot be cut into so many micro-batches."""
    if k_steps is None:
        return
    given = words.k_steps.format(k_steps)
    if not 1 <= k_steps <= batch:
        example = words.k_steps.format(min(4, batch))
        raise CannotBeCut(
            f"{batch:,} samples have from 1 to {batch:,} micro-batches, got {given}: write for example {example}, or "
            "leave it out to have it chosen."
        )
    if one_forward and k_steps != 1:
        raise CannotBeCut(f"{words.one_forward} keeps the batch whole, got {given} too: leave one of them out.")
    if even and batch % k_steps:
        raise CannotBeCut(
            f"with even=True all micro-batches have one size, got {batch:,} samples in {k_steps:,}: take a number of "
            f"micro-batches that divides {batch:,}, or leave out even."
        )


def check_smallest(batch: int, k_steps: int | None, words: Words, smallest: int) -> None:
    """Raise if a model refuses micro-batches that are so small, as some batch norms do."""
    if batch < smallest:
        raise CannotBeCut(
            f"this model takes {smallest:,} samples or more at a time, got {words.global_batch.format(batch)}: take "
            f"{words.global_batch.format(smallest)} or more."
        )
    if k_steps is None or batch // k_steps >= smallest:
        return
    raise CannotBeCut(
        f"this model takes micro-batches of {smallest:,} samples or more, got {batch:,} samples with "
        f"{words.k_steps.format(k_steps)}: take {words.k_steps.format(batch // smallest)} or less."
    )


def cuts_at(model: nn.Module, checkpoints: Sequence[str]) -> list[str]:
    """The modules that checkpoints name, one by one or by globs."""
    return list(find_cuts(model, [Segment(name) for name in checkpoints]).modules)


def doubts(model: nn.Module, optimizer: Optimizer | None) -> tuple[str, ...]:
    """What a reader of the plan should know: it was planned as asked, but perhaps not as meant."""
    notes = []
    if optimizer is None and any(parameter.requires_grad for parameter in model.parameters()):
        notes.append("no optimizer was given, so that memory for its state was not planned: give one with optimizer=.")
    if not model.training:
        notes.append("the model is in eval() mode and was planned so; model.train() before planning, if it trains.")
    if optimizer is not None:
        notes += _doubts_of_optimizer(model, optimizer)
    return tuple(notes)


def _doubts_of_optimizer(model: nn.Module, optimizer: Optimizer) -> list[str]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    moved = moved_by(optimizer, trained)
    if not moved:
        return ["the optimizer has none of this model's parameters; one of its kind was planned for them."]
    if len(moved) == len(trained):
        return []
    return [
        f"the optimizer does not update {len(trained) - len(moved):,} of {len(trained):,} trainable parameters: they "
        "have gradients, and no state of it was planned for them. Freeze them, or give them to it."
    ]


def amount(name: str, given: object) -> int:
    """An amount of memory in bytes; what is wrong with it is said of the argument with this name."""
    try:
        return parse_bytes(given)  # pyrefly: ignore[bad-argument-type]
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def _check_compiled(model: nn.Module) -> None:
    """Parts may be compiled, as long as no cut comes to lie in them or around them: that is seen once they run."""
    if hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
        raise ValueError(
            "a model is planned as it is before torch.compile, got one that is compiled: give the model itself, with "
            "compile=True to have its segments compiled."
        )


def _check_sample(sample: object) -> None:
    if isinstance(sample, DataLoader):
        raise TypeError("a sample is one batch, got a DataLoader: give next(iter(loader)).")


def _check_memory(model: nn.Module, sample: Batch) -> None:
    """What is on the meta device has no memory: nothing could be measured, and all would seem to fit."""
    empty = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if empty:
        more = f" and {len(empty) - 1:,} more" if len(empty) > 1 else ""
        raise ValueError(
            f"a model is measured where it trains, got {empty[0]!r}{more} on the meta device, which has no memory: "
            "materialise the model first, for example with model.to_empty(device=...), and load its weights."
        )
    if any(tensor.is_meta for tensor in tensors_in(sample)):
        raise ValueError("a sample must have values, got a tensor on the meta device: give a real batch.")


def _check_optimizer(optimizer: object) -> None:
    if optimizer is None or isinstance(optimizer, Optimizer):
        return
    is_class = isinstance(optimizer, type)
    got = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else shown(optimizer)
    remedy = "make one with the model's parameters" if is_class else "give one, or leave it out"
    raise TypeError(f"optimizer must be a torch optimizer or None, got {got}: {remedy}.")


def _check_precision(precision: object) -> None:
    rule = "precision must be torch.bfloat16, torch.float16 or None"
    if precision is not None and not isinstance(precision, torch.dtype):
        raise TypeError(f"{rule}, got {shown(precision)}: write for example precision=torch.bfloat16.")
    if precision is not None and precision not in _PRECISIONS:
        raise ValueError(f"{rule}, got {precision}: autocast knows no other; leave it out for the model's own dtypes.")


def _check_bandwidth(bandwidth: object) -> None:
    rule = "bandwidth must be a number of bytes per second, 0 or more and finite, or None"
    remedy = "write for example bandwidth=25e9, 0 if nothing shall be sent, or leave it out to have it measured"
    if bandwidth is None:
        return
    if isinstance(bandwidth, bool) or not isinstance(bandwidth, int | float):
        raise TypeError(f"{rule}, got {shown(bandwidth)}: {remedy}.")
    if not 0 <= bandwidth < math.inf:
        raise ValueError(f"{rule}, got {shown(bandwidth)}: {remedy}.")


def check_checkpoints(model: nn.Module, checkpoints: object) -> None:
    """They name modules of the model, or leave the choice to FleetX."""
    rule = 'checkpoints must be a list of names or "auto"'
    if isinstance(checkpoints, str):
        if checkpoints.lower() == "auto" != checkpoints:
            raise ValueError(f'{rule}, got {checkpoints!r}: write "auto".')
        if checkpoints != "auto":
            near = difflib.get_close_matches(checkpoints, ["auto"])
            remedy = 'did you mean "auto"?' if near else f"write [{checkpoints!r}] for a single one."
            raise ValueError(f"{rule}, got {checkpoints!r}: {remedy}")
        return
    if not isinstance(checkpoints, list | tuple) or not all(isinstance(name, str) for name in checkpoints):
        raise TypeError(f'{rule}, got {shown(checkpoints)}: write for example ["blocks.0", "blocks.1"].')
    if not checkpoints:
        raise ValueError('checkpoints must name at least one module, got none: leave them to FleetX with "auto".')
    known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    unknown = [pattern for pattern in checkpoints if not any(matches(name, pattern) for name in known)]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=3)
        remedy = f"did you mean {' or '.join(map(repr, near))}?" if near else "model.named_modules() lists all names."
        raise ValueError(f"the model has no module {unknown[0]!r} to cut at: {remedy}")


def _check_loss(loss_fn: object) -> None:
    if loss_fn is None:
        return
    rule = "loss_fn must be a function of what the model gives and of the target"
    if not callable(loss_fn):
        raise TypeError(f"{rule}, got {shown(loss_fn)}: give for example torch.nn.functional.mse_loss.")
    problem = _mismatch(loss_fn, None, None)
    if problem is not None:
        raise TypeError(f"{rule}, got one that does not take two arguments ({problem}).")


def _check_call(model: nn.Module, sample: Batch, *, has_loss: bool) -> None:
    """Whether the model's forward takes what it will be given; the call itself would fail in torch's words."""
    if has_loss and (not isinstance(sample, tuple | list) or len(sample) != 2):
        return  # which is refused when the model is fed
    inputs = sample[0] if has_loss else sample
    if isinstance(inputs, Mapping):
        problem = _mismatch(model.forward, **inputs)
        how = f"the keywords {', '.join(map(str, inputs))}" if inputs else "no keywords"
    else:
        parts = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        problem = _mismatch(model.forward, *parts)
        how = f"{len(parts)} argument{'' if len(parts) == 1 else 's'}"
    if problem is None:
        return
    if has_loss:
        what = "with the inputs of the sample, which is (inputs, target)"
        remedy = "A dict of inputs becomes keywords, a tuple arguments, and anything else is the only argument."
    else:
        what = "with all of the sample, for there is no loss_fn"
        remedy = "Give loss_fn if the sample is (inputs, target), or what the forward takes."
    raise TypeError(f"the model is called {what}: {how}, which its forward does not take ({problem}). {remedy}")


def _mismatch(function: Callable[..., Any], /, *given: Any, **named: Any) -> TypeError | None:
    """Why a function cannot be called so; None if it can, or does not tell."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*given, **named)
    except TypeError as error:
        return error
    return None
