import json
from pathlib import Path

import pytest

from fleetx.report.tables import TABLES, fill_in

ROOT = Path(__file__).parent.parent
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
