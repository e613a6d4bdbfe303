from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetx.planner.chain import Chain, Option, Stage, State, evaluate, evaluate_all, evaluate_exchanges
from fleetx.planner.solver import fits, least_memory, solve, tidy
from tests.planner.chains import DEVICE, HOST, by_brute_force, chains, layers, walk
from tests.planner.work import Work

GIB = 2**30
budgets, caps = st.integers(0, 160), st.sampled_from([0, 3, 8, 20, 1000])
property_test = settings(max_examples=150, derandomize=True)


@property_test
@given(chains(), budgets, caps)
def test_small_chains_have_the_fastest_choice_or_almost(chain, memory, host_memory):
    best = by_brute_force(chain, memory, host_memory)
    found = solve(chain, memory, host_memory)
    assert (found is None) == (best is None)
    if found is not None:
        assert best <= found.seconds <= 1.1 * best + 1e-9


@property_test
@given(chains(), budgets, caps)
def test_the_solution_is_within_its_budgets_whoever_counts(chain, memory, host_memory):
    found = solve(chain, memory, host_memory)
    if found is not None:
        peak, on_host, seconds = walk(chain, found.choice)
        assert peak == found.peak <= memory
        assert on_host == found.host_bytes <= host_memory
        assert seconds == pytest.approx(found.seconds)


@property_test
@given(chains(), caps)
def test_the_least_memory_is_enough_and_hardly_more_than_that(chain, host_memory):
    least = least_memory(chain, host_memory)
    if least is None:
        assert solve(chain, 10**6, host_memory) is None
    else:
        assert solve(chain, least, host_memory) is not None
        assert by_brute_force(chain, int(least * 0.95) - 1, host_memory) is None


@property_test
@given(chains(), budgets, caps)
def test_what_fits_is_known_without_a_search(chain, memory, host_memory):
    assert fits(chain, memory, host_memory) == (solve(chain, memory, host_memory) is not None)


@property_test
@given(chains(), st.data())
def test_many_choices_are_evaluated_at_once_as_one_by_one(chain, data):
    choices = [[data.draw(st.integers(0, len(stage.options) - 1)) for stage in chain.stages] for _ in range(3)]
    costs = evaluate_all(chain, np.array(choices))
    for number, choice in enumerate(choices):
        one = evaluate(chain, choice)
        assert (costs.peak[number], costs.host[number]) == (one.peak, one.host_bytes)
        assert costs.seconds[number] == pytest.approx(one.seconds)
        assert costs.waits[number] == bool(one.waits)


@property_test
@given(chains(), st.data())
def test_exchanges_are_evaluated_at_once_as_one_by_one(chain, data):
    choice = [data.draw(st.integers(0, len(stage.options) - 1)) for stage in chain.stages]
    costs, before = evaluate_exchanges(chain, np.array(choice)), evaluate(chain, choice)
    for i, stage in enumerate(chain.stages):
        for option in range(len(stage.options)):
            one = evaluate(chain, [*choice[:i], option, *choice[i + 1 :]])
            assert (costs.peak[i, option], costs.host[i, option]) == (one.peak, one.host_bytes)
            assert costs.seconds[i, option] == pytest.approx(one.seconds)
            assert before.waits or costs.waits[i, option] == bool(one.waits)


@property_test
@given(chains(), st.data())
def test_the_evaluation_agrees_with_a_walk_through_the_step(chain, data):
    choice = [data.draw(st.integers(0, len(stage.options) - 1)) for stage in chain.stages]
    cost, walked = evaluate(chain, choice), walk(chain, choice)
    assert bool(cost.waits) == (walked is None)
    if walked is not None:
        assert (cost.peak, cost.host_bytes) == walked[:2]
        assert cost.seconds == pytest.approx(walked[2])
        assert sum(cost.peak_by_kind.values()) == cost.peak
        assert sum(point.seconds for point in cost.points) == pytest.approx(cost.seconds)


@pytest.mark.parametrize("kinds", [1, 4, 200])
def test_two_hundred_segments_are_little_work(kinds):
    chain = layers(200, kinds=kinds)
    with Work() as work:
        found = solve(chain, 40 * GIB, 500 * GIB)
    assert work.calls < 600_000
    assert found.peak <= 40 * GIB
    assert solve(chain, 40 * GIB, 500 * GIB) == found


def test_a_chain_without_segments_is_its_tail():
    chain = Chain((), {"parameters": 5}, tail_bytes=3, tail_forward_seconds=1, tail_backward_seconds=2)
    assert solve(chain, 8).seconds == 3
    assert solve(chain, 7) is None
    assert least_memory(chain) == 8


def test_an_input_that_the_segment_before_holds_is_not_freed_by_sending_it_away():
    holding = Option(DEVICE, 1, kept=10, forward_bytes=12, backward_bytes=12, holds=4)
    sending = Option(HOST, 1, kept=0, forward_bytes=4, backward_bytes=4, sent=4, released=4)
    chain = Chain((Stage("a", 10, (holding,)), Stage("b", 10, (sending,))), {}, 1, 10, 10, 0, 1.0)
    assert evaluate(chain, (0, 0)).points[2].kept == 14


def sending(seconds, waiting):
    """Four segments, each of which may keep ten bytes or send them."""
    options = (
        Option(State("everything"), seconds, kept=10, forward_bytes=10, backward_bytes=10),
        Option(
            State("everything", "host"),
            seconds,
            kept=0,
            forward_bytes=10,
            backward_bytes=10,
            sent=10,
            released=10,
            waiting=waiting,
        ),
    )
    return Chain(tuple(Stage(f"s{i}", 1, options) for i in range(4)), {}, 1, 1, seconds, 0, bandwidth=5.0)


def test_a_copy_that_the_backward_would_wait_for_is_not_allowed():
    chain = sending(seconds=1, waiting=0)  # ten bytes come back in two
    assert evaluate(chain, (1, 0, 0, 0)).waits
    assert solve(chain, 1000).choice == (0, 0, 0, 0)
    assert least_memory(chain) == evaluate(chain, (0, 0, 0, 0)).peak


def test_a_copy_that_the_forward_waits_for_costs_time():
    chain = sending(seconds=2, waiting=1)
    assert solve(chain, 1000).seconds == 15
    least = solve(chain, least_memory(chain))
    assert least.choice == (1, 1, 1, 0)  # the last one is there when it is needed, and makes no difference
    assert least.seconds == 15 + 3


def test_equal_segments_with_equal_states_stand_together():
    chain = layers(12)
    found = solve(chain, 6 * GIB)
    names = [stage.options[number].state for stage, number in zip(chain.stages, found.choice, strict=True)]
    changes = sum(a != b for a, b in pairwise(names))
    assert changes == len(set(names)) - 1
    assert tidy(chain, found.choice) == found.choice
