"""The benchmarks: `python -m benchmarks NAME`, from a checkout."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

RESULTS = Path("benchmarks/results")

app = typer.Typer(
    name="python -m benchmarks",
    help="Measure FleetX against other libraries on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command("step")
def step_command(
    out: Annotated[Path, typer.Option(help="Where results are saved.")] = RESULTS,
    processes: Annotated[int, typer.Option(min=1, help="Fresh processes to measure in; the median counts.")] = 7,
) -> None:
    """What the step itself costs, against a hand-written loop."""
    from benchmarks import step
    from fleetx.results import save_result

    command = [sys.executable, "-m", "benchmarks.step"]
    runs = [json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout) for _ in range(processes)]
    figures = step.summarise(runs)
    path = save_result("step", figures, out)
    rows = [
        (name, f"{ms:.2f}", _percent(figures["overhead"].get(name)), _ms(figures["host_overhead_ms"].get(name)))
        for name, ms in figures["median_ms"].items()
    ]
    _show(f"One update: {figures['what']}", ("loop", "ms", "overhead", "host work more, ms"), rows, path)


@app.command("reduce")
def reduce_command(
    out: Annotated[Path, typer.Option(help="Where results are saved.")] = RESULTS,
    jobs: Annotated[int, typer.Option(min=1, help="Jobs to measure in; the median counts.")] = 7,
    workers: Annotated[int, typer.Option(min=2, help="Worker processes of a job.")] = 2,
) -> None:
    """Gradient reduction, against DistributedDataParallel."""
    from benchmarks import reduce
    from fleetx.launch.devices import on_host
    from fleetx.launch.run import launch
    from fleetx.results import save_result

    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(jobs):
            file = Path(folder, "figures.json")
            if code := launch(["-m", "benchmarks.reduce", str(file)], workers=workers, environment=on_host(workers)):
                sys.exit(code)
            runs.append(json.loads(file.read_text(encoding="utf-8")))
    figures = reduce.summarise(runs, workers)
    path = save_result("reduce", figures, out)
    rows = [
        (f"{name}, {case}", f"{ms:.2f}", f"{result['speed_against_ddp'].get(name, 1.0):.3f}×")
        for case, result in figures["cases"].items()
        for name, ms in result["median_ms"].items()
    ]
    _show(f"One update: {figures['what']}", ("loop", "ms", "speed"), rows, path)


@app.command("comm")
def comm_command(
    out: Annotated[Path, typer.Option(help="Where results are saved.")] = RESULTS,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all ways take turns.")] = 7,
    tiny: Annotated[bool, typer.Option(help="Small gradients, for a look at the command on a busy machine.")] = False,
) -> None:
    """Gradients between two hosts (network namespaces), at two link speeds, against DistributedDataParallel."""
    from benchmarks import comm
    from fleetx.results import save_result
    from tests.launch import hosts

    if reason := hosts.why_not():
        raise typer.BadParameter(f"python -m benchmarks comm makes hosts of network namespaces: {reason}.")
    unlimited = hosts.why_no_limit()
    if unlimited:
        print(f"links are not limited: {unlimited}.")
    size = comm.TINY if tiny else comm.Size(rounds=rounds)
    runs = {}
    for megabits in (None,) if unlimited else comm.LINKS:
        link = "not limited" if megabits is None else f"{megabits} Mbit/s"
        print(f"measuring links of {link} …" if megabits else "measuring …", flush=True)
        runs[link] = comm.measure_link(megabits, size)
    figures = comm.summarise(runs, size)
    # Under another name: a look at the command must not take the place of a result.
    path = save_result("comm-tiny" if tiny else "comm", figures, out)
    _show(figures["what"], comm.HEADS, comm.rows(figures), path)
    for link, case in figures["cases"].items():
        for name, speed in case["speed_against_ddp"].items():
            if speed < 0.99:
                print(f"slower than {comm.WAYS[name].peer}: {name}, {link}: {speed:.3f}×")


@app.command("digits")
def digits_command(
    out: Annotated[Path, typer.Option(help="Where results are saved.")] = RESULTS / "digits",
    picture: Annotated[Path, typer.Option(help="Where the picture is saved.")] = Path("docs/images/digits.png"),
    seeds: Annotated[int, typer.Option(min=2, help="How often each run is made.")] = 5,
    redraw: Annotated[bool, typer.Option("--redraw", help="Only draw what was saved.")] = False,
) -> None:
    """The runs of `fleetx train` with several seeds: accuracy at a large and a small batch."""
    from benchmarks import digits
    from benchmarks.report.tables import digits_rows
    from fleetx.results import save_result

    path = out / "seeds.json"
    if not redraw:
        path = save_result("seeds", digits.measure(seeds), out)
    result = json.loads(path.read_text(encoding="utf-8"))
    picture.write_bytes(digits.draw(result))
    heads, rows = digits_rows(result)
    _show("Test accuracy over all seeds", heads, rows, path)


@app.command("train")
def train_command(
    out: Annotated[Path, typer.Option(help="Where results are saved.")] = RESULTS,
    only: Annotated[str | None, typer.Option(help="Only cases whose name contains this.")] = None,
) -> None:
    """Training speed of BERT-large and ResNet-50 on a GPU, against compiled models of other libraries."""
    import torch

    from benchmarks import train
    from fleetx.results import save_result, so_far

    if not torch.cuda.is_available():
        raise typer.BadParameter("python -m benchmarks train needs a GPU, and this machine has none.")
    path = out / "train.json"
    cases = so_far(path) or {}
    for case in train.H200_CASES:
        if only is None or only in case.name:
            taken = datetime.now(UTC).isoformat(timespec="seconds")
            cases[case.name] = {"taken": taken, **train.measure(case)}
            # Saved after each case, so that an interrupted run keeps what it has.
            path = save_result("train", {"what": train.WHAT, "cases": cases}, out)
            train.free()
    rows = [
        (f"{name}: {rival}", f"{speed:,.1f}", f"{result['speed_of_ours'].get(rival, 1.0):.3f}×")
        for name, result in cases.items()
        for rival, speed in result["samples_per_s"].items()
    ]
    _show(train.WHAT, ("model", "samples/s", "ours is"), rows, path)


@app.command("loading")
def loading_command(
    out: Annotated[Path, typer.Option(help="Where results are saved.")] = RESULTS,
    processes: Annotated[int, typer.Option(min=1, help="Fresh processes to measure in; the median counts.")] = 5,
) -> None:
    """Loading images and text, against plain PyTorch loaders."""
    from benchmarks import loading
    from fleetx.results import save_result

    command = [sys.executable, "-m", "benchmarks.loading"]
    runs = [json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout) for _ in range(processes)]
    figures = loading.summarise(runs)
    path = save_result("loading", figures, out)
    rows = [
        (f"{case}: {name}", f"{speed:,.0f}", _times(result["speed_of_ours"].get(name)))
        for case, result in figures["cases"].items()
        for name, speed in result["samples_per_s"].items()
    ]
    _show(figures["what"], ("loader", "samples/s", "ours is"), rows, path)


@app.command("optim")
def optim_command(
    out: Annotated[Path, typer.Option(help="Where results are saved.")] = RESULTS,
    tiny: Annotated[bool, typer.Option(help="Small models, for a look at the command on any machine.")] = False,
    sweep: Annotated[bool, typer.Option(help="Try several block sizes of our kernels instead.")] = False,
) -> None:
    """One step of LARS and LAMB, against torch's fused SGD and AdamW."""
    import torch

    from benchmarks import optim
    from fleetx.results import save_result

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not tiny:
        raise typer.BadParameter("python -m benchmarks optim needs a GPU, and this machine has none: add --tiny.")
    cases = optim.TINY_CASES if tiny else optim.CASES
    if sweep:
        print(json.dumps({case.name: optim.sweep(case, device) for case in cases}, indent=2))
        return
    figures = {}
    for case in cases:
        print(f"measuring {case.name} …", flush=True)
        figures[case.name] = optim.measure(case, device)
    # Under another name: a look at the command must not take the place of a result.
    name, what = ("optim-tiny", optim.TINY_WHAT) if tiny else ("optim", optim.WHAT)
    path = save_result(name, {"what": what, "cases": figures}, out)
    optim.draw(figures, out, name)
    _show(what, ("step", "ms", "of the peer", "host, ms"), optim.rows(figures), path)


@app.command("memory")
def memory_command(
    out: Annotated[Path, typer.Option(help="Where results are saved.")] = RESULTS,
    only: Annotated[
        str | None, typer.Option(help='Only rows with this in "batch name" (a pattern); others keep their results.')
    ] = None,
) -> None:
    """Batch against speed on a GPU: recompute and offload beside plain training and torch's own ways."""
    import torch

    from benchmarks import memory
    from benchmarks.report.batches import draw_batches
    from fleetx.results import save_result, so_far

    if not torch.cuda.is_available():
        raise typer.BadParameter("python -m benchmarks memory needs a GPU, and this machine has none.")
    wanted = _pattern(only)
    rows = memory.all_rows()
    chosen = [number for number, (_, row) in enumerate(rows) if wanted.search(f"{row.batch} {row.name}")]
    path = out / "memory.json"
    results = memory.current(so_far(path, "rows") or [])
    for number in chosen:
        case, row = rows[number]
        results = memory.merged(results, memory.described(case, row, memory.measure(number)))
        came_out = results[-1].get("failed") or f"{_figure(results[-1]['samples_per_s'])} samples/s"
        print(f"{case.model} {row.batch} {row.name}: {came_out}", flush=True)
        # Saved after each row, so that an interrupted run keeps what it has.
        path = save_result("memory", {"what": memory.WHAT, "rows": results}, out)
    draw_batches([row for row in results if memory.is_proven(row)], out / "memory.png")
    shown = [
        (f"{r['model']}: {r['name']}", str(r["batch"]), _figure(r.get("samples_per_s")), _figure(r.get("peak_gib")))
        for r in results
    ]
    _show(memory.WHAT, ("way", "batch", "samples/s", "peak GiB"), shown, path)


@app.command("by-hand")
def by_hand_command(
    out: Annotated[Path, typer.Option(help="Where results are saved.")] = RESULTS,
    only: Annotated[str | None, typer.Option(help="Only cases with this in their name (a pattern).")] = None,
    tiny: Annotated[bool, typer.Option(help="A small model on a simulated device, on any machine.")] = False,
) -> None:
    """The planner against what a user tries by hand, in the same budget."""
    import torch

    from benchmarks import by_hand
    from fleetx.results import save_result, so_far

    if not tiny and not torch.cuda.is_available():
        raise typer.BadParameter("python -m benchmarks by-hand needs a GPU, and this machine has none: add --tiny.")
    wanted, name = _pattern(only), "by-hand-tiny" if tiny else "by-hand"
    path = out / f"{name}.json"
    results = so_far(path) or {}
    for case in by_hand.TINY if tiny else by_hand.CASES:
        if wanted.search(case.name):
            results[case.name] = by_hand.measure(case)
            # Saved after each case, so that an interrupted run keeps what it has.
            path = save_result(name, {"what": by_hand.WHAT, "cases": results}, out)
    rows = [
        (case, *(_figure(figures["ways"][way]["ran"].get("samples_per_s")) for way in by_hand.WAYS[:2]))
        + (_figure(figures["samples_per_s"]), _times(figures["of_best_by_hand"]))
        for case, figures in results.items()
    ]
    _show(by_hand.WHAT, ("model", *by_hand.WAYS, "against the best by hand"), rows, path)


@app.command("plan")
def plan_command(
    out: Annotated[Path, typer.Option(help="Where results are saved, and found again.")] = RESULTS,
    only: Annotated[
        str | None, typer.Option(help="Only what this regular expression is found in, such as 'bert_large in 32'.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Stop after so long; the next run goes on from there.")
    ] = None,
    compile: Annotated[bool, typer.Option(help="Compiled segments.")] = False,
    anew: Annotated[bool, typer.Option("--anew", help="Also what is saved already; to go on, leave it out.")] = False,
    tiny: Annotated[bool, typer.Option(help="Small models on a simulated device, on any machine.")] = False,
) -> None:
    """The planner: predicted against measured memory, and its plans against plans made by hand."""
    import torch

    from benchmarks import plan

    if not tiny and not torch.cuda.is_available():
        raise typer.BadParameter("python -m benchmarks plan needs a GPU, and this machine has none: add --tiny.")
    _pattern(only)
    try:
        results, path, complete = plan.measure(out, tiny=tiny, only=only, seconds=seconds, compile=compile, anew=anew)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    heads = ("case", "micro-batch × k", "peak", "predicted", "samples/s", "of the best by hand")
    _show(plan.TINY_WHAT if tiny else plan.WHAT, heads, plan.rows(results), path)
    if not complete:
        print("time is over: run the same command again to go on.")


def _pattern(only: str | None) -> re.Pattern[str]:
    try:
        return re.compile(only or "")
    except re.error as error:
        raise typer.BadParameter(f"--only must be a regular expression, got {only!r}: {error}.") from error


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:+.1%}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}×"


def _show(title: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], path: Path) -> None:
    table = Table(*heads, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    console.print(f"[dim]saved as[/] {path}")


@app.command("report")
def report_command(
    page: Annotated[Path, typer.Argument(help="The Markdown page whose tables are made anew.")] = Path("README.md"),
    results: Annotated[Path, typer.Option(help="Where results were saved.")] = RESULTS,
) -> None:
    """Fill the tables of a page from saved results."""
    from benchmarks.report.tables import fill_in, unmeasured

    for path in (page, results):
        if not path.exists():
            raise typer.BadParameter(f"{path} does not exist: run it in a checkout, or name the page and --results.")
    try:
        text = page.read_text(encoding="utf-8")
        filled = fill_in(text, results)
        page.write_text(filled, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{page}: {error}") from None
    left = unmeasured(text, results)
    count = filled.count("<!-- table: ") - len(left)
    print(f"{page}: {count} table{'' if count == 1 else 's'} made from {results}")
    if left:
        print(f"left as they are, since {results} has no figures of them: {', '.join(left)}")


if __name__ == "__main__":
    app()
