"""The process groups through which messages are summed: one or several over all workers, or a hierarchy.

A hierarchy sums within each group of workers first, then between the groups' first workers, and hands the sums out
within each group. A machine of M then sends a message 2 (M - 1) / M times, in a ring of W workers 2 (W - 1) / W times;
and there are 2 (M - 1) steps between machines rather than 2 (W - 1).

No worker waits while backward runs: a message enters its next stage when gradients arrive after it has left the one
before. When that is differs from worker to worker, yet each process group must see its messages in the same order on
all of them. Therefore a process group serves one stage only, and no message enters a stage before those sent earlier.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fleetx.comm import beats, sharing, world
from fleetx.notices import tell_once

Stage = Callable[[Tensor], dist.Work | None]
"""Starts one part of an all-reduce; gives None where this worker has no part in it."""


@dataclass(frozen=True)
class GroupSettings:
    """How many process groups share the messages, and whether each is a hierarchy, as the strategy says it."""

    count: int = 1
    hierarchical: bool = False
    inner_ranks: int = 1  # of one group of a hierarchy; 1: all workers of one host


@dataclass(frozen=True)
class Groups:
    """The stages of each all-reduce, for those that share the messages round-robin.

    And who is in which group of a hierarchy, or why there is none though it was asked for.
    """

    stages: tuple[tuple[Stage, ...], ...]
    members: list[list[int]] | None = None
    flat_because: str = ""

    def described(self, messages: int) -> str:
        """What was applied to so many messages, for people; empty if nothing was asked for."""
        count = len(self.stages)
        said = f", over {count} process groups" if count > 1 else ""
        said += f" of which {messages} are used" if messages < count else ""
        if self.members is not None:
            sizes = " + ".join(str(len(ranks)) for ranks in self.members)
            said += f", within {len(self.members)} groups of {sizes} workers, then between them"
        return said + (f", not in a hierarchy: {self.flat_because}" if self.flat_because else "")


class Message:
    """A tensor on its way through the stages of an all-reduce."""

    def __init__(self, tensor: Tensor, stages: Sequence[Stage]) -> None:
        self._tensor = tensor
        self._stages = stages
        self._work = stages[0](tensor)
        self.entered = 1  # how many stages

    @property
    def has_left(self) -> bool:
        """Whether it has entered its last stage."""
        return self.entered == len(self._stages)

    @property
    def is_complete(self) -> bool:
        """Whether it is summed, as far as this worker can see without waiting."""
        return self.has_left and (self._work is None or self._work.is_completed())

    def follow(self) -> None:
        """Let the current stream wait for the stage at hand, which may be waited for again."""
        if self._work is not None:
            self._work.wait()

    def advance(self, furthest: int) -> None:
        """Enter further stages, at most `furthest` in all, without waiting for one that is not complete."""
        while self.entered < min(furthest, len(self._stages)) and (self._work is None or self._work.is_completed()):
            self.wait()
            self._work = self._stages[self.entered](self._tensor)
            self.entered += 1

    def wait(self) -> None:
        """Until the stage that was entered last is complete; raises what went wrong in it."""
        if self._work is not None:
            self._work.wait()
            self._work = None


class Pipeline:
    """The messages that are on their way, in the order in which all workers send them."""

    def __init__(self) -> None:
        self._waiting: list[Message] = []  # for a further stage

    def send(self, tensor: Tensor, stages: Sequence[Stage]) -> Message:
        """Let a message enter its first stage."""
        message = Message(tensor, stages)
        if not message.has_left:
            self._waiting.append(message)
        return message

    def advance(self) -> None:
        """Let messages enter further stages, none before one that was sent earlier."""
        if not self._waiting:
            return
        furthest = len(self._waiting[0]._stages)
        for message in self._waiting:
            message.advance(furthest)
            furthest = message.entered
            if furthest == 1:
                break
        self._waiting = [message for message in self._waiting if not message.has_left]

    def receive(self, message: Message) -> None:
        """Wait until a message is summed; those that were sent earlier must have been received."""
        while not message.has_left:
            message.wait()
            self.advance()
        message.wait()


# For each default group: when it is gone, nothing holds the others that belong to it.
_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[GroupSettings, torch.device], Groups]]"
_made = weakref.WeakKeyDictionary()


def groups_for(settings: GroupSettings, device: torch.device) -> Groups:
    """The groups for tensors on this device, made when they are first asked for: all workers must do so together."""
    default = dist.group.WORLD
    assert default is not None
    made = _made.setdefault(default, {})
    key = (settings, torch.device(device.type))
    if key not in made:
        made[key] = _make(settings, device)
    return made[key]


def _make(settings: GroupSettings, device: torch.device) -> Groups:
    members = _members(settings, device) if settings.hierarchical else ""
    if not isinstance(members, str):
        return Groups(tuple(_hierarchy(members) for _ in range(settings.count)), members)
    if members:
        tell_once("hierarchy", f"use_hierarchical_allreduce changes nothing here: {members}.")
    further = [_own([list(range(world.size()))]) for _ in range(settings.count - 1)]
    return Groups(tuple((_all_reduce(group),) for group in (None, *further)), flat_because=members)


def _members(settings: GroupSettings, device: torch.device) -> list[list[int]] | str:
    """The ranks of each group of the hierarchy, or why it would change nothing."""
    if backend_of(device) == "nccl":
        return "on GPUs NCCL itself chooses rings, trees or switches, within machines and between them"
    workers = range(world.size())
    if settings.inner_ranks > 1:
        members = [list(workers[start : start + settings.inner_ranks]) for start in workers[:: settings.inner_ranks]]
        one_group = f"the {len(workers)} workers are one group"
    else:
        hosts = sharing.host_names(device)
        members = [[rank for rank in workers if hosts[rank] == host] for host in dict.fromkeys(hosts)]
        one_group = (
            f"all workers are on one machine ({hosts[0]}); hierarchical_allreduce_inter_nranks = N makes groups of N "
            "workers"
        )
    if len(members) == 1:
        return one_group
    return "each machine has one worker" if len(members) == len(workers) else members


def backend_of(device: torch.device) -> str:
    """What carries tensors of this device between workers."""
    backends = dict(entry.split(":") for entry in dist.get_backend_config().split(","))
    return backends.get(device.type, "")


def _hierarchy(members: list[list[int]]) -> tuple[Stage, ...]:
    """Three stages, each with process groups of its own."""
    several = [ranks for ranks in members if len(ranks) > 1]
    first = next(ranks[0] for ranks in members if world.rank() in ranks)
    gathering, between, spreading = _own(several), _own([[ranks[0] for ranks in members]]), _own(several)
    return (
        _no_part if gathering is None else _reduce(gathering, first),
        _no_part if between is None else _all_reduce(between),
        _no_part if spreading is None else _broadcast(spreading, first),
    )


@beats.waiting()
def _own(members: list[list[int]]) -> dist.ProcessGroup | None:
    """Of process groups of these ranks the one that this worker is in. All workers make all of them."""
    made = [dist.new_group(ranks) for ranks in members]
    return next((group for group in made if isinstance(group, dist.ProcessGroup)), None)


def _no_part(_message: Tensor) -> None:
    """A stage of other workers."""


def _all_reduce(group: dist.ProcessGroup | None) -> Stage:
    @beats.waiting()  # NCCL connects the workers when the first message is sent
    def stage(message: Tensor) -> dist.Work | None:
        return dist.all_reduce(message, group=group, async_op=True)

    return stage


def _reduce(group: dist.ProcessGroup, to: int) -> Stage:
    @beats.waiting()
    def stage(message: Tensor) -> dist.Work | None:
        return dist.reduce(message, to, group=group, async_op=True)

    return stage


def _broadcast(group: dist.ProcessGroup, source: int) -> Stage:
    @beats.waiting()
    def stage(message: Tensor) -> dist.Work | None:
        return dist.broadcast(message, source, group=group, async_op=True)

    return stage
