"""The `fleetx` command."""

import sys
from pathlib import Path
from typing import Annotated

import typer

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
