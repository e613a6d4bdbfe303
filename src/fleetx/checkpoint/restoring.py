"""Putting back what was read: as it was, or for another number of workers."""

from typing import Any

from fleetx.checkpoint import state
from fleetx.checkpoint.loading import Reading
from fleetx.checkpoint.saving import SHARED, own_files
from fleetx.checkpoint.soundness import require_own, require_shared, sound
from fleetx.checkpoint.state import Pieces, Run
from fleetx.checkpoint.workers import Workers
from fleetx.fleet.optimizer import DistributedOptimizer

Tree = dict[str, Any]


def put_back(run: Run, reading: Reading, workers: Workers) -> tuple[Tree, int]:
    """Load what was read; gives the caller's own values, and how many micro-batches are replayed.

    Everything is checked on all workers before anything is written on one of them.
    """
    found: list[tuple[Pieces, Tree, int]] = []

    def check() -> None:
        found.append(_pieces(run, reading, workers))
        state.check(run, found[0][0])

    workers.each(check)
    pieces, extra, held = found[0]
    workers.each(lambda: state.put_back(run, pieces))
    return extra, held


def require_sound(run: Run, reading: Reading, workers: Workers) -> None:
    """Raise `Damaged` if the files that were read hold what no save writes."""
    saved = reading.manifest.workers
    with sound(SHARED):
        shared = reading.shared()
        require_shared(run, shared)
    ranks = {workers.rank} if saved == workers.size else {0, *range(workers.rank, min(workers.rank + 1, saved))}
    for rank in sorted(ranks):
        with sound(own_files(rank)[1]):
            require_own(run, shared, reading.own(rank))
    for rank in range(saved) if saved != workers.size else ranks:
        with sound(own_files(rank)[1]):
            own = reading.encoded_own(rank)
            _starting_positions(own)
            for name in run.optimizers:
                _held(own, name)


def _pieces(run: Run, reading: Reading, workers: Workers) -> tuple[Pieces, Tree, int]:
    saved, rank = reading.manifest.workers, workers.rank
    shared = reading.shared()
    if saved != workers.size:
        first = reading.own(0)
        state.require_parts(run, first)
        held = _require_replayable(run, [reading.encoded_own(one) for one in range(saved)])
        mine = reading.own(rank) if rank < saved else None
        return state.pieces_elsewhere(run, shared, first, mine, rank), first["extra"], held
    own = reading.own(rank)
    state.require_parts(run, own)
    if _windows_go_on(run, shared, own):
        return state.pieces_here(run, shared, own), own["extra"], 0
    held = _require_replayable(run, [reading.encoded_own(rank)])
    return state.pieces_elsewhere(run, shared, own, own, rank), own["extra"], held


def _windows_go_on(run: Run, shared: Tree, own: Tree) -> bool:
    """Whether windows in progress are still to be merged from as many micro-batches as before."""
    for name, optimizer in run.optimizers.items():
        window, ours = own["windows"][name], shared["optimizers"][name].get("fleetx")
        in_progress = isinstance(optimizer, DistributedOptimizer) and ours and window and window["held"]
        if in_progress and ours["k_steps"] != optimizer.engine.k_steps:
            return False
    return True


def _require_replayable(run: Run, owns: list[Tree]) -> int:
    """How many micro-batches the workers held at most; raises if they cannot be taken again.

    `owns` are the workers' own states as JSON: their tensors are not needed here.
    """
    held = max((_held(own, name) for own in owns for name in run.optimizers), default=0)
    starts = [_starting_positions(own) for own in owns]
    can_go_back = all(set(_entries(own["start"], "loaders")) == set(run.loaders) for own in owns if own["start"])
    if held and (run.start is None or not run.loaders or not can_go_back):
        raise ValueError(
            f"a window of {held} micro-batches was in progress, and another number of workers (or another k_steps) "
            "must take its batches again: that needs one optimizer, and loaders that can go back, such as "
            "fleetx.data.Loader. Resume as it was saved, or save after optimizer.flush()."
        )
    differing = [name for name in run.loaders if any(start[name] != starts[0][name] for start in starts)]
    if differing:
        raise ValueError(
            "another number of workers can go on where all workers stood at the same place, and the position of "
            f"{', '.join(map(repr, differing))} differs between those that saved. Resume with {len(owns)} workers."
        )
    return held


def _starting_positions(own: Tree) -> Tree:
    """Where each loader stood when the window in progress began, or stands if there is none."""
    return own["loaders"]["dict"] | (_entries(own["start"], "loaders") if own["start"] else {})


def _held(own: Tree, name: str) -> int:
    window = _entries({"dict": own}, "windows").get(name)
    return window["dict"]["held"] if window else 0


def _entries(encoded: Tree, name: str) -> Tree:
    return encoded["dict"][name]["dict"]
