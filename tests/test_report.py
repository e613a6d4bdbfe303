import json
from pathlib import Path

import pytest

from fleetx.report.tables import TABLES, fill_in

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def test_the_readmes_tables_are_those_of_the_saved_results():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert fill_in(text, RESULTS) == text
    assert all(f"<!-- table: {name} -->" in text for name in TABLES)


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: path.stem)
def test_every_result_names_its_machine_versions_and_command(path):
    result = json.loads(path.read_text())
    assert {"machine", "versions", "command", "taken"} <= result.keys()
    assert result["versions"]["torch"]


def test_an_unknown_table_is_named():
    with pytest.raises(ValueError, match="no table 'speed'; there are digits, step, reduce"):
        fill_in("<!-- table: speed -->\n<!-- end -->", RESULTS)
