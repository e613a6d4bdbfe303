"""torch's inference mode: nothing can be trained in it, nor what was made in it."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def refuse_mode(what: str) -> None:
    """Refuse to do `what` in inference mode, where backwards give zeros and states could never be written again."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{what} was called while torch.inference_mode is on, where nothing is trained: call it outside of that, "
            "and use torch.no_grad or torch.inference_mode around evaluations alone."
        )


def refuse_made(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse tensors, given with what they are called, that were made in inference mode."""
    for name, tensor in tensors:
        if tensor.is_inference():
            raise ValueError(
                f"{name} was made while torch.inference_mode was on, so it can never be trained or saved for a "
                "backward: build or load the model outside of it, or put a clone in its place (tensor.clone())."
            )


def refuse_model(model: nn.Module) -> None:
    """Refuse a model with such parameters or buffers."""
    refuse_made((f"the parameter {name!r}", parameter) for name, parameter in model.named_parameters())
    refuse_made((f"the buffer {name!r}", buffer) for name, buffer in model.named_buffers())
