"""What the documents show must run."""

import re
from pathlib import Path

import pytest
import torch

from tests.jobs.starting import ROOT, start

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("workers", [1, 2])
def test_the_example_trains(workers):
    done = start(ROOT / "examples" / "train.py", workers=workers, launcher="fleetrun" if workers > 1 else None)
    accuracy = float(re.search(r"test accuracy ([\d.]+)%", done.stdout).group(1))
    assert accuracy > 90


def test_the_six_lines_and_the_step_run():
    six, by_step = (block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL))
    torch.manual_seed(0)
    names = {
        "model": torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)),
        "loader": [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(6)],
        "loss_fn": torch.nn.functional.cross_entropy,
    }
    exec(six, names)
    exec(by_step, names)
    assert names["out"].updated


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
