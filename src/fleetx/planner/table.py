"""A plan as a person reads it."""

import re
from collections.abc import Sequence
from itertools import groupby

from fleetx.planner.chain import State
from fleetx.planner.plan import Plan
from fleetx.units import format_bytes

_WORDS = {
    ("everything", "device"): "everything kept",
    ("everything", "host"): "everything on the host",
    ("inputs", "device"): "inputs kept, the rest computed again",
    ("inputs", "host"): "inputs on the host, the rest computed again",
}

_MEANINGS = {
    "working": "what the segment that runs at the peak takes for itself",
    "update": "what the optimizer takes for itself: the peak is in its update",
    "in flight": "on the way to the host or back",
    "unexplained": "by how much a real step differed from the prediction",
    "gaps": "between tensors, too small for the next one",
    "allocator": "what it takes in whole steps",
    "others": "what else this process has on the device",
}

_MOST_RUNS = 4  # in the name of a row


def in_words(state: State) -> str:
    """What happens to a segment."""
    if state.save == "dear":
        where = "kept" if state.home == "device" else "on the host"
        dear = ", ".join(kind.replace("_", " ") for kind in state.dear)
        return f"inputs and {dear} outputs {where}, the rest computed again"
    return _WORDS[state.save, state.home]


def folded(names: Sequence[str], states: Sequence[State]) -> list[tuple[str, int, State]]:
    """Runs of segments with the same state: their names in short, how many they are, the state.

    A block that is cut inside is one thing: blocks with equal states of their parts are one run, a row for each part.
    """
    rows = []
    blocks = _blocks(list(zip(names, states, strict=True)))
    for _, run in groupby(blocks, key=lambda block: [segment[1] for segment in block]):
        for parts in zip(*run, strict=True):
            listed = [name for name, _ in parts]
            rows.append((_in_short(listed), len(listed), parts[0][1]))
    return rows


def _blocks(segments: list[tuple[str, State]]) -> list[list[tuple[str, State]]]:
    """The segments, with those inside of a module together with the one that this module ends."""
    blocks: list[list[tuple[str, State]]] = []
    for name, state in segments:
        block = [(name, state)]
        while blocks and blocks[-1][-1][0].startswith(name + "."):
            block = blocks.pop() + block
        blocks.append(block)
    return blocks


def summary(states: Sequence[State]) -> str:
    """All states in a line."""
    if not states:
        return "everything kept"
    counts = {state: list(states).count(state) for state in dict.fromkeys(states)}
    if len(counts) == 1:
        return f"all: {in_words(states[0])}"
    return "; ".join(f"{count} of {len(states)}: {in_words(state)}" for state, count in counts.items())


def _in_short(names: list[str]) -> str:
    """`encoder.layer.0-16` for a run of names that differ in one number; several such runs, or `first … last`."""
    runs: list[list[str]] = []
    for name in names:
        if runs and _run(runs[-1] + [name]):
            runs[-1].append(name)
        else:
            runs.append([name])
    if len(runs) > _MOST_RUNS:
        return f"{names[0]} … {names[-1]}"
    return ", ".join(_run(run) for run in runs)


def _run(names: list[str]) -> str:
    """Names that differ in one number, as one; nothing if they differ in something else."""
    if len(names) == 1:
        return names[0]
    parts = [re.split(r"(\d+)", name) for name in names]
    if len({len(part) for part in parts}) > 1:
        return ""
    columns = list(zip(*parts, strict=True))
    varying = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    if len(varying) != 1 or varying[0] % 2 == 0:
        return ""
    numbers = [int(number) for number in columns[varying[0]]]
    if numbers != sorted(numbers):
        return ""
    first, last = columns[varying[0]][0], columns[varying[0]][-1]
    return "".join([*parts[0][: varying[0]], f"{first}–{last}", *parts[0][varying[0] + 1 :]])


def as_text(plan: Plan) -> str:
    """The whole table."""
    batch = f"global batch {plan.global_batch:,}"
    if plan.k_steps == 1:
        head = f"{batch}: one forward of {plan.micro_batch:,}"
    else:
        head = f"{batch}: micro-batch {plan.micro_batch:,} × {plan.k_steps:,} merged{_shorter(plan)}"
    of_budget = f"{format_bytes(plan.peak)} of {format_bytes(plan.memory)}"
    lines = [
        f"Plan for {plan.device or 'a device'}{', compiled' if plan.compile else ''}",
        f"  {head}",
        f"  {_speed(plan)} per update, peak {of_budget}",
        f"  {_status(plan)}",
        f"  Why: {plan.reason}",
        *(f"  Note: {note}" for note in plan.notes),
        "",
        *_columns(
            "segments, by the modules that end them",
            [(name, _count(count), in_words(state)) for name, count, state in folded(plan.names, plan.states)],
        ),
        *_columns(
            "peak",
            [(kind, format_bytes(size), _MEANINGS.get(kind, "")) for kind, size in plan.peak_by_kind.items() if size],
        ),
    ]
    if plan.host_bytes:
        lines += _columns("host", [("activations", format_bytes(plan.host_bytes))])
    beside = "" if plan.measured is None else ", as predicted"  # where the speed of the plan itself is known
    lines += _columns(
        f"runners-up{beside}",
        [
            (f"{one.micro_batch:,} × {one.k_steps:,}", f"{one.samples_per_s:,.1f} samples/s", one.states)
            for one in plan.runners_up
        ],
    )
    lines += _columns(
        f"with more or less memory{beside}",
        [
            (format_bytes(one.memory), f"{one.samples_per_s:,.1f} samples/s", f"{one.micro_batch:,} × {one.k_steps:,}")
            for one in plan.curve
        ],
    )
    return "\n".join([*lines, _how_long(plan)]).rstrip()


def _how_long(plan: Plan) -> str:
    """What the planner itself took, without starting Python and making the model."""
    if not plan.planning_seconds:
        return ""
    parts = "measuring, planning and verifying" if plan.verified else "measuring and planning"
    return f"  The planner took {_seconds(plan.planning_seconds)}: {parts}."


def _shorter(plan: Plan) -> str:
    """Where the batch cannot be cut evenly, some slices have a sample less."""
    return f", {plan.shorter:,} of them with {plan.micro_batch - 1:,}" if plan.shorter else ""


def _speed(plan: Plan) -> str:
    """What is known if it is known, else what was predicted."""
    seconds = plan.seconds if plan.measured is None else plan.measured.seconds or plan.seconds
    return f"{plan.global_batch / seconds:,.1f} samples/s, {_seconds(seconds)}"


def _status(plan: Plan) -> str:
    if plan.measured is None:
        return "Predicted, not yet verified by a real step."
    peak, seconds = plan.measured
    return (
        f"Verified: a real step took {format_bytes(peak)} ({_difference(peak / plan.peak)}) and {_seconds(seconds)} "
        f"({_difference(seconds / plan.seconds)}); {plan.samples_per_s:,.1f} samples/s were predicted."
    )


def _difference(ratio: float) -> str:
    text = f"{ratio - 1:+.1%}"
    return "as predicted" if text.strip("+-") == "0.0%" else text


def _count(segments: int) -> str:
    return f"{segments:,} segment{'s' if segments > 1 else ''}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"


def _columns(title: str, rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    texts = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [f"  {title}", *(f"    {text}".rstrip() for text in texts), ""]
