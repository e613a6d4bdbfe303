"""The `fleetx` command."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fleetx.version import __version__

app = typer.Typer(
    name="fleetx",
    help="Large-batch training for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure FleetX against its peers on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


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
    out: Annotated[Path, typer.Option(help="Where results are saved.")] = Path("benchmarks/results"),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in turns; the median counts.")] = 21,
) -> None:
    """What the step itself costs, against a hand-written loop."""
    from fleetx.bench.results import save_result
    from fleetx.bench.step import measure

    figures = measure(rounds=rounds)
    path = save_result("step", figures, out)
    rows = [(name, f"{ms:.2f}", _percent(figures["overhead"].get(name))) for name, ms in figures["median_ms"].items()]
    _show(f"One update: {figures['what']}", ("loop", "ms", "overhead"), rows, path)


@bench.command("reduce")
def bench_reduce(
    out: Annotated[Path, typer.Option(help="Where results are saved.")] = Path("benchmarks/results"),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in turns; the median counts.")] = 15,
    workers: Annotated[int, typer.Option(min=2, help="Worker processes.")] = 2,
) -> None:
    """Gradient reduction, against DistributedDataParallel."""
    from fleetx.launch.run import launch

    code = launch(["-m", "fleetx.bench.reduce", "--out", str(out), "--rounds", str(rounds)], workers=workers)
    if code:
        sys.exit(code)
    path = out / "reduce.json"
    figures = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        (f"{name}, {case}", f"{ms:.2f}", f"{result['speed_against_ddp'].get(name, 1.0):.3f}×")
        for case, result in figures["cases"].items()
        for name, ms in result["median_ms"].items()
    ]
    _show(f"One update: {figures['what']}", ("loop", "ms", "speed"), rows, path)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:+.1%}"


def _show(title: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], path: Path) -> None:
    table = Table(*heads, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    console.print(f"[dim]saved as[/] {path}")


@app.command()
def report(
    page: Annotated[Path, typer.Argument(help="The Markdown page whose tables are made anew.")] = Path("README.md"),
    results: Annotated[Path, typer.Option(help="Where results were saved.")] = Path("benchmarks/results"),
) -> None:
    """Fill the tables of a page from saved results."""
    from fleetx.report.tables import fill_in

    page.write_text(fill_in(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    print(f"{page}: tables made from {results}")
