"""Simulated planning problems, and how fast the plans were that an exhaustive search found for them.

`searched.json` was written once by `python -m tests.planner.problems`, with the dynamic program, bounds and proofs that
the planner had until November 2026 (commit b2d66f3). The present search is compared with these results.
"""

import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fleetx.planner.chain import State
from fleetx.planner.costs import OptionCost, Profile, Reserve, SegmentCost
from fleetx.planner.fitting import DoesNotFit
from fleetx.planner.lines import Bend, Line
from fleetx.planner.making import plan_for
from tests.planner.work import Work

COUNT = 1200
RESULTS = Path(__file__).with_name("searched.json")
MIB = 2**20
_ROOM = (0.0, 0.001, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.1)  # between the least memory and plenty


class Searched(NamedTuple):
    """One problem, and what the exhaustive search found."""

    seed: int
    memory: int
    least_memory: int
    seconds: float  # of an update
    calls: int  # of Python functions, as a measure of its work


def searched() -> list[Searched]:
    """All that are on file."""
    return [Searched(*row) for row in json.loads(RESULTS.read_text())["problems"]]


def problem(seed: int) -> tuple[Profile, dict]:
    """A made-up profile, and a question about it without a budget."""
    draw = random.Random(seed)
    segments = [_segment(seed, f"blocks.{i}", size, speed) for i, (size, speed) in enumerate(_sizes(draw))]
    parameters = int(draw.uniform(5, 60) * MIB * len(segments))
    late = draw.random() < 0.5
    profile = Profile(
        tuple(segments),
        tail_bytes=Line(0, draw.uniform(0, 60) * MIB),
        tail_forward_seconds=Line(1e-4, draw.uniform(0, 2e-4)),
        tail_backward_seconds=Line(1e-4, draw.uniform(0, 4e-4)),
        fixed={"parameters": parameters, "gradients": parameters, "optimizer": 2 * parameters},
        batch_bytes=Line(0, draw.choice([100, 600_000])),
        update_seconds=draw.choice([0.0, 5e-3]),
        update_bytes=draw.choice([0, parameters // 2]),
        bandwidth=draw.choice([0.0, 0.0, 3e9, 12e9, 50e9, 50e9]),
        reserve=draw.choice([Reserve(), Reserve(1.01, 40 * MIB)]),
        gradient_parts=_parts(draw, parameters, len(segments) + 1) if late else (),
        smallest=draw.choice([1, 1, 1, 2]),
    )
    question = {"global_batch": draw.choice([1, 8, 50, 64, 96, 97, 256, 1000, 1024, 4096])}
    kind = draw.choice(["free", "free", "free", "one_forward", "k_steps", "even"])
    if kind in ("one_forward", "even"):
        question[kind] = True
    elif kind == "k_steps":
        question[kind] = draw.choice([1, 2, 4, 7])
    if profile.bandwidth and draw.random() < 0.3:
        question["host_memory"] = int(draw.uniform(0, 40) * 2**30)
    return profile, question


def _sizes(draw: random.Random) -> list[tuple[float, float]]:
    """Bytes and seconds of each segment, relative to a layer of a transformer."""
    count = draw.choice([1, 2, 3, 4, 6, 8, 12, 16, 24, 24, 32, 48, 70])
    kind = draw.choice(["layers", "stages", "hourglass", "two stacks", "differing"])
    if kind == "layers":
        return [(1.0, 1.0)] * count
    if kind == "stages":
        return [(0.5 ** (4 * i // count) * 4, 1.0 + (4 * i // count) / 4) for i in range(count)]
    if kind == "hourglass":
        depth = [min(i, count - 1 - i) for i in range(count)]
        return [(4.0 * 0.6**d, 2.0 * 0.9**d) for d in depth]
    if kind == "two stacks":
        return [(1.0, 1.0)] * (count // 2) + [(draw.uniform(0.3, 3), draw.uniform(0.5, 2))] * (count - count // 2)
    return [(draw.uniform(0.3, 2.0), draw.uniform(0.5, 1.5)) for _ in range(count)]


def _segment(seed: int, name: str, size: float, speed: float) -> SegmentCost:
    shape = random.Random(f"{seed} {size} {speed}")  # the same for all segments that are alike
    overhead = shape.choice([1e-6, 5e-5, 2e-4])
    everything = size * shape.uniform(10, 30)
    boundary = size * shape.uniform(0.5, 2)
    launches = shape.choice([0.0, 0.0, 1e-3])
    bend = Bend(16, 64, 64 * 4.4e-5 * speed, 3.6e-5 * speed) if shape.random() < 0.2 else Bend()
    rows = [("everything", (), 0.0, everything), ("inputs", (), 1.0, boundary)]
    if shape.random() < 0.8:
        rows.append(("dear", (), shape.uniform(0.1, 0.4), everything * shape.uniform(0.3, 0.6)))
    if shape.random() < 0.4:
        narrow = ("attention", "narrow_matmul")
        rows.append(("dear", narrow, shape.uniform(0.4, 0.7), everything * shape.uniform(0.15, 0.3)))
    holds = boundary if shape.random() < 0.3 else 0.0
    options = []
    for save, expensive, again, kept in rows:
        here = OptionCost(
            State(save, "device", *([expensive] if expensive else [])),
            Line(overhead * (2 + again), 4e-5 * speed * (2 + again)),
            kept=Line(0, kept * MIB),
            forward_bytes=Line(0, (everything if save == "everything" else kept + 0.4 * everything) * MIB),
            backward_bytes=Line(0, 1.3 * everything * MIB),
            holds=Line(0, holds * MIB if save == "everything" else 0.0),
            launches=launches * (3 + again),
        )
        away = replace(
            here,
            state=here.state._replace(home="host"),
            kept=Line(0, 0.02 * kept * MIB),
            sent=Line(0, 0.98 * kept * MIB),
            holds=Line(),
            released=Line(0, boundary * MIB),
        )
        options += [here, away]
    return SegmentCost(name, Line(overhead, 4e-5 * speed, 0.0, bend), tuple(options))


def _parts(draw: random.Random, total: int, count: int) -> tuple[int, ...]:
    shares = [draw.uniform(0.5, 1.5) for _ in range(count)]
    parts = [int(total * share / sum(shares)) for share in shares]
    parts[-1] += total - sum(parts)
    return tuple(parts)


def plenty(profile: Profile, question: dict) -> int:
    """A budget that is not binding, or hardly."""
    return plan_for(profile, memory=2**50, curve=False, **question).peak


def least_memory(profile: Profile, question: dict) -> int | None:
    """The least memory that a message names; None if no amount is enough."""
    try:
        plan_for(profile, memory=1, curve=False, **question)
    except DoesNotFit as error:
        return error.least_memory
    raise AssertionError("nothing fits into one byte")


def _search(seed: int) -> Searched:
    profile, question = problem(seed)
    least = least_memory(profile, question)
    assert least is not None
    most = plenty(profile, question)
    memory = least + int(random.Random(-1 - seed).choice(_ROOM) * max(0, most - least))
    with Work() as work:
        plan = plan_for(profile, memory=memory, curve=False, **question)
    return Searched(seed, memory, least, plan.seconds, work.calls)


if __name__ == "__main__":
    began = time.perf_counter()
    found = []
    for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else COUNT):
        found.append(_search(number))
        if number % 50 == 49:
            print(f"{number + 1} problems in {time.perf_counter() - began:.0f} s", flush=True)
    rows = ",\n".join(json.dumps(one) for one in found)
    RESULTS.write_text(f'{{"problems": [\n{rows}\n]}}\n')
