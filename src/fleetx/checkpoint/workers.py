"""How the workers of a job agree on what they save and load: short JSON messages, on a channel of their own.

A save may run beside training, whose messages must not meet these. So there is a process group for them alone.
"""

import json
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fleetx.checkpoint.errors import CheckpointError
from fleetx.comm import beats, world


class Workers:
    """All workers of the job. Each method must be called by all of them, in the same order."""

    def __init__(self, timeout: float) -> None:
        self.rank = world.rank()
        self.size = world.size()
        self._timeout = timeout
        self._group: Any = None
        self._asked: float | None = None
        if self.size > 1:
            with beats.waiting():
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def exchange(self, value: Any) -> list[Any]:
        """What each worker says, in the order of their numbers."""
        text = json.dumps(value).encode("ascii")
        if self._group is None:
            return [json.loads(text)]
        self._asked = time.monotonic()
        try:
            return [json.loads(message) for message in self._all_gather(text)]
        except RuntimeError as error:
            raise CheckpointError(
                f"all workers must take part in a save or a resume, and worker {self.rank} heard nothing of the others "
                f"within {self._timeout:g} s, or one of them is gone ({_said(error)}). Call save() and resume() on "
                "every worker, not on the first alone."
            ) from error
        finally:
            self._asked = None

    def waited(self) -> float:
        """For how many seconds this worker has been waiting for the others; another thread may ask."""
        asked = self._asked
        return 0.0 if asked is None else time.monotonic() - asked

    def each(self, action: Callable[[], Any]) -> list[Any]:
        """Let every worker act; gives all results, or raises on all workers if one failed."""
        answer, failure = _try(action)
        try:
            answers = self.exchange(answer)
        finally:
            if failure is not None:
                raise failure
        failed = [f"worker {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
        if failed:
            raise CheckpointError("; ".join(failed))
        return [answer["value"] for answer in answers]

    def first(self, action: Callable[[], Any]) -> Any:
        """Let the first worker act for all; its result or its error is everybody's."""
        return self.each(action if self.rank == 0 else lambda: None)[0]

    @beats.waiting()
    def _all_gather(self, text: bytes) -> list[bytes]:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(text)]), group=self._group)
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        messages = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(messages, padded, group=self._group)
        return [message[: int(length)].numpy().tobytes() for message, length in zip(messages, lengths, strict=True)]


def _said(error: RuntimeError) -> str:
    """The first sentence of gloo's message, without the place in its source."""
    return re.sub(r"^\[[^]]*\] *", "", str(error)).split(". ")[0].strip() or "no reason given"


def _try(action: Callable[[], Any]) -> tuple[dict[str, Any], Exception | None]:
    try:
        return {"value": action()}, None
    except Exception as error:
        return {"error": str(error) or type(error).__name__}, error
