"""Runs a model, or parts of it, in low precision.

Hooks on modules open and close a precision region around their forward; the model itself is not rewritten.
"""

import difflib
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fleetx.numbers import LOW_PRECISION
from fleetx.slicing import map_tensors
from fleetx.strategy import AmpConfigs
from fleetx.wrapped_names import modules_called

_CASTABLE = (torch.float32, *LOW_PRECISION)


class _Autocast(NamedTuple):
    """torch's autocast state for one kind of device."""

    device: str
    enabled: bool
    dtype: torch.dtype


def _autocast_state(device: str) -> _Autocast:
    return _Autocast(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))


def _set_autocast(device: str, enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)


@contextmanager
def outside_autocast(device: torch.device) -> Generator[None]:
    """Around a backward or an update: an autocast of the user's own around the whole step is meant for the forward.

    A backward in it would compute in low precision also what the forward had kept out of that.
    """
    surroundings = _autocast_state(device.type)
    _set_autocast(surroundings.device, False, surroundings.dtype)
    try:
        yield
    finally:
        _set_autocast(*surroundings)


class _Region:
    """What happens around one module's forward: casts at its borders, autocast and cast weights inside."""

    def __init__(
        self,
        *,
        autocast: torch.dtype | None,
        inputs: torch.dtype | None = None,
        outputs: torch.dtype | None = None,
        weights: torch.dtype | None = None,
        weights_kept: Sequence[nn.Module] = (),
    ) -> None:
        self.autocast = autocast
        self.inputs = inputs
        self.outputs = outputs
        self.weights = weights
        self.weights_kept = list(weights_kept)
        self.entries = 0
        # A module may be entered again while it runs.
        self._open: list[tuple[_Autocast, list[tuple[nn.Module, str, nn.Parameter]]]] = []

    def install(self, module: nn.Module) -> "_Region":
        """Put the region around the module."""
        module.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True)
        module.register_forward_hook(self.leave, with_kwargs=True, always_call=True)
        return self

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self.inputs is not None:
            args, kwargs = _cast(args, self.inputs), _cast(kwargs, self.inputs)
        surroundings = _autocast_state(_device_type(module))
        _set_autocast(surroundings.device, self.autocast is not None, self.autocast or surroundings.dtype)
        torch.autocast_increment_nesting()
        self.entries += 1
        self._open.append((surroundings, self._lower_weights(module)))
        return args, kwargs

    def leave(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
        if not self._open:  # entering failed: there is nothing to undo
            return output
        surroundings, originals = self._open.pop()
        for owner, name, parameter in originals:
            owner._parameters[name] = parameter
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        _set_autocast(*surroundings)
        return output if self.outputs is None else _cast(output, self.outputs)

    def _lower_weights(self, module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
        if self.weights is None:
            return []
        kept = {id(inner) for outer in self.weights_kept for inner in outer.modules()}
        originals = []
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if isinstance(owner, _NormBase) or id(owner) in kept:
                    continue  # batch norms take low-precision inputs with fp32 weights, and only so
                if parameter is not None and parameter.dtype == torch.float32:
                    originals.append((owner, name, parameter))
                    owner._parameters[name] = parameter.to(self.weights)  # type: ignore[assignment]
        return originals


# torch.compile cannot follow a region that is opened in one call and closed in another. This is what
# torch.compiler.disable does to a function, without importing the whole compiler when FleetX is imported.
for _hook in (_Region.enter, _Region.leave):
    _hook._torchdynamo_disable = True  # type: ignore[attr-defined]

_outermost: weakref.WeakKeyDictionary[nn.Module, _Region] = weakref.WeakKeyDictionary()


def entries(model: nn.Module) -> int | None:
    """How often the model was run in low precision; None if it is not meant to be."""
    region = _outermost.get(model)
    return None if region is None else region.entries


def low_dtype(configs: AmpConfigs) -> torch.dtype:
    """The low precision that the settings ask for; a pure mode decides by its name."""
    if configs.use_pure_bf16:
        return torch.bfloat16
    if configs.use_pure_fp16:
        return torch.float16
    return getattr(torch, configs.dtype)


def apply_precision(model: nn.Module, configs: AmpConfigs) -> None:
    """Make `model(...)` run in low precision and give fp32 results, so that losses are computed in fp32.

    Of nested modules on the lists, the innermost decides. It returns what the one around it computes in.
    """
    _remove_regions(model)
    low = low_dtype(configs)
    raised = _named_modules(model, configs.custom_black_list, "custom_black_list")
    lowered = _named_modules(model, configs.custom_white_list, "custom_white_list")
    _require_one_list(model, raised, lowered)
    is_pure = configs.use_pure_fp16 or configs.use_pure_bf16
    listed = {id(module): torch.float32 for module in raised} | {id(module): low for module in lowered}
    around = _around(model, listed, low if is_pure else None)
    if is_pure:
        _lower_parameters(model, low, kept=raised, forced=lowered)
        _outermost[model] = _Region(autocast=None, inputs=low, outputs=torch.float32).install(model)
        lowered = [module for module in lowered if around[id(module)] != low]
    else:
        _outermost[model] = _Region(autocast=low, outputs=torch.float32).install(model)
    for module in raised:
        _Region(autocast=None, inputs=torch.float32, outputs=around[id(module)]).install(module)
    for module in lowered:
        inside = [inner for inner in raised if any(inner is one for one in module.modules())]
        weights = None if is_pure else low
        region = _Region(autocast=None, inputs=low, outputs=around[id(module)], weights=weights, weights_kept=inside)
        region.install(module)


def _around(
    model: nn.Module, listed: Mapping[int, torch.dtype], outside: torch.dtype | None
) -> dict[int, torch.dtype | None]:
    """What is computed in around each module: what the listed module around it says; None is autocast."""
    found: dict[int, torch.dtype | None] = {}

    def visit(module: nn.Module, dtype: torch.dtype | None) -> None:
        if id(module) in found:
            if found[id(module)] != dtype and (outside is not None or id(module) in listed):
                _refuse_two_precisions(model, module, found[id(module)], dtype)
            return
        found[id(module)] = dtype
        for child in module.children():
            visit(child, listed.get(id(module), dtype))

    visit(model, outside)
    return found


def _refuse_two_precisions(model: nn.Module, module: nn.Module, *dtypes: torch.dtype | None) -> None:
    names = " and ".join(repr(name) for name, one in model.named_modules(remove_duplicate=False) if one is module)
    first, second = (str(dtype) if dtype else "autocast's choice" for dtype in dtypes)
    raise ValueError(
        f"a shared module must run in one precision, and {names} are one module, around which custom_white_list and "
        f"custom_black_list ask for {first} in one place and {second} in another. Name the modules around it alike."
    )


def _require_one_list(model: nn.Module, raised: list[nn.Module], lowered: list[nn.Module]) -> None:
    both = {id(module) for module in raised} & {id(module) for module in lowered}
    for name, module in model.named_modules():
        if id(module) in both:
            raise ValueError(
                f"custom_white_list and custom_black_list must not name the same module, got {name!r} in both: take "
                "it out of one. Of nested modules the innermost decides, and globs may need to be narrower."
            )


def _remove_regions(model: nn.Module) -> None:
    """A copy of a prepared model has its hooks: a second set would cast twice."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), _Region)]:
                del hooks[key]


def _lower_parameters(model: nn.Module, low: torch.dtype, kept: list[nn.Module], forced: list[nn.Module]) -> None:
    """Cast weights in place, so that optimizers made before keep pointing at them.

    BatchNorm stays in fp32: its kernels take low-precision inputs, and its running statistics would stall. A weight
    that a module in low precision shares with one in fp32 stays in fp32, and is cast for the former while that runs.
    """
    low_norms = {id(inner) for outer in forced for inner in outer.modules()}
    listed = {id(module): torch.float32 for module in kept} | {id(module): low for module in forced}
    around = _around(model, listed, low)

    def stays(module: nn.Module) -> bool:
        if isinstance(module, _NormBase) and id(module) not in low_norms:
            return True
        return listed.get(id(module), around[id(module)]) == torch.float32

    wide = {id(p) for module in model.modules() if stays(module) for p in module.parameters(recurse=False)}
    for module in [module for module in model.modules() if not stays(module)]:
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        for tensor in own:
            if tensor.dtype == torch.float32 and id(tensor) not in wide:
                tensor.data = tensor.data.to(low)
        if any(id(tensor) in wide for tensor in own):
            _Region(autocast=None, weights=low, weights_kept=kept).install(module)


def _named_modules(model: nn.Module, patterns: Sequence[str], setting: str) -> list[nn.Module]:
    modules = dict(model.named_modules())
    found: dict[int, nn.Module] = {}
    for pattern in patterns:
        called = modules_called(pattern, modules, lambda name, asked: bool(name) and fnmatchcase(name, asked))
        matched = [modules[name] for name in called]
        if not matched:
            near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.4)
            raise ValueError(
                f"{setting} names modules, and no module of the model is called {pattern!r}"
                + (f" (near: {', '.join(near)})" if near else "")
                + ". Names of operators cannot be listed: torch's autocast has no public lists of operators. "
                "Name the modules that use them; globs such as 'encoder.*.norm' are allowed."
            )
        found |= {id(module): module for module in matched}
    return list(found.values())


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.dtype in _CASTABLE else tensor

    return map_tensors(values, convert)


def _device_type(module: nn.Module) -> str:
    parameter = next(module.parameters(), None)
    return parameter.device.type if parameter is not None else "cpu"
