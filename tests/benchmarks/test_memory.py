"""The rows of the memory benchmark, small and on the host: each must run, and do the same arithmetic."""

import pytest

from benchmarks import memory
from benchmarks.train import Case

TINY = (("layers", 4), ("width", 32), ("heads", 2), ("intermediate", 64), ("vocab_size", 100), ("max_positions", 32))
BERT = Case("bert_base", 4, sequence=32, masked=4, sizes=TINY)
ROWS = {row.name: row for row in memory.bert_rows(count=4, scale=1 / 64)}


@pytest.mark.full  # compiles each row
@pytest.mark.filterwarnings("ignore:::torch")  # of a compiler that looks at everything
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_every_row_runs(row):
    figures = memory.measure_here(BERT, row, "cpu", warm_s=0.0, timed_s=0.0)
    assert figures["samples_per_s"] > 0


def test_every_row_is_a_row_of_its_own():
    rows = [(case.model, row.name, row.batch, row.cap) for case, row in memory.all_rows()]
    assert len(set(rows)) == len(rows)


def test_a_row_that_is_measured_anew_replaces_the_old_one():
    case, row = memory.all_rows()[0]
    first, second = (memory.described(case, row, {"samples_per_s": speed}) for speed in (1.0, 2.0))
    other = memory.described(*memory.all_rows()[1], {"samples_per_s": 3.0})
    assert [r["samples_per_s"] for r in memory.merged([first, other], second)] == [3.0, 2.0]


@pytest.fixture
def processes(monkeypatch):
    """Fresh processes that give these figures one after the other; the arguments of each are noted."""
    figures, started = [], []
    monkeypatch.setattr(memory, "_started", lambda number, *arguments: started.append(arguments) or number)
    monkeypatch.setattr(memory, "_run", lambda runs: [figures.pop(0) for _ in runs])
    return figures, started


def number_of(**wanted):
    rows = enumerate(memory.all_rows())
    return next(n for n, (_, row) in rows if all(getattr(row, name) == value for name, value in wanted.items()))


def test_a_row_close_to_its_limit_must_pass_in_five_processes(processes):
    figures, started = processes
    figures += [{"samples_per_s": 2.0, "reserved_gib": 30.0}] * memory.RUNS
    number = number_of(name="recompute, offload", batch=2600)
    found = memory.measure(number)
    assert found == {"samples_per_s": 2.0, "reserved_gib": 30.0, "runs": 5, "reserved_again_gib": [30.0] * 4}
    assert started == [(), *[("passes",)] * 4]
    assert memory.is_proven(memory.described(*memory.all_rows()[number], found))

    figures += [{"samples_per_s": 2.0, "reserved_gib": 30.0}] * 4 + [{"failed": "no room"}]
    failed = memory.measure(number)
    assert failed == {"runs": 5, "failures": 1, "failed": "no room"}
    assert not memory.is_proven(memory.described(*memory.all_rows()[number], failed))


def test_a_row_with_room_to_spare_runs_once_and_the_largest_by_hand_shows_that_twice_as_many_fail(processes):
    figures, started = processes
    figures += [{"samples_per_s": 2.0, "reserved_gib": 20.0}, {"failed": "no room"}]
    found = memory.measure(number_of(is_largest=True, batch=512))
    assert found == {
        "samples_per_s": 2.0,
        "reserved_gib": 20.0,
        "twice_as_many": "no room",
        "runs": 1,
        "reserved_again_gib": [],
    }
    assert started == [(), ("twice",)]


def test_an_old_row_close_to_its_limit_is_not_published_before_it_passed_again():
    case, row = memory.all_rows()[number_of(batch=1200)]
    assert not memory.is_proven(memory.described(case, row, {"samples_per_s": 1.0, "reserved_gib": 31.0}))
    assert memory.is_proven(memory.described(case, row, {"samples_per_s": 1.0, "reserved_gib": 20.0}))


def test_states_of_equal_neighbours_are_folded():
    segments = memory.layers(4, (3, memory.AGAIN), (1, memory.MANY | memory.ON_HOST))
    assert memory.described(BERT, memory.Row("x", 1, "ours", segments), {})["states"] == [
        "bert.encoder.layer.0 … bert.encoder.layer.2: inputs on the device",
        "bert.encoder.layer.3 … bert.encoder.layer.3: dear attention+matmul on the host",
    ]
