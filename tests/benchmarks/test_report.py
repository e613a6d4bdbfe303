import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from benchmarks import digits
from benchmarks.__main__ import app
from benchmarks.report.batches import draw_batches
from benchmarks.report.tables import TABLES, digits_rows, fill_in

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_pages_tables_are_those_of_the_saved_results(page):
    text = page.read_text(encoding="utf-8")
    assert fill_in(text, RESULTS) == text


def test_every_table_is_in_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in TABLES if f"<!-- table: {name} -->" not in text] == []


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: path.stem)
def test_every_result_names_its_machine_versions_and_command(path):
    result = json.loads(path.read_text())
    assert {"machine", "versions", "command", "taken"} <= result.keys()
    assert result["versions"]["torch"]


def test_an_unknown_table_is_named():
    with pytest.raises(ValueError, match="no table 'speed'; there are digits, step, reduce"):
        fill_in("<!-- table: speed -->\n<!-- end -->", RESULTS)


def test_the_picture_of_batches_has_a_curve_for_each_way_and_a_panel_for_what_memory_buys(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    results = json.loads((RESULTS / "memory.json").read_text(encoding="utf-8"))["rows"]
    draw_batches([*results, {"model": "bert_large", "name": "recompute", "batch": 9, "failed": "no room"}], tmp_path)
    panels = {axes.get_title(): axes for axes in drawn[0].axes}
    assert {"bert_large", "bert_large, batch 64", "resnet50"} <= set(panels)
    labels = [line.get_label() for line in panels["bert_large"].lines]
    assert len(labels) == len(set(labels))
    assert {"plain, compiled", "recompute", "recompute, offload", "torch checkpoint"} <= set(labels)
    assert 9 not in panels["bert_large"].get_xticks()


@pytest.mark.parametrize(
    "page",
    [
        "<!-- table: step -->\nno end\n\nprose\n\n<!-- table: reduce -->\nold\n<!-- end -->\n",
        "<!-- table: step -->\nold\n<!-- end -->\n\nprose\n\n<!-- table: reduce -->\nno end\n",
    ],
)
def test_a_table_without_an_end_takes_no_prose_with_it(page, tmp_path):
    with pytest.raises(ValueError, match="has no <!-- end -->"):
        fill_in(page, RESULTS)
    (tmp_path / "page.md").write_text(page)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "page.md"), "--results", str(RESULTS)])
    assert done.exit_code == 2
    assert (tmp_path / "page.md").read_text() == page


def test_a_table_without_a_result_stays_as_it_is_and_is_named(tmp_path):
    (tmp_path / "step.json").write_text((RESULTS / "step.json").read_text())
    page = tmp_path / "page.md"
    page.write_text("<!-- table: comm -->\nNot measured yet.\n<!-- end -->\n<!-- table: step -->\n<!-- end -->\n")
    done = CliRunner().invoke(app, ["report", str(page), "--results", str(tmp_path)])
    assert done.exit_code == 0
    assert "1 table made" in done.stdout
    assert "left as they are" in done.stdout
    assert done.stdout.strip().endswith(": comm")
    assert "Not measured yet." in page.read_text()
    assert "| hand-written |" in page.read_text()


@pytest.mark.parametrize("content", ["{", "{}", "[]"])
def test_results_that_are_no_results_are_named(content, tmp_path):
    (tmp_path / "step.json").write_text(content)
    with pytest.raises(ValueError, match=r"step.json does not hold what the table 'step' shows .*: measure it anew"):
        fill_in("<!-- table: step -->\n<!-- end -->", tmp_path)


def test_a_plan_that_needed_the_allocators_limit_is_not_shown():
    result = json.loads((RESULTS / "plan.json").read_text(encoding="utf-8"))
    assert "| bert_large in 32 GiB |" in TABLES["plan"][1](result)
    result["cases"]["bert_large in 32 GiB"]["runs"]["chosen"]["limited"] = 2**35 + 1
    assert "| bert_large in 32 GiB |" not in TABLES["plan"][1](result)


def test_the_digits_have_a_curve_with_a_band_for_each_run(monkeypatch):
    drawn = []
    savefig = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **more: (drawn.append(figure), savefig(figure, *args, **more))
    )
    result = json.loads((RESULTS / "digits" / "seeds.json").read_text(encoding="utf-8"))
    assert digits.draw(result).startswith(b"\x89PNG")
    loss, accuracy = drawn[0].axes
    for axes in (loss, accuracy):
        assert [line.get_label() for line in axes.lines] == list(result["runs"])
        assert len(axes.collections) == 3
    curve = accuracy.lines[0].get_ydata()
    last = [run["accuracy"] for run in next(iter(result["runs"].values()))]
    assert curve[-1] == pytest.approx(sum(last) / len(last))


def test_the_table_of_digits_says_mean_and_spread():
    _, rows = digits_rows({"runs": {"SGD": [{"accuracy": accuracy} for accuracy in (0.98, 0.99, 1.0)]}})
    assert rows == [("SGD", "99.00%", "98.0% to 100.0%", "1.00")]
