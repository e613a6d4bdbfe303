"""`distributed_model`: make a model ready for a strategy, without rewriting it."""

import weakref
from operator import itemgetter

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from fleetx import inference, names
from fleetx.amp import apply_precision, low_dtype
from fleetx.comm import batch_norms, beats, world
from fleetx.comm.broadcast import broadcast_module
from fleetx.fleet.activations import is_planned, prepare_activations
from fleetx.fleet.wrappers import require_unwrapped
from fleetx.notices import tell_once
from fleetx.strategy import LOSS_SCALE, DistributedStrategy

_prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_strategies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def distributed_model(model: nn.Module, strategy: DistributedStrategy | None = None) -> nn.Module:
    """Give all workers the same weights, remember parameter names, and switch on what is asked for.

    Low precision, recompute, offload and compiled segments are put on the model by hooks.

    Returns the same module: its state dict, its names and its forward stay as they were.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"distributed_model takes an nn.Module, not a {type(model).__name__}.")
    if model in _prepared:
        raise ValueError(
            "this model went through distributed_model before: once is enough, and twice would cast twice."
        )
    inference.refuse_mode("fleet.distributed_model")
    inference.refuse_model(model)
    require_unwrapped(model)
    _require_wide_enough(model)
    strategy = runnable(strategy)
    require_joined()
    beats.expect(True)  # who has a model is going to train
    names.record(model)
    broadcast_module(model)
    if strategy.sync_batch_norm and world.size() > 1:
        _synchronize_norms(model, strategy)
    if strategy.amp:
        _hint_at_bfloat16(model, strategy)
        apply_precision(model, strategy.amp_configs)
    # Last, so that what is repeated in the backward includes all that is done to a module.
    prepare_activations(model, strategy)
    _explain_communication(strategy)
    strategy.freeze("fleet.distributed_model")
    _prepared.add(model)
    for parameter in model.parameters():
        _strategies[parameter] = strategy
    return model


def is_prepared(model: nn.Module) -> bool:
    """Whether `distributed_model` has seen this module."""
    return model in _prepared


def models_of(parameters: list[torch.Tensor]) -> list[nn.Module]:
    """The prepared models that have one of the parameters, in the order of these: the same in each process."""
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    found = []
    for model in _prepared:
        theirs = [places[id(parameter)] for parameter in model.parameters() if id(parameter) in places]
        found += [(min(theirs), model)] if theirs else []
    return [model for _, model in sorted(found, key=itemgetter(0))]


def strategy_of(parameter: torch.Tensor) -> DistributedStrategy | None:
    """The strategy that the parameter's model was prepared with."""
    return _strategies.get(parameter)


def runnable(strategy: DistributedStrategy | None) -> DistributedStrategy:
    """The strategy, or the default one, after checking that it can be carried out."""
    if strategy is None:
        strategy = DistributedStrategy()
    if not isinstance(strategy, DistributedStrategy):
        raise TypeError(f"strategy must be a fleet.DistributedStrategy, not a {type(strategy).__name__}.")
    strategy.check_runnable()
    for name in strategy.prepared_but_off():
        tell_once(f"off-{name}", f"{name}_configs is set, but {name} is off and does nothing: set {name} = True.")
    if strategy.find_unused_parameters:
        tell_once("unused", "find_unused_parameters is always on here: unused parameters are found and left alone.")
    return strategy


def _require_wide_enough(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dtype is torch.complex32 and parameter.requires_grad:
            raise TypeError(
                f"the parameter {name!r} is torch.complex32, whose gradients could only be summed in half precision. "
                "Make it torch.complex64."
            )


def require_joined() -> None:
    """Workers that were started together must train together."""
    if world.launched_size() > 1 and not world.is_joined():
        raise RuntimeError(
            f"the launcher started {world.launched_size()} workers, but this one has not joined them: each would "
            "train a model of its own. Call fleet.init() first."
        )


def _hint_at_bfloat16(model: nn.Module, strategy: DistributedStrategy) -> None:
    configs = strategy.amp_configs
    if low_dtype(configs) is torch.bfloat16:
        if any(configs.was_given(name) for name in LOSS_SCALE):
            tell_once("bf16-scaling", "bfloat16 has the range of float32: losses are not scaled, those settings rest.")
        return
    parameter = next(model.parameters(), None)
    on_gpu = parameter is not None and parameter.is_cuda
    if not on_gpu or torch.cuda.is_bf16_supported(including_emulation=False):
        tell_once(
            "fp16-hint",
            "amp uses float16, Fleet's default, with a dynamic loss scale. This device also computes in bfloat16, "
            "which needs no scale and skips no step: amp_configs = {'dtype': 'bfloat16'}.",
        )


def _synchronize_norms(model: nn.Module, strategy: DistributedStrategy) -> None:
    """Before anything is hooked to the model that may run it."""
    if is_planned(model, strategy):
        raise ValueError(
            'sync_batch_norm must not be on with recompute_configs.checkpoints = "auto" yet, got True: the planner may '
            "try other micro-batches on one worker than on the others, which its norms would wait for. Name the "
            "checkpoints, or set sync_batch_norm = False."
        )
    count = batch_norms.synchronize(model)
    merging = strategy.gradient_merge and strategy.gradient_merge_configs.k_steps > 1
    whose = "each micro-batch of" if merging else "each batch of"
    tell_once(
        "sync-batch-norm",
        f"sync_batch_norm: the BatchNorm layers ({count}) take the statistics of {whose} all {world.size()} workers."
        if count
        else "sync_batch_norm is on, but the model has no BatchNorm layers: it changes nothing.",
    )


def _explain_communication(strategy: DistributedStrategy) -> None:
    """What the settings for several workers do not do; what they do is said when the first window is reduced."""
    switches = ("use_hierarchical_allreduce", "fp16_allreduce", "bf16_allreduce")
    asked = [name for name in switches if getattr(strategy, name)]
    asked += ["nccl_comm_num"] if strategy.nccl_comm_num > 1 else []
    if world.size() == 1 and asked:
        verb = "changes" if len(asked) == 1 else "change"
        tell_once("alone", f"{' and '.join(asked)} {verb} nothing for a worker alone: it sends nothing.")
    if strategy.hierarchical_allreduce_inter_nranks > 1 and not strategy.use_hierarchical_allreduce:
        tell_once(
            "off-hierarchy",
            "hierarchical_allreduce_inter_nranks is set, but use_hierarchical_allreduce is off and does nothing: set "
            "use_hierarchical_allreduce = True.",
        )
    sizes = [name for name in ("fuse_grad_size_in_MB", "last_comm_group_size_MB") if strategy.is_changed(name)]
    if sizes and not strategy.fuse_all_reduce_ops:
        tell_once(
            "off-fusing",
            f"{' and '.join(sizes)} {'is' if len(sizes) == 1 else 'are'} set, but fuse_all_reduce_ops is off: each "
            "gradient travels alone. Set fuse_all_reduce_ops = True to fuse them.",
        )
