"""Finds the real tokens of a padded batch. By itself, since it imports the compiler, which takes its time."""

import torch
from torch import Tensor
from torch.nn import functional

from fleetx.applications.bert_packing import Packing


# A compiled model begins anew behind it, when the number of tokens is known.
@torch.compiler.disable
def pack(attention_mask: Tensor, device: torch.device) -> Packing:
    """The packing of a batch, on `device`; `attention_mask` is 1 (or True) for real tokens.

    How many tokens there are must be known on the host: a mask that lives there costs nothing, one on the device makes
    the host wait for all that was asked of the device before.
    """
    real = attention_mask.bool()
    if not bool(real[:, 0].all()):
        raise ValueError(
            "unpad=True needs sequences that begin with a real token, but attention_mask is 0 at the first position of "
            "some: pad on the right, or build the model with unpad=False."
        )
    rows = real.flatten().nonzero()[:, 0]
    # Whoever asks for a token of the padding asks beyond the last one, which is an error.
    places = torch.where(real.flatten(), real.flatten().cumsum(0) - 1, len(rows))
    starts = functional.pad(real.sum(1).cumsum(0), (1, 0)).int()
    rows, places, starts = (_moved(tensor, device) for tensor in (rows, places, starts))
    # Compile for any number of tokens: each batch has another one.
    torch._dynamo.maybe_mark_dynamic(rows, 0)
    return Packing(rows, places, starts, (real.shape[0], real.shape[1]))


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # from pageable memory the host would wait
