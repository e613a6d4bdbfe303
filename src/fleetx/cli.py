"""The `fleetx` command."""

import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from fleetx.extras import needs_extra

with needs_extra("cli", "The fleetx command"):
    import typer

from fleetx.doctor.command import doctor_command
from fleetx.planner.command import plan_command
from fleetx.version import __version__

app = typer.Typer(
    name="fleetx",
    help="Large-batch training for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data = typer.Typer(help="Data sets in the guide's formats.", no_args_is_help=True)
app.add_typer(data, name="data")
app.command("plan")(plan_command)
app.command("doctor")(doctor_command)


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
    context: typer.Context,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    global_batch: Annotated[int, typer.Option(min=1, help="Samples that one update sees, over all workers.")] = 512,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training digits.")] = 40,
    strategy: Annotated[Path | None, typer.Option(help="A strategy saved as TOML; default: merge, bf16, LARS.")] = None,
    out: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    baseline: Annotated[bool, typer.Option(help="Train plain SGD too, at batch 32 and at the global batch.")] = True,
    checks: Annotated[bool, typer.Option(help="Check memory, exactness and resume.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="First weights, order, and which fifth is held out.")] = 0,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder, as it was begun.")] = None,
) -> None:
    """Train a small residual network on handwritten digits with a large batch, and check what FleetX promises."""
    from fleetx.demo.command import resume_demo, run_demo

    if resume is not None:
        sources = {name: context.get_parameter_source(name) for name in context.params if name != "resume"}
        if others := [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]:
            raise typer.BadParameter(f"--resume takes all options from the folder: leave out {_as_options(others)}.")
        sys.exit(resume_demo(resume))
    sys.exit(
        run_demo(
            workers=workers,
            global_batch=global_batch,
            epochs=epochs,
            strategy=strategy,
            out=out,
            baseline=baseline,
            checks=checks,
            seed=seed,
        )
    )


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
    except OSError as error:
        raise typer.BadParameter(_unwritten(folder, error)) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    print(*(made if isinstance(made, tuple) else [made]), sep="\n")


def _unwritten(folder: Path, error: OSError) -> str:
    """What the system says, with a remedy; errors of our own have one."""
    if error.strerror is None:
        return str(error)
    return f"{error.filename or folder} cannot be written ({error.strerror}): name a folder where you may write."


def _as_options(names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)
