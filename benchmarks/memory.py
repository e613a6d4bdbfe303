"""Batch against speed: what recompute and offload cost, and how large a batch they let in.

All rows of a model do the same arithmetic on the same data: bf16 autocast over fp32 weights, the attention mask, both
losses, a fused optimizer. Rows run one after the other in one process, since most fill the memory; the reference is
measured again at the end, so that a machine that slowed down is seen. A GPU that works for seconds lowers its clock, so
every row runs for a while before it is timed, long steps and short ones alike.
"""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.train import Case, make, optimizer_for, placed, synthetic_batch
from fleetx import memory
from fleetx.memory import Segment
from fleetx.planner.allocator import let_segments_grow

GIB = 2**30
WHAT = (
    "One training update in bf16 autocast over fp32 weights (the guide's first rows: fp32) with a fused optimizer; "
    "BERT-large at sequence 512 with mask and both losses; ResNet-50 at 224 pixels, channels last; capped: the "
    "allocator may take that much"
)
Method = Literal["plain", "ours", "torch checkpoint", "torch budget"]
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


def layers(count: int, *states: tuple[int, dict[str, Any]]) -> tuple[Segment, ...]:
    """The encoder's layers with their states: (how many, state), from the first layer on."""
    ways = itertools.chain.from_iterable([way] * number for number, way in states)
    return tuple(Segment(f"bert.encoder.layer.{index}", **way) for index, way in zip(range(count), ways, strict=True))


def measure(case: Case, row: Row, device: str, *, warm_s: float = 4.0, timed_s: float = 8.0) -> dict[str, Any]:
    """Samples per second and peak memory of a row, timed for so long; or why it could not run."""
    free()
    let_segments_grow(torch.device(device))
    if device == "cuda" and row.cap is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(row.cap * GIB / total, 1.0))
    left = {"left_by_earlier_rows_gib": torch.cuda.memory_reserved() / GIB} if device == "cuda" else {}
    try:
        return {**_measure(case, row, device, warm_s, timed_s), **left}
    except (torch.OutOfMemoryError, MemoryError) as error:
        return {"failed": " ".join([str(error).split(".")[0] + ".", *getattr(error, "__notes__", [])]), **left}
    finally:
        if device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)


def _measure(case: Case, row: Row, device: str, warm_s: float, timed_s: float) -> dict[str, Any]:
    torch.manual_seed(0)
    model = placed(make(case), case, device)
    optimizer = optimizer_for(case, model.parameters())
    batch = synthetic_batch(case, device, row.batch)
    applied = _prepare(model, row)
    step = _stepper(model, optimizer, batch, row, device)
    with _budget(row):  # compiled when it first runs
        ready = sum(_timed(step, 0.0, at_least=2))
    _timed(step, warm_s)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before, retried = applied.statistics() if applied else {}, _retries(device)
    seconds = _timed(step, timed_s, at_least=5 if timed_s else 1)
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
            losses = torch.stack(list(model(**batch).values()))
        losses.sum().backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def _prepare(model: nn.Module, row: Row) -> memory.Applied | None:
    """Put the row's method on the model."""
    if row.method == "ours":
        return memory.apply(model, row.segments, compile=row.compile)
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
SLOWLY: dict[str, Any] = {"home": "host", "lag": 7, "lead": 7}


def bert_rows(count: int = 24, scale: float = 1.0) -> list[Row]:
    """The rows for BERT-large; `scale` makes batches smaller, to try the script on a small machine."""

    def size(batch: int) -> int:
        return max(1, round(batch * scale))

    def share(of_24: int) -> int:
        return round(count * of_24 / 24)

    def mixed(few: int, *, away: int = 0) -> tuple[Segment, ...]:
        """Few dear outputs saved in `few` layers, many in the others; `away` of them, seven apart, on the host."""
        ways = [FEW if number % 2 and number // 2 < few else MANY for number in range(count)]
        return layers(
            count, *((1, way | SLOWLY if n % 7 == 0 and n // 7 < away else way) for n, way in enumerate(ways))
        )

    def spread(many: int) -> tuple[Segment, ...]:
        """Many dear outputs saved in so many layers, evenly apart, and few in the others."""
        ways = [MANY if (n + 1) * many // count > n * many // count else FEW for n in range(count)]
        return layers(count, *((1, way) for way in ways))

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
    return [
        Row("plain, compiled as a whole", size(64)),
        Row("plain, compiled layers", size(64), "ours", all_kept),
        Row("plain, compiled as a whole", size(130)),
        Row("dear saved, many or few", size(130), "ours", mixed(share(9)), cap=32.0),
        Row("dear saved, many or few, partly on the host", size(130), "ours", mixed(share(5), away=3), cap=32.0),
        Row("recompute of half layers, offload", size(1200), "ours", halves(6), cap=32.0),
        Row("torch checkpoint", size(192), "torch checkpoint", all_kept),
        Row("recompute", size(192), "ours", all_again),
        Row("recompute, offload", size(192), "ours", all_away),
        Row("torch checkpoint", size(64), "torch checkpoint", all_kept),
        Row("recompute", size(64), "ours", all_again),
        Row("few dear saved", size(64), "ours", layers(count, (count, FEW))),
        # As much memory as torch takes with its budgets, below, or less.
        Row("dear saved, many in a quarter", size(64), "ours", spread(share(6))),
        Row("dear saved, many in almost half", size(64), "ours", spread(share(11))),
        Row("many dear saved", size(64), "ours", layers(count, (count, MANY))),
        *(Row(f"torch budget {b}", size(64), "torch budget", all_kept, budget=b) for b in (0.5, 0.3, 0.2)),
        Row("guide: fp32", size(14), low_precision=False, **guide),
        Row("guide: fp32, recompute", size(130), "ours", all_again, low_precision=False, **guide),
        Row("guide: recompute, mixed precision", size(145), "ours", all_again, **guide),
        Row("plain, compiled layers, again", size(64), "ours", all_kept),
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
        Row("plain, compiled as a whole", size(1024)),
        Row("torch checkpoint", size(1024), "torch checkpoint", again),
        Row("recompute", size(1024), "ours", again),
        Row("recompute", size(1800), "ours", again, cap=32.0),
        Row("recompute, offload", size(3000), "ours", away, cap=32.0),
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


def merged(old: Sequence[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with a new one, in place of an earlier one of the same kind."""
    return [row for row in old if _kind(row) != _kind(new)] + [new]


def current(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that would be measured today: an earlier version may have had others."""
    kinds = {_kind(described(case, row, {})) for case, row in all_rows()}
    return [row for row in rows if _kind(row) in kinds]


def _kind(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["name"], row["batch"], row["cap_gib"], tuple(row["states"])
