import pytest

from tests.test_docs import run_page


@pytest.mark.timeout(240)
def test_the_page_of_the_planner_runs_and_prints_what_it_says(tmp_path, monkeypatch):
    run_page("planner.md", monkeypatch, tmp_path)
