"""The `fleetx` command."""

import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fleetx.doctor.command import doctor_command
from fleetx.planner.command import plan_command
from fleetx.version import __version__

RESULTS = Path("benchmarks/results")

app = typer.Typer(
    name="fleetx",
    help="Large-batch training for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure FleetX against its peers on this machine.", no_args_is_help=True)
data = typer.Typer(help="Data sets in the guide's formats.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(data, name="data")
app.command("plan")(plan_command)
app.command("doctor")(doctor_command)


def main() -> None:
    """The entry point of the `fleetx` command."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Large-batch training for PyTorch."""


@app.command()
def train(
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    global_batch: Annotated[int, typer.Option(min=1, help="Samples that one update sees, over all workers.")] = 512,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training digits.")] = 40,
    strategy: Annotated[Path | None, typer.Option(help="A strategy saved as TOML; default: merge, bf16, LARS.")] = None,
    out: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    baseline: Annotated[bool, typer.Option(help="Train plain SGD at batch 32 beside it.")] = True,
) -> None:
    """Train a small residual network on handwritten digits with a large batch."""
    from fleetx.demo import run_demo

    sys.exit(
        run_demo(
            workers=workers,
            global_batch=global_batch,
            epochs=epochs,
            strategy=strategy,
            out=out,
            baseline=baseline,
        )
    )


@bench.command("step")
def bench_step(
    out: Annotated[Path, typer.Option(help="Where results are saved.")] = RESULTS,
    processes: Annotated[int, typer.Option(min=1, help="Fresh processes to measure in; the median counts.")] = 7,
) -> None:
    """What the step itself costs, against a hand-written loop."""
    from fleetx.bench import step
    from fleetx.bench.results import save_result

    command = [sys.executable, "-m", "fleetx.bench.step"]
    runs = [json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout) for _ in range(processes)]
    figures = step.summarise(runs)
    path = save_result("step", figures, out)
    rows = [
        (name, f"{ms:.2f}", _percent(figures["overhead"].get(name)), _ms(figures["host_overhead_ms"].get(name)))
        for name, ms in figures["median_ms"].items()
    ]
    _show(f"One update: {figures['what']}", ("loop", "ms", "overhead", "host work more, ms"), rows, path)


@bench.command("reduce")
def bench_reduce(
    out: Annotated[Path, typer.Option(help="Where results are saved.")] = RESULTS,
    jobs: Annotated[int, typer.Option(min=1, help="Jobs to measure in; the median counts.")] = 7,
    workers: Annotated[int, typer.Option(min=2, help="Worker processes of a job.")] = 2,
) -> None:
    """Gradient reduction, against DistributedDataParallel."""
    from fleetx.bench import reduce
    from fleetx.bench.results import save_result
    from fleetx.launch.run import launch

    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(jobs):
            file = Path(folder, "figures.json")
            if code := launch(["-m", "fleetx.bench.reduce", str(file)], workers=workers):
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


@bench.command("train")
def bench_train(
    out: Annotated[Path, typer.Option(help="Where results are saved.")] = RESULTS,
    only: Annotated[str | None, typer.Option(help="Only cases whose name contains this.")] = None,
) -> None:
    """Training speed of BERT-large and ResNet-50 on a GPU, against compiled models of other libraries."""
    import torch

    from fleetx.bench import train
    from fleetx.bench.results import save_result, so_far

    if not torch.cuda.is_available():
        raise typer.BadParameter("fleetx bench train needs a GPU, and this machine has none.")
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


@bench.command("loading")
def bench_loading(
    out: Annotated[Path, typer.Option(help="Where results are saved.")] = RESULTS,
    processes: Annotated[int, typer.Option(min=1, help="Fresh processes to measure in; the median counts.")] = 5,
) -> None:
    """Loading images and text, against plain PyTorch loaders."""
    from fleetx.bench import loading
    from fleetx.bench.results import save_result

    command = [sys.executable, "-m", "fleetx.bench.loading"]
    runs = [json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout) for _ in range(processes)]
    figures = loading.summarise(runs)
    path = save_result("loading", figures, out)
    rows = [
        (f"{case}: {name}", f"{speed:,.0f}", _times(result["speed_of_ours"].get(name)))
        for case, result in figures["cases"].items()
        for name, speed in result["samples_per_s"].items()
    ]
    _show(figures["what"], ("loader", "samples/s", "ours is"), rows, path)


@bench.command("optim")
def bench_optim(
    out: Annotated[Path, typer.Option(help="Where results are saved.")] = RESULTS,
    tiny: Annotated[bool, typer.Option(help="Small models, for a look at the command on any machine.")] = False,
    sweep: Annotated[bool, typer.Option(help="Try several block sizes of our kernels instead.")] = False,
) -> None:
    """One step of LARS and LAMB, against torch's fused SGD and AdamW."""
    import torch

    from fleetx.bench import optim
    from fleetx.bench.results import save_result

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not tiny:
        raise typer.BadParameter("fleetx bench optim needs a GPU, and this machine has none: add --tiny.")
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


@bench.command("memory")
def bench_memory(
    out: Annotated[Path, typer.Option(help="Where results are saved.")] = RESULTS,
    only: Annotated[
        str | None, typer.Option(help='Only rows with this in "batch name" (a pattern); others keep their results.')
    ] = None,
) -> None:
    """Batch against speed on a GPU: recompute and offload beside plain training and torch's own ways."""
    import torch

    from fleetx.bench import memory
    from fleetx.bench.results import save_result, so_far
    from fleetx.report.batches import draw_batches

    if not torch.cuda.is_available():
        raise typer.BadParameter("fleetx bench memory needs a GPU, and this machine has none.")
    wanted = _pattern(only)
    chosen = [(case, row) for case, row in memory.all_rows() if wanted.search(f"{row.batch} {row.name}")]
    path = out / "memory.json"
    results = memory.current(so_far(path, "rows") or [])
    for case, row in chosen:
        results = memory.merged(results, memory.described(case, row, memory.measure(case, row, "cuda")))
        came_out = results[-1].get("failed") or f"{_figure(results[-1]['samples_per_s'])} samples/s"
        print(f"{case.model} {row.batch} {row.name}: {came_out}", flush=True)
        # Saved after each row, so that an interrupted run keeps what it has.
        path = save_result("memory", {"what": memory.WHAT, "rows": results}, out)
    draw_batches(results, out / "memory.png")
    rows = [
        (f"{r['model']}: {r['name']}", str(r["batch"]), _figure(r.get("samples_per_s")), _figure(r.get("peak_gib")))
        for r in results
    ]
    _show(memory.WHAT, ("way", "batch", "samples/s", "peak GiB"), rows, path)


@bench.command("plan")
def bench_plan(
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

    from fleetx.bench import plan

    if not tiny and not torch.cuda.is_available():
        raise typer.BadParameter("fleetx bench plan needs a GPU, and this machine has none: add --tiny.")
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


@data.command("make")
def data_make(
    kind: Annotated[str, typer.Argument(help="imagenet, digital or idx")],
    folder: Annotated[Path, typer.Argument(help="Where the files are made; it must be empty or new.")],
    seed: Annotated[int, typer.Option(help="The same seed makes the same files.")] = 0,
    overwrite: Annotated[
        bool, typer.Option(help="Replace what was made there before; other files are refused.")
    ] = False,
    images: Annotated[int | None, typer.Option(min=1, help="imagenet, idx: images to train on.")] = None,
    val_images: Annotated[int | None, typer.Option(min=0, help="imagenet: images to validate with.")] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="imagenet, idx: how many classes.")] = None,
    size: Annotated[int | None, typer.Option(min=1, help="imagenet, idx: pixels of an image's side.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="digital: pairs of sentences.")] = None,
    vocab: Annotated[int | None, typer.Option(min=1, help="digital: tokens of the vocabulary.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="digital: the longest sample, in tokens.")] = None,
    files: Annotated[int | None, typer.Option(min=1, help="digital: files that the samples are in.")] = None,
) -> None:
    """Make a tiny data set in one of the guide's formats, with structure that can be learned."""
    from fleetx.data import make

    sizes = {
        "images": images,
        "val_images": val_images,
        "classes": classes,
        "size": size,
        "samples": samples,
        "vocab": vocab,
        "seq_len": seq_len,
        "files": files,
    }
    given = {name: value for name, value in sizes.items() if value is not None}

    makers = {"imagenet": make.make_imagenet, "digital": make.make_digital, "idx": make.make_idx}
    if kind not in makers:
        raise typer.BadParameter(f"there is no data set {kind!r}: choose {', '.join(makers)}.")
    taken = inspect.signature(makers[kind]).parameters
    if foreign := [name for name in given if name not in taken]:
        possible = _as_options(name for name in sizes if name in taken)
        raise typer.BadParameter(f"{kind} has no {_as_options(foreign)}: its sizes are {possible}.")
    try:
        made = makers[kind](folder, seed=seed, overwrite=overwrite, **given)
    except make.FolderInUseError:
        raise typer.BadParameter(
            f"{folder} is not empty: name another folder, or add --overwrite to replace what was made there."
        ) from None
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    print(*(made if isinstance(made, tuple) else [made]), sep="\n")


def _as_options(names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


@app.command()
def report(
    page: Annotated[Path, typer.Argument(help="The Markdown page whose tables are made anew.")] = Path("README.md"),
    results: Annotated[Path, typer.Option(help="Where results were saved.")] = RESULTS,
) -> None:
    """Fill the tables of a page from saved results."""
    from fleetx.report.tables import fill_in

    for path in (page, results):
        if not path.exists():
            raise typer.BadParameter(f"{path} does not exist: run it in a checkout, or name the page and --results.")
    try:
        text = page.read_text(encoding="utf-8")
        filled = fill_in(text, results)
        page.write_text(filled, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{page}: {error}") from None
    count = filled.count("<!-- table: ")
    print(f"{page}: {count} table{'' if count == 1 else 's'} made from {results}")
