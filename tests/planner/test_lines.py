"""Lines through measurements: straight, with floors, and bent where many samples are another matter."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetx.planner.lines import Line, Lines


def test_two_sizes_give_a_straight_line():
    values = [1.0, 1.2]
    assert Line.of_time((2, 4), values) == Line.through((2, 4), values)


def test_one_slow_step_at_the_smallest_size_is_no_floor_for_all():
    line = Line.of_time((2, 64, 128), [5.0, 1.0, 2.0])
    assert line.at(64) == pytest.approx(1.0)
    assert line.at(128) == pytest.approx(2.0)


@given(
    values=st.lists(st.floats(0, 1e9), min_size=4, max_size=4),
    steps=st.tuples(*[st.integers(1, 300)] * 4),
    micro_batch=st.integers(1, 5000),
)
def test_bent_lines_go_through_what_was_measured_and_many_at_once_are_the_same(values, steps, micro_batch):
    sizes, values = list(itertools.accumulate(steps)), sorted(values)
    line = Line.bent(sizes, values)
    near = Line.through(sizes[:2], values[:2])
    for size, value in zip(sizes[2:], values[2:], strict=True):
        assert line.at(size) == pytest.approx(value, rel=1e-9, abs=1e-6)
    assert [line.at(size) for size in sizes[:2]] == [near.at(size) for size in sizes[:2]]
    assert Line.bent(sizes[:2], values[:2]) == near
    both = [line, near, Line(1, 2, 500)]
    expected = [one.at(micro_batch) for one in both]
    assert Lines(both).at(micro_batch).tolist() == pytest.approx(expected, rel=1e-12)


@given(values=st.lists(st.floats(0, 1e9), min_size=4, max_size=4), pair=st.tuples(*[st.integers(4, 4000)] * 2))
def test_bent_lines_of_what_grows_never_fall(values, pair):
    line = Line.bent((2, 4, 64, 128), sorted(values))
    few, many = sorted(pair)
    assert line.at(few) <= line.at(many) * (1 + 1e-9) + 1e-6


@pytest.mark.parametrize("line", [Line(), Line(1.0, 2.0, 3.0), Line.bent((2, 4, 64, 128), (1.0, 2.0, 9.0, 20.0))])
def test_lines_are_read_as_they_were_written(line):
    assert Line.read(json.loads(json.dumps(line))) == line
    with pytest.raises(ValueError, match="unpack"):
        Line.read([1.0, 2.0])
