"""torch's own tables of operators and modules, plain against recompute: equal to the last bit, errors included.

Each test goes through a shard of a table, hundreds of cases: importing and sampling torch's tables takes seconds.
"""

import importlib.util

import pytest

from tests.memory import tables

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("expecttest") is None,
        reason="without expecttest, which torch's tables import: pip install -r requirements/dev.txt",
    ),
    pytest.mark.filterwarnings("ignore"),  # torch's tables try what is deprecated too
]
OPERATOR_SHARDS = 36
MODULE_SHARDS = 12
SOME_OPERATORS = ("narrow", "split_with_sizes", "nn.functional.ctc_loss", "nn.functional.rrelu", "index_put")
SOME_MODULES = ("nn.BatchNorm1d", "nn.GRUCell", "nn.Conv2d")


@pytest.mark.middle
@pytest.mark.parametrize(("table", "names"), [("operators", SOME_OPERATORS), ("modules", SOME_MODULES)])
def test_some_rows_equal_the_plain_run(table, names):
    cases = list(getattr(tables, table)(0, 1, names))
    assert {case.known for case in cases} == set(names)
    assert [line for case in cases for line in tables.complaints(case)] == []


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shard", range(OPERATOR_SHARDS))
def test_operators_equal_the_plain_run(shard):
    assert [line for case in tables.operators(shard, OPERATOR_SHARDS) for line in tables.complaints(case)] == []


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shard", range(MODULE_SHARDS))
def test_modules_equal_the_plain_run(shard):
    assert [line for case in tables.modules(shard, MODULE_SHARDS) for line in tables.complaints(case)] == []
