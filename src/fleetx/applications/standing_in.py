"""When a kernel may do what modules do, without calling them."""

from torch import Tensor, nn

from fleetx.applications.cheap_dropout import CheapDropout
from fleetx.notices import tell_once


def is_usual(part: nn.Module, usual: type[nn.Module]) -> bool:
    """Whether nobody would notice that a part was not called: it is what it was made as, and nobody watches it."""
    if type(part) is not usual or "forward" in vars(part):
        return False
    hooks = part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks
    if any(hooks) or nn.modules.module._has_any_global_hook():
        return False
    return usual is CheapDropout or _has_plain_parameters(part)


def may_stand_in_for(*parts: tuple[nn.Module, type[nn.Module]]) -> bool:
    """Whether kernels may do what all of these parts do; if not, that is said once."""
    if all(is_usual(part, usual) for part, usual in parts):
        return True
    tell_once(
        "bert.parts",
        "parts inside of BERT's half layers are not as they were made: they have hooks (those of a plan that names "
        "them, too), were replaced, or have other parameters. So they are called one after the other, in place of "
        "kernels that do several at once: results differ by rounding from those of such kernels.",
    )
    return False


def _has_plain_parameters(part: nn.Module) -> bool:
    """Whether a kernel may read weight and bias."""
    weight, bias = (part._parameters.get(name) for name in ("weight", "bias"))
    if weight is None or bias is None or bias.shape != weight.shape[:1]:  # torch would broadcast a shorter bias
        return False
    return _is_plain(weight) and _is_plain(bias)


def _is_plain(parameter: Tensor) -> bool:
    return type(parameter) in (Tensor, nn.Parameter) and parameter.is_contiguous()
