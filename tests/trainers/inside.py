"""Runs one trainer's block of docs/in-other-trainers.md in several ways, alone in a process.

    python -m tests.trainers.inside HEADING

What the block does after training is compared bit for bit: as the page shows it, without recompute, with a plan, and
with LARS; and with a plain loop that has no trainer.
"""

import re
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fleetx
from fleetx import memory, names
from fleetx.optim import Lamb, Lars
from tests.planner.work_clock import WorkClock

PAGE = (Path(__file__).parent.parent.parent / "docs" / "in-other-trainers.md").read_text(encoding="utf-8")
RECOMPUTE = re.compile(r"^memory\.apply\(model, (\[.*\])\)", re.MULTILINE)
MERGED = 2


def blocks() -> dict[str, str]:
    """The code of the page, by headings."""
    parts = re.split(r"^##? (.*)$", PAGE, flags=re.MULTILINE)[1:]
    sections = zip(parts[::2], parts[1::2], strict=True)
    return {title: "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)) for title, text in sections}


class Recorder:
    """What a model was given in each forward, and which random numbers came next."""

    def __init__(self, model: nn.Module) -> None:
        self.before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.calls = []
        self._handle = model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _model, args, kwargs) -> None:
        self.calls.append((args, kwargs, torch.get_rng_state()))

    def remove(self) -> None:
        self._handle.remove()


def train(block: str, optimizer: type, prepare) -> dict:
    """Run the page's first block and this one; `prepare` gets the model where the page has `memory.apply`."""
    torch.manual_seed(0)
    code, replaced = RECOMPUTE.subn(r"prepare(model, \1)", block.replace("Lamb(", f"{optimizer.__name__}("))
    assert replaced == 1
    module = {"__name__": "page", "prepare": prepare, "Lars": Lars}
    exec(blocks()["In other trainers"], module)
    exec(code, module)
    return module


def planned(model: nn.Module, _cuts: list[str]) -> None:
    """A plan that recomputes, of the page's micro-batches, made as a user makes it."""
    if hasattr(model, "config"):  # of transformers
        ids = torch.zeros(16, 16, dtype=torch.long)
        sample, loss_fn = {"input_ids": ids, "labels": ids}, None
    else:
        sample, loss_fn = (torch.zeros(64, 32), torch.zeros(64, dtype=torch.long)), cross_entropy
    options = {"loss_fn": loss_fn, "optimizer": Lamb(model.parameters(), lr=2e-3), "k_steps": MERGED, "even": True}
    with WorkClock():
        keeps_all = fleetx.plan(model, sample, memory="1GiB", **options)
        plan = fleetx.plan(model, sample, memory=keeps_all.peak - 8 * 1024, **options)
    assert {state.save for state in plan.states} > {"everything"}, plan
    plan.apply(model)


def plain_loop(recorder: Recorder, module: dict, optimizer_class: type) -> nn.Module:
    """Train without a trainer on what the model was given in one."""
    recorder.remove()
    model = type(module["model"])(*([module["model"].config] if hasattr(module["model"], "config") else []))
    model.load_state_dict(recorder.before)
    names.record(model)
    optimizer = optimizer_class(model.parameters(), lr=2e-3, exclude_from_weight_decay=["norm", "bias"])
    for number, (args, kwargs, random_state) in enumerate(recorder.calls, 1):
        torch.set_rng_state(random_state)
        if kwargs:  # a model of transformers: its loss is divided by the tokens of the whole batch
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**kwargs).loss
        else:
            x, labels = module["dataset"].tensors
            rows = [(x == row).all(1).nonzero().item() for row in args[0]]
            loss = cross_entropy(model(*args), labels[rows]) / MERGED
        loss.backward()
        if number % MERGED == 0:
            if kwargs:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the Trainer's default
            optimizer.step()
            optimizer.zero_grad()
    return model


def require_equal(ours: nn.Module, theirs: nn.Module, ways: str) -> None:
    for (name, one), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(one, other), f"{ways}: {name} differs by {(one - other).abs().max()}"
    print(f"{ways}: equal bits")


def main(title: str) -> None:
    """Compare everything with the trainer's run without recompute, and that with the plain loop."""
    block = blocks()[title]
    for optimizer in (Lamb, Lars):
        recorders = []
        alone = train(block, optimizer, lambda model, _, into=recorders: into.append(Recorder(model)))
        (recorder,) = recorders
        changed = [
            name
            for name, tensor in alone["model"].state_dict().items()
            if not torch.equal(tensor, recorder.before[name])
        ]
        assert changed
        assert len(recorder.calls) == 8
        require_equal(alone["model"], plain_loop(recorder, alone, optimizer), f"{optimizer.__name__}, plain loop")
        for way, prepare in {"recompute": memory.apply, "plan": planned}.items():
            with_it = train(block, optimizer, prepare)
            assert memory.applied_to(with_it["model"]) is not None
            require_equal(with_it["model"], alone["model"], f"{optimizer.__name__}, {way}")


if __name__ == "__main__":
    main(sys.argv[1])
