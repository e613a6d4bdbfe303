import pytest

from tests.test_docs import run_page


@pytest.mark.middle
def test_the_blocks_of_the_page_run_and_print_what_they_say(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run_page("fleetrun.md", monkeypatch, tmp_path)
