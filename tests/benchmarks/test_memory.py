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
    rows = [(case.model, row.name, row.batch) for case, row in memory.all_rows()]
    assert len(set(rows)) == len(rows)


def test_a_row_that_is_measured_anew_replaces_the_old_one():
    case, row = memory.all_rows()[0]
    first, second = (memory.described(case, row, {"samples_per_s": speed}) for speed in (1.0, 2.0))
    other = memory.described(*memory.all_rows()[1], {"samples_per_s": 3.0})
    assert [r["samples_per_s"] for r in memory.merged([first, other], second)] == [3.0, 2.0]


def test_states_of_equal_neighbours_are_folded():
    segments = memory.layers(4, (3, memory.AGAIN), (1, memory.MANY | memory.ON_HOST))
    assert memory.described(BERT, memory.Row("x", 1, "ours", segments), {})["states"] == [
        "bert.encoder.layer.0 … bert.encoder.layer.2: inputs on the device",
        "bert.encoder.layer.3 … bert.encoder.layer.3: dear attention+matmul on the host",
    ]
