"""What others do to a whole model: they compile it, or let it checkpoint itself."""

import sys
from collections.abc import Iterable, Sequence

from torch import nn

from fleetx.memory.experience import Experience
from fleetx.memory.names import Cuts
from fleetx.memory.traced import REMEDY

_CHECKPOINTING = {  # what it is called, and what switches it off
    "gradient_checkpointing": (
        "model.gradient_checkpointing_disable(), or TrainingArguments(gradient_checkpointing=False)"
    ),
    "grad_checkpointing": "model.set_grad_checkpointing(False)",
}
"""The flags of transformers and timm, which they set on modules that then checkpoint what they call."""


def refuse_gradient_checkpointing(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Reject a model that checkpoints itself: its blocks would be computed three times. Called in each forward."""
    for flag in _CHECKPOINTING:
        # Flags of classes are off: to look them up would cost a microsecond for each module.
        for module in [module for module in modules if flag in vars(module)]:
            if getattr(module, flag) and module.training:
                raise ValueError(_checkpoints_itself(model, module, flag))


def _checkpoints_itself(model: nn.Module, module: nn.Module, flag: str) -> str:
    name = next(name for name, other in model.named_modules() if other is module)
    return (
        f"the model checkpoints itself ({name + '.' if name else ''}{flag} is {getattr(module, flag)!r}), and with a "
        "plan its blocks would be computed three times. The plan recomputes them already: leave gradient checkpointing "
        f"off, with {_CHECKPOINTING[flag]}; or take the plan off, with fleetx.memory.applied_to(model).remove()."
    )


def is_compiled_around(experience: Experience) -> bool:
    """Whether the compiler calls the model: then it has traced the plan, unless the plan cannot be traced."""
    if not _is_within_compiled_call():
        return False
    if experience.why_not_traced:
        raise RuntimeError(
            f"a model with this plan must not be compiled from outside, and its call is: {experience.why_not_traced}."
        )
    return True


def refuse_compiled_containers(experience: Experience) -> None:
    """Reject modules that run compiled and hold ends of segments: what is inside of them, only the compiler sees."""
    for name, container in experience.cuts.containers.items():
        if name and container._compiled_call_impl is not None:
            raise RuntimeError(_compiled_and_cut(repr(name)))


def require_compiled_within_segments(cuts: Cuts) -> None:
    """The same for what torch.compile(module) gives, a module around the module."""
    for name, container in cuts.containers.items():
        if any_compiled([container]):
            raise ValueError(_compiled_and_cut(repr(name) if name else "this one (the result of torch.compile)"))


def _compiled_and_cut(what: str) -> str:
    return (
        f"a model with a plan must not be compiled inside of the plan, and {what} is, which holds the ends of "
        "segments. Put the plan on the model, and compile the model afterwards; or compile modules in which nothing is "
        f"cut. {REMEDY}"
    )


def compiled_among(modules: Sequence[nn.Module], leaves: Iterable[nn.Module]) -> frozenset[nn.Module]:
    """Those of the leaves that the user compiled, or that hold compiled modules."""
    return frozenset(leaf for leaf in leaves if any_compiled(leaf.modules())) if any_compiled(modules) else frozenset()


def any_compiled(modules: Iterable[nn.Module]) -> bool:
    """Whether the user compiled one of these modules."""
    if "torch._dynamo" not in sys.modules:  # nobody compiled anything, and importing the compiler takes seconds
        return False
    from torch._dynamo.eval_frame import OptimizedModule

    return any(one._compiled_call_impl is not None or isinstance(one, OptimizedModule) for one in modules)


def _is_within_compiled_call() -> bool:
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back
    return False
