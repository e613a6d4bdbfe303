"""Models that are wrapped in what reduces or shards them already: refused before anything is written."""

import gc
import sys
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fleetx.optim.sharded import is_sharded

_WHOLE = (
    "A strategy reduces whole gradients of whole weights. Leave the sharding out, with recompute or offload where "
    "memory is short; or leave the strategy out: fleetx.memory.apply, fleetx.plan, Lars and Lamb take sharded models."
)


def require_unwrapped(model: nn.Module) -> None:
    """Refuse a model that a wrapper reduces or shards."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, which would average its gradients a second time. "
            "Leave that wrapper out and give the model itself."
        )
    sharding = _sharding_classes()
    for path, module in model.named_modules():
        if isinstance(module, sharding):
            way = _name_of(module)
            raise ValueError(
                f"{f'the module {path!r}' if path else 'the model'} is sharded by {way}: each worker holds a part of "
                f"its weights. {_WHOLE}"
            )
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise ValueError(f"the parameter {name!r} is a DTensor, of which each worker may hold a part. {_WHOLE}")


def require_whole(parameters: Sequence[Tensor]) -> None:
    """Refuse parameters that were sharded, perhaps after their model was prepared."""
    for index, parameter in enumerate(parameters):
        if is_sharded(parameter) or getattr(parameter, "_is_flat_param", False):
            raise ValueError(
                f"parameter {index} of the optimizer, of shape {tuple(parameter.shape)}, is sharded (fully_shard or "
                f"FullyShardedDataParallel): each worker holds a part of it. {_WHOLE}"
            )


def require_alone(parameters: Sequence[Tensor]) -> None:
    """Refuse parameters that another wrapper averages as well: the sum would be divided by the workers twice."""
    ours = {id(parameter) for parameter in parameters}
    wrappers = (DistributedDataParallel, *_sharding_classes())
    for wrapper in gc.get_objects():
        if issubclass(type(wrapper), wrappers) and any(id(p) in ours for p in wrapper.parameters()):
            raise ValueError(
                f"the model is also wrapped in {_name_of(wrapper)}, which would average its gradients a second time. "
                "Leave that wrapper out: fleet.distributed_model and fleet.distributed_optimizer take its place."
            )


def _sharding_classes() -> tuple[type, ...]:
    """FSDP's classes, where they were imported: without them no model is sharded so."""
    module = sys.modules.get("torch.distributed.fsdp")
    return () if module is None else (module.FullyShardedDataParallel, module.FSDPModule)


def _name_of(wrapper: nn.Module) -> str:
    shown = {"FullyShardedDataParallel", "DistributedDataParallel"}
    return next((cls.__name__ for cls in type(wrapper).__mro__ if cls.__name__ in shown), "fully_shard")
