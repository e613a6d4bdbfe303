"""What the documents show must run."""

import contextlib
import copy
import io
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import fleetx
from fleetx import fleet
from fleetx.optim import Lamb
from tests.jobs.starting import ROOT, start
from tests.planner.work_clock import WorkClock

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.middle
@pytest.mark.parametrize("workers", [1, 2])
def test_the_example_trains(workers):
    done = start(ROOT / "examples" / "train.py", workers=workers, launcher="fleetrun" if workers > 1 else None)
    accuracy = float(re.search(r"test accuracy ([\d.]+)%", done.stdout).group(1))
    assert accuracy > 90


BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_six_lines_and_the_step_run():
    *_, six, by_step = BLOCKS
    torch.manual_seed(0)
    names = {
        "model": torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)),
        "loader": [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(6)],
        "loss_fn": torch.nn.functional.cross_entropy,
    }
    exec(six, names)
    exec(by_step, names)
    assert names["out"].updated


def test_the_loop_of_ones_own_gives_the_whole_batchs_update(tmp_path, monkeypatch, capsys):
    """Micro-batches hold different numbers of labelled items, one of them none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # measurements of the planner
    by_lamb, by_plan, own_loop, *_ = BLOCKS
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    labels = torch.randint(0, 3, (16,))
    labels[:5] = labels[9] = -100
    batch = torch.randn(16, 4, dtype=torch.float64), labels
    whole = copy.deepcopy(model)
    names = {"model": model, "batch": batch, "loader": [batch] * 3, "loss_fn": torch.nn.functional.cross_entropy}
    exec(by_lamb, names)
    exec(by_plan, names)
    assert "global batch 4,096" in capsys.readouterr().out
    names["plan"] = fleetx.plan(model, batch, loss_fn=names["loss_fn"], memory="1MiB", global_batch=16, k_steps=4)
    exec(own_loop, names)

    fleetx.names.record(whole)
    optimizer = Lamb(whole.parameters(), lr=2e-3, exclude_from_weight_decay=["norm", "bias"])
    for _ in range(3):
        torch.nn.functional.cross_entropy(whole(batch[0]), labels, ignore_index=-100).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def run_page(name, monkeypatch, folder, prints=True, **names):
    """Run a page's blocks in their order, as one module; `print(...)  # text` must print that text."""
    module = types.ModuleType(f"page_{name.partition('.')[0]}")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # compilers look up a function's module
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path(folder) / "cache"))  # measurements of the planner
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    for language, block in re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL):
        if language == "sh":
            subprocess.run(["sh", "-ec", block], check=True, env={**os.environ, "PATH": path}, capture_output=True)
            continue
        assert language == "python", f"{name} has a block of {language}, which nobody runs"
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(block, name, "exec"), vars(module))
        expected = re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE) if prints else []
        assert not expected or printed.getvalue().splitlines() == expected, block


@pytest.mark.parametrize(
    "page",
    [
        "memory.md",
        "optimizers.md",
        *(
            pytest.param(page, marks=pytest.mark.middle)
            for page in ("applications.md", "data.md", "planner.md", "static.md")
        ),
    ],
)
def test_the_pages_blocks_run_and_print_what_they_say(page, tmp_path, monkeypatch, caplog):
    with WorkClock() if page == "planner.md" else contextlib.nullcontext():
        run_page(page, monkeypatch, tmp_path)
    if page == "static.md":
        text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
        told = [record.message for record in caplog.records if "because of x" in getattr(record, "message", "")]
        assert told
        assert all(message in text for message in told)


def test_the_guides_blocks_run(tmp_path, monkeypatch):
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 4, "avg": True})
    model = fleet.distributed_model(torch.nn.Linear(2, 1), strategy)
    batch = {"inputs": torch.randn(3, 2), "labels": torch.randn(3, 1), "loss_fn": torch.nn.functional.mse_loss}
    names = {"torch": torch, "fleet": fleet, "model": model, "path": "state.pt", **batch}
    run_page("guide.md", monkeypatch, tmp_path, prints=False, **names)


def test_the_sizes_of_applications_are_those_in_the_page():
    """The table of docs/applications.md says what its first block prints."""
    page = (ROOT / "docs" / "applications.md").read_text(encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1), {})
    for line in printed.getvalue().splitlines():
        name, million, billion = re.fullmatch(r"(\w+): (\S+) million parameters, (\S+) GFLOP .*", line).groups()
        assert f"| `{name}()` | {million} million | {billion} billion" in page


def test_pages_that_run_in_one_folder_make_their_data_in_folders_of_their_own():
    made = {}
    for page in (ROOT / "docs").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        found = re.findall(r"make_\w+\(['\"](\w[\w/]*)|fleetx data make \w+ (\S+)", text)
        made[page.name] = {Path(folder) for pair in found for folder in pair if folder}
    assert {Path("images"), Path("text")} <= made["applications.md"]
    assert Path("tiny/imagenet") in made["data.md"]
    for page, folders in made.items():
        others = set().union(*(theirs for name, theirs in made.items() if name != page))
        for folder in folders:
            assert not {folder, *folder.parents[:-1]} & others, (page, folder)


@pytest.mark.full
def test_the_guides_scripts_run_small_as_the_page_says(tmp_path):
    page = (ROOT / "docs" / "guide-scripts.md").read_text(encoding="utf-8")
    data, small, *_ = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    assert "small.py" in small
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["sh", "-ec", data.replace("512", "256") + small],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "[batch 3] loss:" in done.stdout


def test_the_readme_leads_to_every_page():
    for page in (ROOT / "docs").glob("*.md"):
        assert f"](docs/{page.name})" in README, page.name


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), (page, target)


def test_the_project_speaks_only_of_itself():
    """No path of a machine it was written on, in any text file."""
    texts = [p for p in ROOT.rglob("*") if p.suffix in {".py", ".md", ".toml", ".txt", ".json"} and _is_ours(p)]
    assert len(texts) > 50
    for path in texts:
        assert not re.search(r"/(home|root|work)/\w", path.read_text(encoding="utf-8")), path


def _is_ours(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    return not any(part.startswith(".") or part in {"runs", "dist", "build"} for part in parts)
