"""What a plan cannot work inside of: a compilation from outside, or a model that checkpoints itself."""

import sys
from collections.abc import Iterable

from torch import nn

from fleetx.memory.experience import Experience

_CHECKPOINTING = {  # what it is called, and what switches it off
    "gradient_checkpointing": (
        "model.gradient_checkpointing_disable(), or TrainingArguments(gradient_checkpointing=False)"
    ),
    "grad_checkpointing": "model.set_grad_checkpointing(False)",
}
"""The flags of transformers and timm, which they set on modules that then checkpoint what they call."""


def refuse_gradient_checkpointing(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Reject a model that checkpoints itself: its blocks would be computed three times. Called in each forward."""
    for module in modules:
        held = vars(module)  # flags of classes are off: to look them up would cost a microsecond for each module
        for flag in _CHECKPOINTING:
            if held.get(flag) and module.training:
                raise ValueError(_checkpoints_itself(model, module, flag))


def _checkpoints_itself(model: nn.Module, module: nn.Module, flag: str) -> str:
    name = next(name for name, other in model.named_modules() if other is module)
    return (
        f"the model checkpoints itself ({name + '.' if name else ''}{flag} is {getattr(module, flag)!r}), and with a "
        "plan its blocks would be computed three times. The plan recomputes them already: leave gradient checkpointing "
        f"off, with {_CHECKPOINTING[flag]}; or take the plan off, with fleetx.memory.applied_to(model).remove()."
    )


def refuse_foreign_compilation(model: nn.Module, experience: Experience) -> None:
    """What happens between modules happens in Python: a compiler around it would see other calls than there are."""
    parts = {"": model, **experience.cuts.containers, **experience.cuts.leaves}
    compiled = [name for name, part in parts.items() if part._compiled_call_impl is not None]
    if compiled or _is_within_compiled_call():
        what = "its call" if not compiled else repr(compiled[0]) if compiled[0] else "the model"
        raise RuntimeError(_compiled_from_outside(what))


def _compiled_from_outside(what: str) -> str:
    return (
        f"a model with a plan must not be compiled from outside, and {what} is. "
        "Let the plan compile what runs between the cuts: memory.apply(..., compile=True), or strategy.compile."
    )


def require_not_compiled(model: nn.Module) -> None:
    """What torch.compile(module) gives is a module around the module, which calls it where no plan can see."""
    if "torch._dynamo" not in sys.modules:  # nobody compiled anything
        return
    from torch._dynamo.eval_frame import OptimizedModule

    for name, module in model.named_modules():
        if isinstance(module, OptimizedModule):
            what = repr(name) if name else "this one (the result of torch.compile)"
            raise ValueError(_compiled_from_outside(what))


def _is_within_compiled_call() -> bool:
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back
    return False
