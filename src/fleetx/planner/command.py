"""`fleetx plan`: the planner on the command line, for an application or for a model of the user's own."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer


def plan_command(
    maker: Annotated[
        str | None, typer.Argument(help="module:function that returns (model, sample) or (model, sample, loss_fn).")
    ] = None,
    app: Annotated[str | None, typer.Option(help="An application: resnet50, bert_base or bert_large.")] = None,
    seq_len: Annotated[int, typer.Option(min=8, help="Tokens per sample of a BERT.")] = 512,
    image_size: Annotated[int, typer.Option(min=32, help="Pixels per side of an image.")] = 224,
    global_batch: Annotated[int | None, typer.Option(min=1, help="Samples that one update sees.")] = None,
    memory: Annotated[str | None, typer.Option(help="What the device may reserve, such as 32GiB.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="What offload may use of the host.")] = None,
    one_forward: Annotated[bool, typer.Option(help="Keep the batch whole.")] = False,
    compile: Annotated[bool, typer.Option(help="Plan for compiled segments.")] = False,
    bf16: Annotated[bool, typer.Option(help="Train in bfloat16 autocast.")] = True,
    verify: Annotated[bool, typer.Option(help="Run the plan once, and plan anew if it takes more.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw memory over the step, and memory against speed.")] = None,
    out: Annotated[Path | None, typer.Option(help="Save the plan as JSON.")] = None,
    cached: Annotated[bool, typer.Option(help="Use and keep measurements on disk.")] = True,
) -> None:
    """The fastest plan that fits: micro-batch, merge, and what each segment saves and where."""
    import torch

    from fleetx import planner
    from fleetx.planner.picture import draw_plan
    from fleetx.planner.samples import APPLICATIONS, application

    if (maker is None) == (app is None):
        raise typer.BadParameter("give a model as module:function, or an application with --app; one of them.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if app is not None and app not in APPLICATIONS:
        raise typer.BadParameter(f"--app must be one of {', '.join(APPLICATIONS)}, got {app!r}.")
    made: tuple[Any, ...] = application(app, seq_len, image_size) if app is not None else _made(str(maker))
    model, sample, loss_fn = (*made, None)[:3]
    model = model.to(device)
    try:
        plan = planner.plan(
            model,
            sample,
            loss_fn=loss_fn,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
            memory=memory,
            host_memory=host_memory,
            global_batch=global_batch,
            one_forward=one_forward,
            compile=compile,
            precision=torch.bfloat16 if bf16 else None,
            verify=verify,
            cached=cached,
        )
    except planner.DoesNotFit as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    typer.echo(plan.to_json() if json else str(plan))
    if out is not None:
        plan.save(out)
    if picture is not None:
        typer.echo(f"drawn: {draw_plan(plan, picture)}", err=True)


def _made(maker: str) -> tuple[Any, ...]:
    """What the user's function returns."""
    module, colon, name = maker.partition(":")
    if not colon or not name:
        raise typer.BadParameter(f"a model is given as module:function, got {maker!r}: for example train:make_model.")
    sys.path.insert(0, "")  # as python -m does: modules of the present folder
    try:
        function: Callable[[], Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise typer.BadParameter(f"{maker!r} cannot be imported: {error}.") from error
    finally:
        sys.path.remove("")
    made = function()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise typer.BadParameter(
            f"{maker!r} must return (model, sample) or (model, sample, loss_fn), got a {type(made).__name__}."
        )
    return made
