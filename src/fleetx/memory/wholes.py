"""What is not cut inside runs as a whole: noted to be repeated, or freely, as if the model were not cut."""

import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fleetx.memory.buffers import Snapshot, is_hooked, modules_of, tensors_of
from fleetx.memory.checking import checksum
from fleetx.memory.leaf import FreeLeaf, Leaf, NotedLeaf
from fleetx.memory.offload import Offloader
from fleetx.memory.structures import tensors_in
from fleetx.memory.surroundings import Surroundings
from fleetx.memory.tape import Call
from fleetx.memory.underway import hooks_on_saved, no_run

if TYPE_CHECKING:
    from fleetx.memory.running import Run


class Wholes:
    """The modules that run as a whole in one forward, one after the other."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self._experience = run.experience
        self.depth = 0  # within such modules
        self.is_unhooked = False  # whether one runs without our hooks on what autograd saves
        self._noted: NotedLeaf | None = None  # the one that runs, to be repeated
        self._free: FreeLeaf | None = None  # or without being watched

    @property
    def is_any_running(self) -> bool:
        """Whether somebody listens to one, or has left it alone."""
        return self._noted is not None or self._free is not None

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module that runs as a whole begins."""
        self.depth += 1
        if self.depth > 1:
            return
        tensors = tensors_in((args, kwargs))
        if self._may_run_freely(module):
            self._enter_free(module, tensors)
        else:
            self._enter_noted(module, tensors, args, kwargs)

    def leave(self, output: Any) -> None:
        """It ends, be it by an error."""
        self.depth -= 1
        if self.depth > 0:
            return
        failed = output is None and sys.exc_info()[0] is not None
        if self._free is not None:
            self._leave_free(self._free, output, failed)
            return
        leaf, was_unhooked = self._end_noted(), self.is_unhooked
        if was_unhooked and not self._rehook():
            return
        if leaf is None or failed:
            self._run.frame.lost = "a module failed in it"  # should the container go on after that
        else:
            self._leave_noted(leaf, output)
            if was_unhooked:
                self._prefetch_later(leaf, output)

    def abandon(self) -> None:
        """The forward is over, whatever runs."""
        self._end_noted()
        if self._free is not None:
            self._free.leave()

    # Noted --------------------------------------------------------------------------------------------------

    def _enter_noted(self, module: nn.Module, tensors: list[Tensor], args: Any, kwargs: Any) -> None:
        run, experience = self._run, self._experience
        is_known = id(module) in experience.written
        may_write = experience.written_by(module, tensors)
        is_likely = is_known or any(getattr(part, "inplace", False) for part in module.modules())
        noted = run.ledger.note_inputs(run.frame, args, kwargs, may_write, is_sure=is_known, is_likely=is_likely)
        snapshot = experience.watch.before(module)
        leaf = NotedLeaf(
            module,
            tensors,
            noted,
            snapshot,
            Surroundings.now(run.kinds),
            len(run.frame.looks),
            run.dear_outputs(module),
        )
        leaf.random = run.generators_if_noted()
        self._noted = leaf
        if experience.compilations is None:
            leaf.enter()
            if run.may_be_unhooked():
                self._unhook()
        else:
            self._enter_compiled(leaf)

    def _leave_noted(self, leaf: NotedLeaf, output: Any) -> None:
        frame = self._run.frame
        saves = range(leaf.first, len(frame.looks))
        call = frame.tape.note_call(leaf.callee, leaf.noted, output, leaf.where, saves)
        call.dear, call.hidden, call.exchanged = leaf.dear, leaf.hidden, leaf.exchanged
        frame.is_hooked = frame.is_hooked or is_hooked(leaf.module)
        self._run.note_draws(call, leaf.random)
        if frame.is_checked:
            outputs = tensors_in(output)
            call.sums = [checksum(one) for one in outputs]
            self._run.note_late_fillers(outputs)
        self._learn_written(leaf)
        self._learn_changes(leaf, call)
        if self._experience.compilations is not None:
            self._note_undivided(leaf, call.snapshot)
        for slot, copy in [] if call.snapshot is None else call.snapshot.copies:
            if slot.tensor is not None:
                self._run.ledger.readers.give_copy(slot.tensor, copy, frame)

    def _learn_written(self, leaf: NotedLeaf) -> None:
        """A module has run: now it is known to which of its inputs it writes."""
        ledger, written = self._run.ledger, leaf.inputs.written()
        self._experience.note_written(leaf.module, written)
        changed = [tensor for place, tensor in enumerate(leaf.inputs.tensors) if place in written]
        ledger.note_written(self._run.frame, changed)
        ledger.readers.uncopy(leaf.inputs.tensors)

    def _learn_changes(self, leaf: NotedLeaf, call: Call) -> None:
        """And what it changed of what it holds, and of what its arguments hide."""
        frame, name = self._run.frame, type(leaf.module).__name__
        if leaf.hidden is not None:
            frame.lost = frame.lost or leaf.hidden.complaint()
        call.snapshot = self._experience.watch.after(leaf.snapshot)
        if call.snapshot is None:
            frame.lost = f"a {name} changed its parameters, or a buffer for the first time"
        elif not call.snapshot.attributes.is_written:
            self._experience.note_harmless(leaf.module)

    def _end_noted(self) -> NotedLeaf | None:
        leaf, self._noted = self._noted, None
        if leaf is not None:
            leaf.leave()
        return leaf

    # Freely -------------------------------------------------------------------------------------------------

    def _may_run_freely(self, module: nn.Module) -> bool:
        """Whether all that a module saves stays where it is, and it changes nothing that others may need again.

        Then it runs as in a model that is not cut: to be asked about each tensor that is saved would cost time.
        """
        run = self._run
        if run.frame.is_repeated or run.frame.state.home != "device":
            return False
        if not run.may_be_unwatched() or not self._experience.is_harmless(module):
            return False
        return not run.ledger.readers.read_any(tensors_of(modules_of(module), "_buffers"))

    def _enter_free(self, module: nn.Module, tensors: list[Tensor]) -> None:
        """A module begins that nobody needs to watch, but for what the compiler must be able to compute again."""
        frame = self._run.frame
        snapshot = self._experience.watch.before(module) if frame.is_divided else None
        self._free = FreeLeaf(module, tensors, snapshot)
        if self._experience.compilations is not None:
            self._enter_compiled(self._free)
        self._unhook()

    def _leave_free(self, free: FreeLeaf, output: Any, failed: bool) -> None:
        """A module that nobody watched ends. Should it have written to something, it is watched from now on."""
        experience = self._experience
        free.leave()
        experience.note_written(free.module, free.inputs.written())
        if not self._rehook():
            return
        self._free = None
        if failed:
            return
        if free.snapshot is not None:
            self._note_undivided(free, experience.watch.after(free.snapshot))
        self._prefetch_later(free, output)

    def _prefetch_later(self, leaf: Leaf, output: Any) -> None:
        """Nobody is asked for what this module saved, so that its backward says nothing of what is needed next."""
        offloader = self._experience.offloader
        if offloader is not None:
            _prefetch_when_reached(output, leaf.inputs.tensors, offloader, self._run.frame.number)

    def _unhook(self) -> None:
        """What a module saves stays as it is, and nobody is asked for it: torch gives other objects where one is."""
        self._run.hooks.__exit__(None, None, None)
        self.is_unhooked = self._run.frame.ran_freely = True

    def _rehook(self) -> bool:
        """After it; false if it left hooks of somebody's, under which ours cannot be put any more: the run is over."""
        if hooks_on_saved() is not None:
            self._run.end(failed=True)
            return False
        self._run.hooks.__enter__()
        self.is_unhooked = False
        return True

    # Compiled -----------------------------------------------------------------------------------------------

    def _enter_compiled(self, leaf: Leaf) -> None:
        assert self._experience.compilations is not None
        frame = self._run.frame
        leaf.enter_compiled(self._experience.compilations, frame.state.dear if frame.is_divided else None, frame)

    def _note_undivided(self, leaf: Leaf, after: Snapshot | None) -> None:
        """A compiled module has run: may the compiler save its dear outputs alone next time?"""
        run, frame = self._run, self._run.frame
        frame.undivided = frame.undivided or leaf.why_undivided(after)
        if frame.is_divided and leaf.writes(after):
            self._experience.segments[run.ordinal].is_divided = False
            self._refuse_new_writes(leaf)

    def _refuse_new_writes(self, leaf: Leaf) -> None:
        raise RuntimeError(
            f"a {type(leaf.module).__name__} in the segment that ends at {self._run.frame.name!r} wrote to its inputs, "
            "or to what it holds, which it had not done before: its gradients would be wrong, as compiled dear outputs "
            "are computed again from these. The next forward takes that into account; save='inputs' does at once."
        )


def _prefetch_when_reached(output: Any, inputs: list[Tensor], offloader: Offloader, number: int) -> None:
    """When the backward comes to this output, ask for what it needs next: nobody else will say that it came.

    Inputs that are handed on belong to somebody else, to whom the backward comes far later.
    """

    def reached(_gradients: Any) -> None:
        with no_run():
            offloader.prefetch(number)

    passed_on = {tensor.grad_fn for tensor in inputs}
    for function in {tensor.grad_fn for tensor in tensors_in(output)} - passed_on:
        if function is not None:
            function.register_prehook(reached)
