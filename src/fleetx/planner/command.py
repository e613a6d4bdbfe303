"""`fleetx plan`: the planner on the command line, for an application or for a model of the user's own."""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from fleetx.planner import Plan
    from fleetx.planner.fitting import Words

_SLOW = (
    "There is no GPU here: measuring on the CPU, whose speed and memory are not a GPU's. A large model takes many "
    "minutes"
)
_SOONER = "; a smaller --seq-len or --image-size is measured sooner"


def plan_command(
    maker: Annotated[
        str | None, typer.Argument(help="module:function that returns (model, sample[, loss_fn[, optimizer]]).")
    ] = None,
    app: Annotated[str | None, typer.Option(help="An application: resnet50, bert_base or bert_large.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=8, help="Tokens per sample of a BERT; 512 if not given.")] = None,
    image_size: Annotated[int | None, typer.Option(min=32, help="Pixels per side of an image; 224.")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, max=2**31, help="Samples that one update sees.")] = None,
    k_steps: Annotated[
        int | None, typer.Option(min=1, help="Micro-batches of an update, to be merged; chosen if not given.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="What the device may reserve: 32GiB, or bytes.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="What offload may use of the host.")] = None,
    one_forward: Annotated[bool, typer.Option(help="Keep the batch whole.")] = False,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(help="A module to cut at, or a glob; may be given several times."),
    ] = None,
    compile: Annotated[bool, typer.Option(help="Plan for compiled segments.")] = False,
    bf16: Annotated[bool, typer.Option(help="Train in bfloat16 autocast.")] = True,
    verify: Annotated[bool, typer.Option(help="Run micro-batches, and plan anew if they take more or less.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw memory over the step, and memory against speed.")] = None,
    out: Annotated[Path | None, typer.Option(help="Save the plan as JSON.")] = None,
    cached: Annotated[bool, typer.Option(help="Use and keep measurements on disk.")] = True,
) -> None:
    """The fastest plan that fits: micro-batch, merge, and what each segment saves and where."""
    import torch

    from fleetx import planner
    from fleetx.planner.samples import APPLICATIONS, application

    if (maker is None) == (app is None):
        raise typer.BadParameter("give a model as module:function, or an application with --app; one of them.")
    if app is None and (seq_len, image_size) != (None, None):
        raise typer.BadParameter("--seq-len and --image-size are for --app: a model of yours comes with its sample.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if app is not None and app not in APPLICATIONS:
        raise typer.BadParameter(f"--app must be one of {', '.join(APPLICATIONS)}, got {app!r}.")
    if app == "resnet50" and seq_len is not None:
        raise typer.BadParameter("--seq-len is for texts, and resnet50 sees images: give --image-size.")
    if app not in (None, "resnet50") and image_size is not None:
        raise typer.BadParameter(f"--image-size is for images, and {app} reads texts: give --seq-len.")
    device_memory, offloaded = _amount(memory), _amount(host_memory)
    budget = _checked_budget(torch.device(device), device_memory, offloaded)
    _check_paths(out, picture)
    with _failures_said():
        made: tuple[Any, ...] = application(app, seq_len or 512, image_size or 224) if app else _made(str(maker))
        model, sample, loss_fn, optimizer = (*made, None, None)[:4]
        model = model.to(device)
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-4)
        _check_checkpoints(model, checkpoint)
        _require_room_for_weights(model, optimizer, budget)
        if device == "cpu":
            typer.echo(f"{_SLOW}{_SOONER if app else ''}.", err=True)
        plan = planner.plan(
            model,
            sample,
            loss_fn=loss_fn,
            optimizer=optimizer,
            memory=device_memory,
            host_memory=offloaded,
            global_batch=global_batch,
            k_steps=k_steps,
            one_forward=one_forward,
            compile=compile,
            checkpoints=checkpoint or "auto",
            precision=torch.bfloat16 if bf16 else None,
            verify=verify,
            cached=cached,
            words=_words(),
        )
    unsaved = _unsaved(plan, out, picture)  # before the text, which may not be possible to print
    typer.echo(plan.to_json() if json else str(plan))
    if unsaved:
        typer.echo(unsaved, err=True)
        raise typer.Exit(2)


def _unsaved(plan: "Plan", out: Path | None, picture: Path | None) -> str:
    """Write the files that were asked for; gives what is to be said of one that could not be written."""
    path = out
    try:
        if out is not None:
            plan.save(out)
            typer.echo(f"saved: {out}", err=True)
        if picture is not None:
            from fleetx.planner.picture import draw_plan

            path = picture
            typer.echo(f"drawn: {draw_plan(plan, picture)}", err=True)
    except OSError as error:
        return f"{path} could not be written: {error.strerror or error}."
    return ""


@contextmanager
def _failures_said() -> Generator[None]:
    """What does not fit ends with 1, all else that goes wrong inside with 2: scripts must tell them apart."""
    from fleetx.planner.fitting import DoesNotFit

    try:
        yield
    except (typer.Exit, typer.BadParameter):
        raise
    except DoesNotFit as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except (Exception, SystemExit) as error:
        if isinstance(error, TypeError | ValueError) and _is_refusal(error):
            raise typer.BadParameter("\n".join([str(error), *getattr(error, "__notes__", [])])) from error
        traceback.print_exception(error)  # of the user's own code
        raise typer.Exit(2) from error


def _is_refusal(error: Exception) -> bool:
    """Whether FleetX says so in its own words: it was raised here, and not in a model or a loss function."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return Path(frame.f_code.co_filename).is_relative_to(Path(__file__).parents[1])


def _words() -> "Words":
    """What the settings are called here."""
    from fleetx.planner.fitting import Words

    return Words(
        memory="--memory {!r}",
        host_memory="--host-memory",
        one_forward="--one-forward",
        global_batch="--global-batch {}",
        k_steps="--k-steps {}",
        smaller="with --k-steps {} or more",
        whole="--one-forward keeps it whole",
        whole_instead="--one-forward in place of --k-steps keeps it whole",
        checkpoints="--checkpoint",
    )


def _amount(text: str | None) -> int | str | None:
    """On a command line all is text: a number without a unit is bytes, as an int is elsewhere."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) <= 18 else text


def _checked_budget(device: "torch.device", memory: int | str | None, host_memory: int | str | None) -> int:
    """The budget in bytes; what is wrong with the amounts is said before anything is measured."""
    from fleetx.planner.budget import budget_on
    from fleetx.units import parse_bytes

    if memory is None and device.type == "cpu":
        raise typer.BadParameter(
            "--memory is missing, and a machine without a GPU has no budget of its own: give one, as --memory 8GiB."
        )
    option = "--host-memory"
    try:
        parse_bytes(host_memory or 0)
        option = "--memory"
        return budget_on(device, memory)[0]
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from error


def _check_paths(out: Path | None, picture: Path | None) -> None:
    """Whether the results can be written, before the time is spent to have them."""
    for option, path in (("--out", out), ("--picture", picture)):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise typer.BadParameter(f"{option} must be in a folder that exists, got {str(path)!r}: make it first.")
        if path.is_dir():
            raise typer.BadParameter(f"{option} must be a file, got the folder {str(path)!r}: add a name.")
        if not os.access(path if path.exists() else path.parent, os.W_OK):  # the superuser may always, it says
            raise typer.BadParameter(f"{option} must be where you may write, got {str(path)!r}: choose another folder.")
    if picture is not None:
        from fleetx.planner.picture import FORMATS

        if picture.suffix[1:].lower() not in FORMATS:
            raise typer.BadParameter(
                f"--picture must end in one of {', '.join(FORMATS)}, got {str(picture)!r}: for example plan.png."
            )


def _check_checkpoints(model: Any, checkpoint: list[str] | None) -> None:
    from fleetx.planner import asked

    try:
        asked.check_checkpoints(model, checkpoint or "auto")
    except ValueError as error:
        raise typer.BadParameter(f"--checkpoint: {error}") from error


def _require_room_for_weights(model: Any, optimizer: Any, budget: int) -> None:
    """What is there whatever the plan: if already that is too much, nothing needs to be measured."""
    from fleetx.planner.updating import cost_of_update, fixed_bytes
    from fleetx.units import format_apart

    update = cost_of_update(model, optimizer)
    needed = sum(fixed_bytes(model, update).values()) + update.working_bytes
    if needed > budget:
        least, most = format_apart(needed, budget)
        typer.echo(
            f"training needs at least {least} for weights, gradients and {type(optimizer).__name__} alone, and the "
            f"budget is {most}: give more --memory, or take a smaller model.",
            err=True,
        )
        raise typer.Exit(1)


def _require_function(maker: str, function: object) -> None:
    """What is called without arguments; what it does then is the user's own."""
    rule = "a model is given by a function without arguments"
    if not callable(function):
        raise typer.BadParameter(f"{rule}, got {maker!r}, which is a {type(function).__name__}.")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise typer.BadParameter(f"{rule}, got {maker!r} ({error}): write one that calls it.") from error
    except ValueError:  # it does not tell
        return


def _made(maker: str) -> tuple[Any, ...]:
    """What the user's function returns."""
    from torch import nn
    from torch.optim import Optimizer

    module, colon, name = maker.partition(":")
    if not colon or not name or not module:
        raise typer.BadParameter(f"a model is given as module:function, got {maker!r}: for example train:make_model.")
    sys.path.insert(0, "")  # as python -m does: modules of the present folder
    try:
        function: Callable[[], Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        remedy = "modules are looked for in the present folder too, and in PYTHONPATH"
        raise typer.BadParameter(f"{maker!r} cannot be imported: {error}; {remedy}.") from error
    finally:
        sys.path.remove("")
    _require_function(maker, function)
    made = function()
    if not isinstance(made, tuple) or len(made) not in (2, 3, 4):
        got = f"{len(made)} values" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise typer.BadParameter(f"{maker!r} must return (model, sample[, loss_fn[, optimizer]]), got {got}.")
    if not isinstance(made[0], nn.Module):
        got = f"a {type(made[0]).__name__} in the place of the model, which comes first"
        raise typer.BadParameter(f"{maker!r} must return (model, sample[, loss_fn[, optimizer]]), got {got}.")
    if len(made) == 4 and not isinstance(made[3], Optimizer):
        got = f"a {type(made[3]).__name__} in the place of the optimizer, which comes last"
        raise typer.BadParameter(f"{maker!r} must return (model, sample[, loss_fn[, optimizer]]), got {got}.")
    return made
