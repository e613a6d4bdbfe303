"""A worker notes when it waits for the others: the launcher asks for it when one of them stands still."""

import ast
import threading
from pathlib import Path

import pytest

import fleetx
from fleetx.checkpoint.background import Background
from fleetx.comm import beats
from fleetx.comm.beats import BeatReader, Wait, _Beats
from tests.waiting import wait_for

MESSAGES = {"all_reduce", "reduce", "all_gather", "broadcast", "barrier", "new_group", "init_process_group"}
SOURCE = Path(fleetx.__file__).parent
# What these send, they send as any script does.
SCRIPTS = ("demo", "doctor")


@pytest.fixture
def noted(tmp_path, monkeypatch):
    reader, worker = BeatReader(tmp_path / "beats", 1), _Beats()
    worker.open(reader.place(0))
    monkeypatch.setattr(beats, "waiting", worker.waiting)
    return lambda: Wait(reader.read(0).wait)


def test_it_is_noted_while_it_lasts_also_by_functions_within_others_and_when_they_fail(noted):
    @beats.waiting()
    def inner():
        seen.append(noted())
        raise KeyError

    seen = []
    with beats.waiting(Wait.TO_JOIN):
        with pytest.raises(KeyError):
            inner()
        seen.append(noted())
    assert [*seen, noted()] == [Wait.FOR_OTHERS, Wait.TO_JOIN, Wait.NONE]


def test_another_thread_waits_for_itself_until_the_main_one_waits_for_it(noted):
    goes, seen = threading.Event(), []

    def save():
        with beats.waiting():
            seen.append(noted())
            goes.wait()

    def waited():
        if (now := noted()) not in seen:  # as it was when the main thread looked before
            seen.append(now)
        goes.set() if Wait.FOR_OTHERS in seen else None
        return 1.0

    background = Background(waited)
    background.start(save)
    wait_for(lambda: seen, "thread")
    assert seen == [Wait.NONE]
    join = background._thread.join
    background._thread.join = lambda limit: (waited(), join(limit))
    background.wait()
    assert seen == [Wait.NONE, Wait.FOR_OTHERS]
    assert noted() == Wait.NONE


def test_all_messages_between_workers_are_sent_under_that_note():
    files = [file for file in sorted(SOURCE.rglob("*.py")) if file.relative_to(SOURCE).parts[0] not in SCRIPTS]
    found = [entry for file in files for entry in _messages(file)]
    assert len(found) >= 12
    assert [place for place, waits in found if not waits] == []


def _messages(file):
    def visit(node, waits):
        if isinstance(node, ast.With | ast.FunctionDef):
            said = (
                node.decorator_list if isinstance(node, ast.FunctionDef) else [item.context_expr for item in node.items]
            )
            waits = waits or any("beats.waiting(" in ast.unparse(expression) for expression in said)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"dist.{name}" for name in MESSAGES}:
            yield f"{file.relative_to(SOURCE)}:{node.lineno}", waits
        for child in ast.iter_child_nodes(node):
            yield from visit(child, waits)

    return visit(ast.parse(file.read_text()), False)
