"""docs/guide-scripts.md shows what separates our scripts from the guide's own code, and shows it exactly.

After a change of a script, `python -m tests.test_guide_scripts` writes the page's diffs anew.
"""

import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "examples" / "guide"
PAGE = ROOT / "docs" / "guide-scripts.md"
SCRIPTS = sorted(path.stem for path in GUIDE.glob("*.py"))
BLOCK = re.compile(r"(<!-- diff: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def guides_part(script):
    """What a script takes from the guide, as the guide laid it out: the formatter is off there, and only there."""
    text = (GUIDE / f"{script}.py").read_text(encoding="utf-8")
    _, _, text = text.partition("# fmt: off\n")
    return text.partition("# fmt: on\n")[0].splitlines()


def original(script):
    return (GUIDE / "original" / f"{script}.py.txt").read_text(encoding="utf-8").splitlines()


def diff(script):
    names = (f"original/{script}.py.txt", f"{script}.py")
    return list(difflib.unified_diff(original(script), guides_part(script), *names, n=1, lineterm=""))


def shown(script):
    """The page's block for a script."""
    lines = diff(script)
    if not lines:
        return "Nothing of the guide's code is changed:\n\n" + fenced("python", original(script))
    return fenced("diff", lines)


def fenced(language, lines):
    return "\n".join([f"```{language}", *lines, "```"]) + "\n"


def rewrite():
    """Write the diffs into the page."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda block: block[1] + shown(block[2]) + block[4], text), encoding="utf-8")


def test_the_page_has_every_script():
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert sorted(script for _, script, _, _ in blocks) == SCRIPTS
    assert sorted(path.name.removesuffix(".py.txt") for path in (GUIDE / "original").iterdir()) == SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_page_shows_the_diff_as_it_is(script):
    blocks = {name: content for _, name, content, _ in BLOCK.findall(PAGE.read_text(encoding="utf-8"))}
    assert blocks[script] == shown(script), "run: python -m tests.test_guide_scripts"


@pytest.mark.parametrize("script", ["bert", "resnet_lars"])
def test_every_changed_line_is_an_import_or_a_repair_that_says_why(script):
    added = [line[1:] for line in diff(script)[2:] if line.startswith("+")]
    assert any("repair" in line for line in added)
    for line in added:
        imported = re.fullmatch(r"from fleetx\.compat import \w+( as \w+)?|import fleetx\.compat as X", line)
        assert imported or re.search(r"# repairs?: ", line), line


@pytest.mark.parametrize("script", ["train_fleet_gradient_merge", "train_fleet_recompute"])
def test_strategies_are_the_guides_to_the_letter(script):
    assert diff(script) == []
    assert guides_part(script) == original(script)


@pytest.mark.parametrize("script", ["bert", "resnet_lars"])
def test_every_repair_is_in_the_pages_table(script):
    """One row each: two may share a line."""
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index(f"<!-- diff: {script} -->") :].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!guide|---).*\|$", section, re.MULTILINE)
    comments = [line.partition("# repair")[2] for line in guides_part(script) if "# repair" in line]
    assert len(rows) == sum(1 + comment.startswith("s:") for comment in comments)


if __name__ == "__main__":
    rewrite()
