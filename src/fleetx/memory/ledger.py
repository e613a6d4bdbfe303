"""What the segments of a forward read from outside, and who writes to it: they must have it as it was."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fleetx.memory.buffers import tensors_of
from fleetx.memory.experience import Experience
from fleetx.memory.readers import Readers, pointers
from fleetx.memory.recompute import Frame
from fleetx.memory.statistics import is_counting
from fleetx.memory.structures import Structure
from fleetx.memory.tape import External, pointer_of, version_of

Inputs = tuple[list[Any], Structure]


class Ledger:
    """Of one forward."""

    def __init__(
        self, experience: Experience, modules: list[nn.Module], held: list[Tensor], device: torch.device
    ) -> None:
        self.readers = Readers()
        self._experience = experience
        self._device = device  # the one from which tensors move to the host
        # Held, so that their memory becomes nobody else's even if the model replaces them.
        kept = [tensor for tensor in held if not is_lazy(tensor)]
        self.kept = {pointer: t.untyped_storage() for t in kept if (pointer := pointer_of(t)) is not None}
        counting = [one for one in modules if is_counting(one)]
        self._statistics = {pointer_of(tensor) for tensor in tensors_of(counting, "_buffers")}

    def is_kept(self, tensor: Tensor) -> bool:
        """Whether the tensor is, or lies in, a parameter or buffer, which live anyway."""
        return pointer_of(tensor) in self.kept

    def note_inputs(
        self,
        frame: Frame,
        args: Any,
        kwargs: Any,
        written: list[Tensor],
        *,
        is_sure: bool = True,
        is_likely: bool = True,
    ) -> Inputs:
        """The inputs of a call; of those that it will write to, whoever needs them again has a copy now.

        If that is not likely the present segment goes without, since large inputs would be there twice: should it
        happen, the segment keeps everything this once. Those that ended before cannot.
        """
        ids = {id(tensor) for tensor in written}
        noted = frame.tape.note_inputs(args, kwargs, lambda t: self._external(frame, t, leaves=id(t) not in ids))
        self.readers.copy_before(written, is_sure, without=None if is_likely else frame)
        if self._experience.offloader is not None:
            for pointer in pointers(written):
                self._experience.offloader.finish(pointer)
        return noted

    def note_written(self, frame: Frame, written: list[Tensor]) -> None:
        """Several copies of one memory do not see what is written to each other."""
        if self.readers.share(written, frame):
            frame.lost = "it writes to memory that several of its inputs share"

    def _external(self, frame: Frame, tensor: Tensor, leaves: bool) -> External:
        # Detached: itself it knows the graph, which may come to know the segment.
        held = tensor if isinstance(tensor, nn.Parameter) else tensor.detach()
        noted = External(held, version_of(held), tensor.requires_grad, self.is_kept(tensor))
        if noted.is_kept and pointer_of(tensor) in self._statistics:
            noted.copy(is_sure=True)  # they are written to without a trace, by other forwards too
        if leaves and not noted.is_kept and frame.sends_inputs:
            frame.park_input(noted, self._experience.for_device(self._device), early=True)
        self.readers.add(tensor, frame, noted)
        return noted
