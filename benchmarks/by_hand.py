"""The planner against what a user tries by hand, in the same budget, with the same arithmetic.

By hand means: powers of two as micro-batch, everything kept or the model's own checkpointing (torch.utils.checkpoint
around each block), and the fastest of what fits. Each way runs in a fresh process whose allocator has the budget and no
more. A plan fills its budget, so it runs five times in fresh processes: all must fit.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fleetx
from benchmarks.planning.cases import CASES as PLANNED
from benchmarks.planning.cases import GIB, KIB, TINY_CASES, Trained
from benchmarks.planning.running import ByHand, Ran, Runner
from fleetx.planner.allocator import let_segments_grow
from fleetx.planner.feeding import Feeding
from fleetx.results import now

WHAT = (
    "Training in bf16 autocast over fp32 weights with fused AdamW, within a budget of what the allocator reserves. By "
    "hand: the fastest power of two that fits, everything kept, and with the model's own checkpointing of each block"
)
KEPT, CHECKPOINTED, PLANNED_WAY = "everything kept", "its own checkpointing", "fleetx.plan"
WAYS = (KEPT, CHECKPOINTED, PLANNED_WAY)
RUNS = 5  # of a plan, in fresh processes


@dataclass(frozen=True)
class Case:
    """A model in a budget, and how its library recomputes each block."""

    name: str
    make: Callable[[], Trained]
    checkpoint: Callable[[nn.Module], None]
    global_batch: int
    budget: int


def _our_bert_checkpoints(model: nn.Module) -> None:
    """What a user of torch.utils.checkpoint writes around each layer."""
    from torch.utils.checkpoint import checkpoint

    def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    for layer in model.get_submodule("bert.encoder.layer").children():
        layer.forward = checkpointed(layer.forward)


def _transformers_checkpoints(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def _timm_checkpoints(model: Any) -> None:
    model.set_grad_checkpointing(True)


def _convnext() -> Trained:
    import timm  # pyrefly: ignore[missing-import]

    sample = (torch.randn(2, 3, 224, 224), torch.randint(1000, (2,)))
    return Trained(timm.create_model("convnext_base", num_classes=1000), sample, nn.functional.cross_entropy)


def _encoder_decoder() -> Trained:
    from transformers import T5Config, T5ForConditionalGeneration  # pyrefly: ignore[missing-import]

    config = T5Config(d_model=1024, d_ff=2816, num_layers=12, num_heads=16, use_cache=False)
    config.decoder_start_token_id = 0
    ids = torch.randint(1, config.vocab_size, (2, 512))
    return Trained(T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids[:, :128].contiguous()})


_MAKERS = {case.name: case.make for case in PLANNED}
CASES = (
    Case("BERT-large", _MAKERS["bert_large"], _our_bert_checkpoints, 1024, 16 * GIB),
    Case("GPT-2 medium", _MAKERS["gpt"], _transformers_checkpoints, 256, 16 * GIB),
    Case("ConvNeXt-base", _convnext, _timm_checkpoints, 1024, 12 * GIB),
    Case("T5, 12 + 12 layers", _encoder_decoder, _transformers_checkpoints, 256, 12 * GIB),
)
TINY = (Case("tiny BERT", TINY_CASES[0].make, _our_bert_checkpoints, 32, 1600 * KIB),)


def measure(case: Case, say: Callable[[str], None] = print) -> dict[str, Any]:
    """All ways of a case, each in fresh processes."""
    ways: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        plan = str(Path(folder, "plan.json"))
        for way in WAYS:
            ways[way] = _fresh(case, way, plan)
            say(f"{case.name}: {way}: {_said(ways[way])}")
        ours = ways[PLANNED_WAY]
        ours["runs"] = [ours.pop("ran"), *(_fresh(case, PLANNED_WAY, plan)["ran"] for _ in range(RUNS - 1))]
        say(f"{case.name}: again: {[_speed(run) for run in ours['runs']]}")
    return {"budget": case.budget, "global_batch": case.global_batch, "taken": now(), "ways": ways, **compared(ways)}


def compared(ways: dict[str, Any]) -> dict[str, Any]:
    """The plan's median speed, in how many runs memory ran out, and the speed over the better way by hand."""
    runs = ways[PLANNED_WAY]["runs"]
    good = [run["samples_per_s"] for run in runs if "failed" not in run]
    best = max(_speed(ways[way].get("ran", {"failed": ""})) for way in (KEPT, CHECKPOINTED))
    speed = statistics.median(good) if good else 0.0
    return {"samples_per_s": speed, "failed": len(runs) - len(good), "of_best_by_hand": speed / best if best else None}


def _fresh(case: Case, way: str, plan: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.by_hand", case.name, way, plan]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {"ran": {"failed": f"the process ended with {done.returncode}"}}
    return json.loads(done.stdout.splitlines()[-1])


def _said(figures: dict[str, Any]) -> str:
    ran = figures["ran"]
    if "failed" in ran:
        return ran["failed"]
    return (
        f"{figures['micro_batch']} × {figures['k_steps']}: {ran['samples_per_s']:,.1f}/s, {ran['peak'] / GIB:.1f} GiB"
    )


def _speed(ran: dict[str, Any]) -> float:
    return 0.0 if "failed" in ran else ran["samples_per_s"]


def run_once(case: Case, way: str, plan_file: Path, device: torch.device) -> dict[str, Any]:
    """One way in this process: its micro-batch, and what came out."""
    torch.manual_seed(0)
    let_segments_grow(device)
    trained, on_gpu = case.make(), device.type == "cuda"
    model = trained.model.to(device).train()
    feeding = Feeding(model, trained.loss_fn, torch.bfloat16 if on_gpu else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=on_gpu or None)
    runner = Runner(feeding, trained.sample, optimizer)
    if way == PLANNED_WAY:
        return _run_plan(case, trained, feeding, runner, plan_file)
    if way == CHECKPOINTED:
        case.checkpoint(model)
    return _fastest_power_of_two(case, runner)


def _run_plan(case: Case, trained: Trained, feeding: Feeding, runner: Runner, file: Path) -> dict[str, Any]:
    if not file.exists():
        plan = fleetx.plan(
            feeding.model,
            trained.sample,
            loss_fn=trained.loss_fn,
            optimizer=runner.optimizer,
            precision=feeding.precision,
            memory=case.budget,
            global_batch=case.global_batch,
            verify=True,
            bandwidth=None if runner.on_gpu else 2e9,
        )
        plan.save(file)
    plan = fleetx.Plan.load(file)
    states = [str(state) for state in plan.states]
    return {
        "micro_batch": plan.micro_batch,
        "k_steps": plan.k_steps,
        "states": {state: states.count(state) for state in dict.fromkeys(states)},
        "planning_seconds": plan.planning_seconds,
        "predicted_peak": plan.peak,
        "ran": runner.run(plan, case.budget, limited=True).as_dict(),
    }


def _fastest_power_of_two(case: Case, runner: Runner) -> dict[str, Any]:
    """Doubled until memory runs out; all that ran are kept, so that a reader sees what else was tried."""
    tried: dict[int, Ran] = {}
    size = 1
    while size <= case.global_batch:
        tried[size] = runner.run(ByHand(size, case.global_batch), case.budget, limited=True)
        if tried[size].failed is not None:
            break
        size *= 2
    fitting = {size: ran for size, ran in tried.items() if ran.failed is None}
    if not fitting:
        return {"ran": tried[1].as_dict()}
    best = max(fitting, key=lambda size: fitting[size].samples_per_s)
    return {
        "micro_batch": best,
        "k_steps": ByHand(best, case.global_batch).k_steps,
        "tried": {size: ran.as_dict() for size, ran in tried.items()},
        "ran": tried[best].as_dict(),
    }


def main(arguments: Sequence[str]) -> None:
    """One way of one case in this process; what came out goes to the last line of standard output."""
    name, way, plan_file = arguments
    (case,) = (case for case in (*CASES, *TINY) if case.name == name)
    device = torch.device("cpu" if case in TINY else "cuda")
    print(json.dumps(run_once(case, way, Path(plan_file), device)))


if __name__ == "__main__":
    main(sys.argv[1:])
