"""Tables of README and docs, made from saved results: no figure is typed."""

import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import comm
from benchmarks.memory import is_proven

Result = dict[str, Any]
PLAIN = "plain, compiled as a whole"


def step_table(result: Result) -> str:
    """What the step costs beside a hand-written loop."""
    rows = [
        (
            name,
            f"{milliseconds:.2f}",
            _signed_percent(result["overhead"].get(name)),
            _signed(result["host_overhead_ms"].get(name)),
        )
        for name, milliseconds in result["median_ms"].items()
    ]
    return _table(("loop", "ms per update", "overhead", "host work more, ms"), rows) + _origin(result)


def reduce_table(result: Result) -> str:
    """Speed of the gradient reduction beside DistributedDataParallel's."""
    rows = [
        (name, case.removeprefix("k_steps="), f"{milliseconds:.1f}", _times(figures["speed_against_ddp"].get(name)))
        for case, figures in result["cases"].items()
        for name, milliseconds in figures["median_ms"].items()
    ]
    return _table(("loop", "micro-batches", "ms per update", "speed"), rows) + _origin(result)


def comm_table(result: Result) -> str:
    """Bytes and times of gradients between hosts beside DistributedDataParallel's."""
    return _table(comm.HEADS, comm.rows(result), texts=2) + _origin(result)


def loading_table(result: Result) -> str:
    """Speed of the loaders beside plain PyTorch ones."""
    rows = [
        (case, name, f"{speed:,.0f}", _times(figures["speed_of_ours"].get(name), ""))
        for case, figures in result["cases"].items()
        for name, speed in figures["samples_per_s"].items()
    ]
    return _table(("files", "loader", "samples per second", "FleetX is"), rows) + _origin(result)


def train_table(result: Result) -> str:
    """Training speed beside other libraries' models."""
    rows = [
        (case, name, f"{speed:,.0f}", _times(figures["speed_of_ours"].get(name), ""))
        for case, figures in result["cases"].items()
        for name, speed in figures["samples_per_s"].items()
    ]
    return _table(("model", "way", "samples per second", "FleetX is"), rows, texts=2) + _origin(result)


def optim_table(result: Result) -> str:
    """What a step of LARS and LAMB costs beside torch's fused optimizers."""
    rows = [
        (
            f"{case}, {figures['parameters'] / 1e6:.1f} M in {figures['tensors']} tensors",
            name,
            f"{milliseconds:.3f}",
            _times(figures["times_the_peer"].get(name)),
            f"{figures['host_ms'][name]:.3f}",
        )
        for case, families in result["cases"].items()
        for figures in families.values()
        for name, milliseconds in figures["median_ms"].items()
    ]
    return _table(("parameters", "step", "ms", "times the peer", "host, ms"), rows, texts=2) + _origin(result)


def memory_table(result: Result) -> str:
    """Batch against speed and memory, for each way to train."""
    rows = [
        (
            row["model"],
            row["name"],
            f"{row['batch']:,}",
            "" if row["cap_gib"] is None else f"{row['cap_gib']:.0f} GiB",
            f"{row['samples_per_s']:,.0f}",
            _share(row, _plain_of(row, result["rows"])),
            f"{row['reserved_gib']:.1f}",
            f"{row['host_reserved_gib']:.1f}" if "host_reserved_gib" in row else "",
            str(row.get("runs", 1)),
            row["taken"][:10],
        )
        for row in sorted(result["rows"], key=lambda row: (row["model"], row["batch"]))
        if is_proven(row)
    ]
    heads = ("model", "way", "batch", "limit", "samples/s", "of plain", "GiB", "GiB on the host", "processes", "day")
    # Rows may be of several runs; each notes when it was taken.
    return _table(heads, rows, texts=2) + _origin({**result, "command": "python -m benchmarks memory"})


def one_forward_table(result: Result) -> str:
    """The largest batches in one forward within the same limit: by hand, and with recompute and offload."""
    limited = [row for row in result["rows"] if row["cap_gib"] is not None and is_proven(row)]
    largest: dict[tuple[str, str], Result] = {}
    for row in sorted(limited, key=lambda row: row["batch"]):
        if not row["name"].startswith("guide"):
            largest[row["model"], row["method"]] = row
    ways = {
        "plain": "everything kept, the largest power of two",
        "torch checkpoint": "`torch.utils.checkpoint` around each block, the largest power of two",
        "transformers": "transformers' own model, the largest power of two",
        "transformers checkpoint": "transformers' own checkpointing, the largest power of two",
        "ours": "FleetX, recompute and offload",
    }
    # A comparison needs both sides.
    models = {model for model, method in largest if method == "ours" and largest[model, method]["runs"] > 1}
    rows = [
        (
            f"{model}, {row['cap_gib']:.0f} GiB",
            ways[method],
            f"{row['batch']:,}",
            f"{row['samples_per_s']:,.0f}",
            f"{row['reserved_gib']:.1f}",
            str(row.get("runs", 1)),
        )
        for (model, method), row in sorted(largest.items(), key=lambda item: (item[0][0], item[1]["batch"]))
        if model in models
    ]
    heads = ("model, limit", "way", "batch in one forward", "samples/s", "GiB", "processes")
    what = (
        "Compiled, bf16 autocast over fp32 weights; twice as many by hand run out of memory. Processes: in how many "
        "fresh ones it ran, all of which had enough memory"
    )
    return _table(heads, rows, texts=2) + _origin({**result, "what": what, "command": "python -m benchmarks memory"})


def by_hand_table(result: Result) -> str:
    """The planner against what a user tries by hand, in the same budget."""
    by_hand = ("everything kept", "its own checkpointing")
    rows = [
        (
            f"{name}, updates of {case['global_batch']:,}",
            f"{case['budget'] / 2**30:.0f} GiB",
            *(
                f"{case['ways'][way]['ran']['samples_per_s']:,.1f}"
                for way in ("everything kept", "its own checkpointing")
            ),
            f"{case['samples_per_s']:,.1f}",
            _times(case["of_best_by_hand"]),
            f"{case['ways']['fleetx.plan']['planning_seconds']:.0f} s",
        )
        for name, case in result["cases"].items()
        if not case["failed"]
    ]
    heads = ("model", "budget", *by_hand, "FleetX, samples/s", "FleetX is", "planned in")
    return _table(heads, rows) + _origin({**result, "command": "python -m benchmarks by-hand"})


def libraries_table(result: Result) -> str:
    """A step of LARS and LAMB against timm's, and against the fused optimizer of torch that moves as much memory."""
    rows = []
    for case, families in result["cases"].items():
        for figures in families.values():
            ms = figures["median_ms"]
            (torchs,), (timms,), (ours,) = (
                [name for name in ms if name.startswith(start) and name.endswith(end)]
                for start, end in (("torch", "fused"), ("timm", ""), ("FleetX", "fused"))
            )
            rows.append(
                (
                    f"{ours.split()[1].rstrip(',')}, {case} ({figures['parameters'] / 1e6:.0f} M parameters)",
                    f"{ms[ours]:.2f} ms",
                    f"{ms[timms]:.1f} ms",
                    f"{ms[timms] / ms[ours]:.0f}×",
                    f"{ms[torchs]:.2f} ms ({torchs.removeprefix('torch ').removesuffix(', fused')})",
                )
            )
    heads = ("one step", "FleetX", "timm", "FleetX is", "torch's fused optimizer of this kind")
    return _table(heads, rows) + _origin({**result, "what": "Medians of one optimizer step in fp32"})


def _plain_of(row: Result, rows: Sequence[Result]) -> float | None:
    """The speed of plain training with the row's batch, or the best there is."""
    plain = [r for r in rows if r["model"] == row["model"] and r["name"] == PLAIN and "samples_per_s" in r]
    same = [r["samples_per_s"] for r in plain if r["batch"] == row["batch"]]
    return max(same or [r["samples_per_s"] for r in plain], default=None)


def _share(row: Result, plain: float | None) -> str:
    is_ours = not row["name"].startswith(("plain", "guide"))
    return f"{row['samples_per_s'] / plain:.0%}" if is_ours and plain and "samples_per_s" in row else ""


def plan_table(result: Result) -> str:
    """The planner's predictions beside what was measured, and its plans beside those made by hand and at random."""
    cases = {
        name: case
        for name, case in result["cases"].items()
        if case.get("complete") and "plan" in case and not _was_limited(case)
    }
    rows = [
        (name, f"{case['micro_batch']:,} × {case['k_steps']}", *_outcome(case), case["taken"][:10])
        for name, case in sorted(cases.items(), key=lambda item: (item[1]["case"], item[1]["memory"]))
    ]
    heads = (
        "model",
        "micro-batch × k",
        "takes, GiB",
        "predicted",
        "samples/s",
        "of the best by hand",
        "which is",
        "day",
    )
    # It is measured in several goes, each with a command of its own.
    return _table(heads, rows) + _origin({**result, "command": "python -m benchmarks plan"})


def _was_limited(case: Result) -> bool:
    """Whether a run of the chosen plan stayed within the budget only because the allocator was limited to it."""
    run = case["runs"]["chosen"]
    return any(one.get("limited", 0) > case["memory"] for one in (run, *run.get("again", [])))


def _outcome(case: Result) -> tuple[str, ...]:
    """What a plan took, beside the prediction and the best rival."""
    if "peak" not in case:
        return "ran out of memory", "", "", "", ""
    return (
        f"{case['peak'] / 2**30:.1f}",
        _signed_percent(case["peak_error"]),
        f"{case['samples_per_s']:,.0f}",
        _times(case["of_best_rival"], ""),
        case["best_rival"] or "",
    )


def digits_rows(result: Result) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and rows of the table of digits: each run over all seeds."""
    rows: list[tuple[str, ...]] = []
    for name, runs in result["runs"].items():
        accuracies = [run["accuracy"] for run in runs]
        spread = f"{min(accuracies):.1%} to {max(accuracies):.1%}"
        rows.append((name, f"{statistics.mean(accuracies):.2%}", spread, f"{statistics.stdev(accuracies) * 100:.2f}"))
    return ("run", "test accuracy, mean", "lowest to highest", "standard deviation, points"), rows


def digits_table(result: Result) -> str:
    """The runs of `make run`, with several seeds."""
    seeds = next(iter(result["runs"].values()))
    tested = sum(run["test_digits"] for run in seeds)
    what = (
        f"{result['epochs']} epochs; {len(seeds)} seeds, each tested on other digits, {tested:,} in all; SGD has "
        f"momentum; FleetX: {result['workers']} workers, gradient merge, bf16"
    )
    return _table(*digits_rows(result)) + _origin({"what": what, **result})


def chaos_outcome(scenario: Result) -> tuple[str, str, str]:
    """Of one scenario: how many trials of how many came out well, the 95th percentile in seconds, the minutes."""
    trials = [trial for trial in scenario["trials"] if "skipped" not in trial]
    seconds = [trial["seconds"] for trial in trials if "seconds" in trial]
    slow = f"{statistics.quantiles(seconds, n=20, method='inclusive')[-1]:.1f}" if len(seconds) > 1 else ""
    good = sum(trial["ok"] for trial in trials)
    return f"{good:,} of {len(trials):,}", slow, f"{scenario['seconds'] / 60:.1f}"


def chaos_table(result: Result) -> str:
    """What came out of disturbed jobs, and how long the whole suite takes."""
    rows = [(f"`{name}`", *chaos_outcome(scenario)) for name, scenario in result["scenarios"].items()]
    minutes = sum(scenario["seconds"] for scenario in result["scenarios"].values()) / 60
    rows.append(("all", "", "", f"{minutes:.1f}"))
    heads = ("scenario", "came out as it should", "95th percentile, s", "took, min")
    # Scenarios may have been played at different times: there is no one command.
    return _table(heads, rows) + _origin({**result, "what": result["what"].rstrip("."), "command": "make chaos"})


TABLES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "digits": ("digits/seeds.json", digits_table),
    "step": ("step.json", step_table),
    "reduce": ("reduce.json", reduce_table),
    "comm": ("comm.json", comm_table),
    "loading": ("loading.json", loading_table),
    "train": ("train.json", train_table),
    "memory": ("memory.json", memory_table),
    "optim": ("optim.json", optim_table),
    "plan": ("plan.json", plan_table),
    "one-forward": ("memory.json", one_forward_table),
    "by-hand": ("by-hand.json", by_hand_table),
    "libraries": ("optim.json", libraries_table),
    "chaos": ("chaos.json", chaos_table),
}


_BEGIN = "<!-- table: "


def fill_in(text: str, results: Path) -> str:
    """The text with everything between `<!-- table: name -->` and `<!-- end -->` made anew from the results.

    What has not been measured stays as it is: see `unmeasured`.
    """

    missing = unmeasured(text, results)

    def table(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in TABLES:
            raise ValueError(f"there is no table {name!r}; there are {', '.join(TABLES)}.")
        if _BEGIN in match.group(2):
            raise ValueError(f"the table {name!r} has no <!-- end --> before the next one begins: add it.")
        file, draw = TABLES[name]
        if name in missing:
            return match.group()
        try:
            result = json.loads((results / file).read_text(encoding="utf-8"))
            return f"<!-- table: {name} -->\n{draw(result)}\n<!-- end -->"
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{file} does not hold what the table {name!r} shows ({what}): measure it anew."
            ) from error

    filled, made = re.subn(r"<!-- table: (\S+) -->(.*?)<!-- end -->", table, text, flags=re.DOTALL)
    if made < text.count(_BEGIN):
        raise ValueError("the last table of the page has no <!-- end -->: add it.")
    return filled


def unmeasured(text: str, results: Path) -> list[str]:
    """Tables of the text whose results are not there."""
    return [name for name, (file, _) in TABLES.items() if f"{_BEGIN}{name} " in text and not (results / file).exists()]


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, texts: int = 1) -> str:
    """A table whose first columns are `texts`, and the others numbers."""
    rule = (*["---"] * texts, *["---:"] * (len(heads) - texts))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, rule, *rows))


def _origin(result: Result) -> str:
    machine, versions = result["machine"], result["versions"]
    device = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
    return f"\n\n{result['what']}. {device}; torch {versions['torch']}; `{result['command']}`."


def _signed_percent(share: float | None) -> str:
    return "" if share is None else f"{share:+.1%}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}"


def _times(ratio: float | None, without: str = "1") -> str:
    return without if ratio is None else f"{ratio:.2f}×"
