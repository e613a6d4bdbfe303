"""Chains for tests, and an evaluator that shares nothing with the planner's: it walks through the step."""

import itertools
import random

from hypothesis import strategies as st

from fleetx.planner.chain import Chain, Option, Stage, State

DEVICE, HOST = State("inputs", "device"), State("inputs", "host")


def walk(chain, choice):
    """Peak, host bytes, seconds, and whether nothing waits for a copy; None for figures that do not matter then."""
    options = [stage.options[number] for stage, number in zip(chain.stages, choice, strict=True)]
    base = sum(chain.fixed.values())
    gradients = list(chain.gradients or [0] * (len(options) + 1))
    on_device, on_host, seconds = base, 0, 0
    peak = base + chain.update_bytes + sum(gradients)
    residents, leaving, before = [], 0, None
    forwards = [stage.forward_seconds for stage in chain.stages] + [chain.tail_forward_seconds]
    for number, option in enumerate(options):
        seconds += forwards[number] + option.waiting
        peak = max(peak, on_device + option.forward_bytes + leaving)
        resident = option.kept
        if before is not None:
            resident += min(before.holds, option.released)
        residents.append(resident)
        on_device += resident
        leaving = option.sent
        on_host += option.sent
        before = option
    on_device += gradients.pop()
    peak = max(peak, on_device + chain.tail_bytes + leaving)
    seconds += chain.tail_forward_seconds + chain.tail_backward_seconds
    lasting = chain.tail_backward_seconds
    for number in reversed(range(len(options))):
        if options[number].sent > chain.bandwidth * lasting:
            return None
        on_device += gradients.pop() - residents[number]
        coming = options[number - 1].sent if number else 0
        peak = max(peak, on_device + options[number].backward_bytes + coming)
        lasting = options[number].seconds
        seconds += lasting
    assert on_device == base + sum(chain.gradients)
    return peak, on_host, seconds


def by_brute_force(chain, memory, host_memory):
    """The least seconds of any choice that is allowed, or None."""
    found = [
        cost
        for choice in itertools.product(*(range(len(stage.options)) for stage in chain.stages))
        if (cost := walk(chain, choice)) is not None
    ]
    return min((s for peak, host, s in found if peak <= memory and host <= host_memory), default=None)


small = st.integers(0, 12)


@st.composite
def options(draw):
    sent = draw(st.sampled_from([0, 0, 1, 3, 6]))
    kept = draw(small)
    return Option(
        HOST if sent else DEVICE,
        seconds=draw(st.integers(0, 9)),
        kept=kept,
        forward_bytes=kept + draw(small),
        backward_bytes=kept + draw(small),
        sent=sent,
        holds=0 if sent else draw(st.sampled_from([0, 0, 2, 4])),
        released=draw(st.integers(0, sent)),
        waiting=draw(st.sampled_from([0, 0, 1, 4])) if sent else 0,
    )


@st.composite
def chains(draw, most_segments=6, most_options=4):
    kinds = draw(st.lists(st.lists(options(), min_size=1, max_size=most_options), min_size=1, max_size=3))
    order = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=most_segments))
    stages = [Stage(f"s{i}", draw(st.integers(0, 5)), tuple(kinds[kind])) for i, kind in enumerate(order)]
    return Chain(
        tuple(stages),
        fixed={"parameters": draw(small), "gradients": draw(small)},
        tail_bytes=draw(small),
        tail_forward_seconds=draw(st.integers(0, 5)),
        tail_backward_seconds=draw(st.integers(0, 5)),
        update_bytes=draw(small),
        bandwidth=draw(st.sampled_from([0, 1, 2, 100])),
        gradients=tuple(draw(st.lists(small, min_size=len(order) + 1, max_size=len(order) + 1)))
        if draw(st.booleans())
        else (),
    )


def layers(count, *, kinds=1, seed=0, choices=5):
    """A chain as of a transformer, or with `kinds` different segments."""
    draw = random.Random(seed)
    made = []
    for _ in range(kinds):
        scale = 1.0 if kinds == 1 else draw.uniform(0.3, 2.0)
        boundary, everything = int(40e6 * scale), int(700e6 * scale * draw.uniform(0.9, 1.1))
        forward = 0.01 * scale * draw.uniform(0.8, 1.2)
        rows = [("everything", 0.0, everything), ("dear", 0.25, int(everything * 0.45)), ("inputs", 1.0, boundary)]
        stage_options = []
        for save, again, kept in rows:
            for home in ("device", "host"):
                sent = 0 if home == "device" else kept
                stage_options.append(
                    Option(
                        State(save, home),
                        forward * (2 + again),
                        kept - sent,
                        everything + boundary,
                        everything + 3 * boundary,
                        sent,
                    )
                )
        del stage_options[1]
        made.append((forward, tuple(stage_options[:choices])))
    stages = [Stage(f"layer.{i}", *made[i * kinds // count]) for i in range(count)]
    if kinds > count // 2:
        stages = [Stage(f"layer.{i}", *made[i]) for i in range(count)]
    return Chain(tuple(stages), {"parameters": 10**9}, 10**8, 0.01, 0.02, 0, 50e9)
