import pytest

from fleetx.checkpoint.__main__ import main
from tests.checkpoint.making import Parts
from tests.test_docs import run_page


@pytest.mark.middle
def test_the_blocks_of_the_page_run_and_print_what_they_say(tmp_path, monkeypatch):
    run_page("checkpoints.md", monkeypatch, tmp_path)


def test_the_command_says_which_checkpoints_are_whole(tmp_path, capsys):
    assert main([str(tmp_path / "nothing")]) == 2
    assert "is none" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 0
    assert "no checkpoints" in capsys.readouterr().out
    parts = Parts(tmp_path)
    parts.saved(3)
    assert main([str(tmp_path)]) == 0
    (parts.saved(4) / "shared.json").unlink()
    capsys.readouterr()
    assert main([str(tmp_path)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first == "save-000002-step-4  DAMAGED  shared.json is missing"
    assert second.startswith("save-000001-step-3  whole  0.0 MiB  1 worker  ")
