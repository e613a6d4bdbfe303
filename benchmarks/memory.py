"""Batch against speed: what recompute and offload cost, and how large a batch they let in.

All rows of a model do the same arithmetic on the same data: bf16 autocast over fp32 weights, the attention mask, both
losses, a fused optimizer. Each row runs in a fresh process; one that comes close to the memory it may take runs five
times, and all runs must fit. A row of the largest power of two by hand also shows that twice as many do not fit. A GPU
that works for seconds lowers its clock, so every row runs for a while before it is timed.
"""

import gc
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.train import Case, make, optimizer_for, placed, synthetic_batch, transformers_bert, transformers_inputs
from fleetx import memory
from fleetx.memory import Segment
from fleetx.planner.allocator import let_segments_grow

GIB = 2**30
WHAT = (
    "One training update in bf16 autocast over fp32 weights (the guide's first rows: fp32) with a fused optimizer; "
    "BERT-large at sequence 512 with mask and both losses; ResNet-50 at 224 pixels, channels last; limit: the "
    "allocator may take that much"
)
Method = Literal["plain", "ours", "torch checkpoint", "torch budget", "transformers", "transformers checkpoint"]
RUNS, CLOSE = 5, 0.85  # fresh processes for rows that reserve more than this share of what they may take
FEW_DEAR = ("attention", "narrow_matmul")
MANY_DEAR = ("attention", "matmul")


@dataclass(frozen=True)
class Row:
    """One way to train with one batch."""

    name: str
    batch: int
    method: Method = "plain"
    segments: tuple[Segment, ...] = ()
    compile: bool = True
    low_precision: bool = True
    cap: float | None = None  # GiB that the allocator may have
    budget: float = 1.0  # of torch's activation memory budget
    is_largest: bool = False  # power of two that fits: twice as many must not


def layers(count: int, *states: tuple[int, dict[str, Any]]) -> tuple[Segment, ...]:
    """The encoder's layers with their states: (how many, state), from the first layer on."""
    ways = itertools.chain.from_iterable([way] * number for number, way in states)
    return tuple(Segment(f"bert.encoder.layer.{index}", **way) for index, way in zip(range(count), ways, strict=True))


def measure(number: int) -> dict[str, Any]:
    """Samples per second and peak memory of a row in a fresh process, and whether it passes again; or why it failed."""
    _, row = all_rows()[number]
    first = _run([_started(number)])[0]
    again: list[dict[str, Any]] = []
    if row.cap is not None and first.get("reserved_gib", 0.0) > CLOSE * row.cap:
        for _ in range((RUNS - 1) // 2):  # two at a time: they show whether memory is enough, not how fast they are
            again += _run([_started(number, "passes"), _started(number, "passes")])
    if row.is_largest:
        first["twice_as_many"] = _run([_started(number, "twice")])[0].get("failed", "fits")
    failed = [run["failed"] for run in [first, *again] if "failed" in run]
    if failed:
        return {"runs": 1 + len(again), "failures": len(failed), "failed": failed[0]}
    return {**first, "runs": 1 + len(again), "reserved_again_gib": [run["reserved_gib"] for run in again]}


def _started(number: int, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.memory", str(number), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _run(processes: Sequence[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """What came out of each, once all have ended."""
    printed = [process.communicate()[0] for process in processes]
    return [
        {"failed": f"the process ended with {process.returncode}"}
        if process.returncode
        else json.loads(text.splitlines()[-1])
        for process, text in zip(processes, printed, strict=True)
    ]


def measure_here(case: Case, row: Row, device: str, *, warm_s: float = 2.0, timed_s: float = 4.0) -> dict[str, Any]:
    """One run of a row in this process, timed for so long; or why it could not run."""
    let_segments_grow(torch.device(device))
    if device == "cuda" and row.cap is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(row.cap * GIB / total, 1.0))
    try:
        return _measure(case, row, device, warm_s, timed_s)
    except (torch.OutOfMemoryError, MemoryError) as error:
        return {"failed": _reason(error)}


def _reason(error: BaseException) -> str:
    return " ".join([str(error).split(" GiB has a total")[0], *getattr(error, "__notes__", [])])


def _measure(case: Case, row: Row, device: str, warm_s: float, timed_s: float) -> dict[str, Any]:
    torch.manual_seed(0)
    batch = synthetic_batch(case, device, row.batch)
    if row.method.startswith("transformers"):
        model, batch = placed(transformers_bert(case), case, device), transformers_inputs(batch)
    else:
        model = placed(make(case), case, device)
    optimizer = optimizer_for(case, model.parameters())
    applied = _prepare(model, row)
    step = _stepper(model, optimizer, batch, row, device)
    with _budget(row):  # compiled when it first runs
        ready = sum(_timed(step, 0.0, at_least=2))
    _timed(step, warm_s)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before, retried = applied.statistics() if applied else {}, _retries(device)
    seconds = _timed(step, timed_s, at_least=5 if timed_s else 2)
    after = applied.statistics() if applied else {}
    return {
        "samples_per_s": row.batch / statistics.median(seconds),
        "seconds": seconds,
        "seconds_to_be_ready": ready,
        "allocator_retries": (_retries(device) - retried) / len(seconds),
        **_peak(device),
        **_moved(before, after, len(seconds)),
    }


def _timed(step: Callable[[], None], in_all: float, at_least: int = 0) -> list[float]:
    """The seconds of steps, until they have taken so long together."""
    seconds: list[float] = []
    while len(seconds) < at_least or sum(seconds) < in_all:
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return seconds


def _stepper(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], row: Row, device: str
) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16) if row.low_precision else nullcontext():
            loss = _loss(model(**batch))
        loss.backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def _loss(output: Any) -> Tensor:
    """The sum of both losses; transformers' models add them up themselves."""
    return output.loss if hasattr(output, "loss") else torch.stack(list(output.values())).sum()


def _prepare(model: Any, row: Row) -> memory.Applied | None:
    """Put the row's method on the model."""
    if row.method == "ours":
        return memory.apply(model, row.segments, compile=row.compile)
    if row.method.startswith("transformers"):
        if row.method.endswith("checkpoint"):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return None
    for name in [segment.until for segment in row.segments]:
        layer = model.get_submodule(name)
        if row.compile:
            layer.compile()
        if row.method == "torch checkpoint":
            layer.forward = _checkpointed(layer)
    if not row.segments and row.compile:
        model.compile()
    return None


def _checkpointed(layer: nn.Module) -> Callable[..., Any]:
    """What a user of torch.utils.checkpoint writes around a compiled layer."""
    run = torch.compile(type(layer).forward)
    layer._compiled_call_impl = None
    return lambda *args: checkpoint(run, layer, *args, use_reentrant=False)


def _budget(row: Row) -> Any:
    from torch._functorch import config

    return config.patch(activation_memory_budget=row.budget)


def _retries(device: str) -> int:
    """How often the allocator had to wait for the device and give memory back before it found room."""
    return torch.cuda.memory_stats()["num_alloc_retries"] if device == "cuda" else 0


def _peak(device: str) -> dict[str, float]:
    if device != "cuda":
        return {}
    return {
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
    }


def _moved(before: dict[str, Any], after: dict[str, Any], rounds: int) -> dict[str, float]:
    if not after.get("bytes_to_host"):
        return {}
    return {
        "gib_to_host": (after["bytes_to_host"] - before["bytes_to_host"]) / rounds / GIB,
        "exposed_ms": (after["exposed_ms"] - before["exposed_ms"]) / rounds,
        "host_reserved_gib": after["host_reserved"] / GIB,
        "host_peak_gib": after["host_peak"] / GIB,
    }


def free() -> None:
    """Give back what the last row held, compiled code included."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


KEPT: dict[str, Any] = {"save": "everything"}
AGAIN: dict[str, Any] = {"save": "inputs"}
FEW: dict[str, Any] = {"save": "dear", "dear": FEW_DEAR}
MANY: dict[str, Any] = {"save": "dear", "dear": MANY_DEAR}
ON_HOST: dict[str, Any] = {"home": "host"}


def bert_rows(count: int = 24, scale: float = 1.0) -> list[Row]:
    """The rows for BERT-large; `scale` makes batches smaller, to try the script on a small machine."""

    def size(batch: int) -> int:
        return max(1, round(batch * scale))

    def halves(every: int) -> tuple[Segment, ...]:
        """Cut within layers too; all inputs on the host but those of every n-th second half.

        The link has a little more to do than there is time for. More could stay as far as bytes count, but blocks are
        so large here that the allocator would not find room for one without giving others back, and waits each time.
        """
        segments = []
        for number, layer in enumerate(f"bert.encoder.layer.{number}" for number in range(count)):
            stays = number % every == every - 1
            segments += [
                Segment(f"{layer}.attention", home="host", lag=3),
                Segment(layer) if stays else Segment(layer, home="host", lag=3),
            ]
        return tuple(segments)

    all_kept, all_again, all_away = (layers(count, (count, way)) for way in (KEPT, AGAIN, AGAIN | ON_HOST))
    guide: dict[str, Any] = {"compile": False, "cap": 32.0}
    by_hand: dict[str, Any] = {"cap": 32.0, "is_largest": True}
    return [
        Row("recompute of half layers, offload", size(1200), "ours", halves(6), cap=32.0),
        Row("torch checkpoint", size(256), "torch checkpoint", all_kept, **by_hand),
        Row("plain, compiled as a whole", size(64), **by_hand),
        Row("transformers, plain", size(32), "transformers", compile=False, **by_hand),
        Row("transformers, its checkpointing", size(128), "transformers checkpoint", compile=False, **by_hand),
        Row("plain, compiled as a whole", size(64)),
        Row("plain, compiled layers", size(64), "ours", all_kept),
        Row("torch checkpoint", size(192), "torch checkpoint", all_kept),
        Row("recompute", size(192), "ours", all_again),
        Row("recompute, offload", size(192), "ours", all_away),
        Row("torch checkpoint", size(64), "torch checkpoint", all_kept),
        Row("recompute", size(64), "ours", all_again),
        Row("few dear saved", size(64), "ours", layers(count, (count, FEW))),
        Row("many dear saved", size(64), "ours", layers(count, (count, MANY))),
        *(Row(f"torch budget {b}", size(64), "torch budget", all_kept, budget=b) for b in (0.5, 0.3, 0.2)),
        Row("guide: fp32", size(14), low_precision=False, **guide),
        Row("guide: fp32, recompute", size(130), "ours", all_again, low_precision=False, **guide),
        Row("guide: recompute, mixed precision", size(145), "ours", all_again, **guide),
    ]


def resnet_rows(scale: float = 1.0) -> list[Row]:
    """The rows for ResNet-50: blocks computed again, the largest inputs on the host."""

    def size(batch: int) -> int:
        return max(1, round(batch * scale))

    blocks = _resnet_blocks()
    again = tuple(Segment(name) for name in blocks)
    # Blocks are short and inputs of the first ones large. That of layer1.1 must have left before layer2.0, whose
    # forward takes most, and comes back when it is needed: beside the backward of layer1.2 there is no room for it.
    moved: dict[str, dict[str, Any]] = {"layer1.1": {"lead": 0}, "layer2.1": {"lag": 6, "lead": 3}}
    away = tuple(
        Segment(name, home="host", **moved[name]) if name in moved else Segment(name)
        for name in (":max_pool2d", *blocks)
    )
    return [
        Row("recompute, offload", size(2600), "ours", away, cap=32.0),
        Row("plain, compiled as a whole", size(512), cap=32.0, is_largest=True),
        Row("torch checkpoint", size(1024), "torch checkpoint", again, cap=32.0, is_largest=True),
        Row("plain, compiled as a whole", size(1024)),
        Row("torch checkpoint", size(1024), "torch checkpoint", again),
        Row("recompute", size(1024), "ours", again),
        Row("recompute", size(1800), "ours", again, cap=32.0),
    ]


def _resnet_blocks() -> list[str]:
    with torch.device("meta"):
        return make(Case("resnet50", 1)).checkpoints


def all_rows() -> list[tuple[Case, Row]]:
    """Everything that is measured on a GPU."""
    bert, resnet = Case("bert_large", 64), Case("resnet50", 1024)
    return [(resnet, row) for row in resnet_rows()] + [(bert, row) for row in bert_rows()]


def described(case: Case, row: Row, figures: dict[str, Any]) -> dict[str, Any]:
    """What a row was, and what came out."""
    return {
        "taken": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": case.model,
        "name": row.name,
        "batch": row.batch,
        "cap_gib": row.cap,
        "method": row.method,
        "states": _folded(row.segments) if row.method == "ours" else [],
        **figures,
    }


def _folded(segments: Sequence[Segment]) -> list[str]:
    """The states of segments, equal neighbours in one line."""
    lines = []
    for state, group in itertools.groupby(segments, key=lambda s: (s.save, s.home, s.dear if s.save == "dear" else ())):
        names = [segment.until for segment in group]
        lines.append(f"{names[0]} … {names[-1]}: {state[0]} {'+'.join(state[2])} on the {state[1]}".replace("  ", " "))
    return lines


def is_proven(row: dict[str, Any]) -> bool:
    """Whether a row may be published: one that is close to its limit must have passed several times."""
    is_close = row["cap_gib"] is not None and row.get("reserved_gib", 0.0) > CLOSE * row["cap_gib"]
    return "failed" not in row and (not is_close or row.get("runs", 1) >= RUNS)


def merged(old: Sequence[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with a new one, in place of an earlier one of the same kind."""
    return [row for row in old if _kind(row) != _kind(new)] + [new]


def current(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that would be measured today: an earlier version may have had others."""
    kinds = {_kind(described(case, row, {})) for case, row in all_rows()}
    return [row for row in rows if _kind(row) in kinds]


def _kind(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["name"], row["batch"], row["cap_gib"], tuple(row["states"])


def main(number: str, *arguments: str) -> None:
    """Run a row in this process; what came out goes to the last line of standard output."""
    case, row = all_rows()[int(number)]
    if "twice" in arguments:
        row = replace(row, batch=2 * row.batch)
    times = {"warm_s": 0.0, "timed_s": 0.0} if arguments else {}
    print(json.dumps(measure_here(case, row, "cuda", **times)))


if __name__ == "__main__":
    main(*sys.argv[1:])
