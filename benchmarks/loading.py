"""How fast data is loaded: our loaders against plain PyTorch ones that do the same work on the same files.

Rivals take turns. Each turn starts fresh loading processes, waits until all of them are at work, and measures then. A
round's turns follow each other closely, so that what else the machine does falls on all of them: a speed is the median
over the rounds of the ratio within a round.
"""

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.plain_loading import IMAGE_SIZE, PlainImages, PlainText
from fleetx.cores import cores
from fleetx.data.imagenet import load_imagenet_from_file
from fleetx.data.make import make_digital, make_imagenet
from fleetx.data.text import load_digital_dataset_from_file

OURS, PEER, FULL_PEER = "FleetX", "plain DataLoader", "plain DataLoader, full decoding"
Turn = Callable[[], float]
"""Does one turn of a rival; gives the seconds per sample."""


@dataclass(frozen=True)
class Images:
    """JPEG files of one width, three quarters as high or more."""

    name: str
    width: int
    files: int
    rounds: int
    batches: int
    batch: int = 16

    def turns(self, folder: Path, processes: int) -> dict[str, Turn]:
        """Our loader, the same work by hand, and by hand without decoding at a fraction of the size."""
        path = make_imagenet(folder, 8, self.files, self.width, val_images=1)
        # A list may name an image several times: nobody runs dry while it is measured.
        lines = path.read_text().splitlines(keepends=True)
        needed = self.batch * (self.batches + 4 * processes + 1)
        path.write_text("".join(lines * math.ceil(needed / len(lines))))

        def ours() -> Iterator[Any]:
            options = {"image_size": IMAGE_SIZE, "classes": 8, "num_workers": processes, "rank": 0, "workers": 1}
            return iter(load_imagenet_from_file(path, self.batch, **options))  # pyrefly: ignore[bad-argument-type]

        def plain(draft: bool) -> Callable[[], Iterator[Any]]:
            return lambda: _plain_stream(PlainImages(path, draft), self.batch, processes)

        streams = {OURS: ours, PEER: plain(draft=True), FULL_PEER: plain(draft=False)}
        return {rival: _loading(stream, self.batch, self.batches, processes) for rival, stream in streams.items()}


@dataclass(frozen=True)
class Text:
    """Lines of token ids; either how fast they are read when a loader is made, or how fast batches come from it."""

    name: str
    sequence: int
    reads: bool
    samples: int = 4096
    rounds: int = 9
    batches: int = 16
    batch: int = 64

    def turns(self, folder: Path, processes: int) -> dict[str, Turn]:
        """Our loader, and the same work by hand."""
        data, vocab = make_digital(folder, self.samples, 30522, self.sequence)

        def ours() -> Any:
            place: Any = {"num_workers": processes, "rank": 0, "workers": 1}
            return load_digital_dataset_from_file(data, vocab, self.batch, self.sequence, **place)

        def plain() -> PlainText:
            return PlainText(data, vocab, self.sequence)

        if self.reads:
            return {OURS: _making(ours, self.samples), PEER: _making(plain, self.samples)}
        read = plain()
        streams = {OURS: lambda: iter(ours()), PEER: lambda: _plain_stream(read, self.batch, processes, read.collate)}
        return {rival: _loading(stream, self.batch, self.batches, processes) for rival, stream in streams.items()}


# A typical ImageNet photograph is 500 pixels wide; the large ones are where decoding at a fraction of the size helps.
CASES: tuple[Images | Text, ...] = (
    Images("images of 500 pixels", 500, files=64, rounds=15, batches=10),
    Images("images of 1200 pixels", 1200, files=16, rounds=9, batches=8),
    Text("text of 128 tokens, reading the files", 128, reads=True),
    Text("text of 128 tokens, batches", 128, reads=False),
    Text("text of 512 tokens, batches", 512, reads=False, samples=2048),
)


def measure(processes: int | None = None, cases: tuple[Images | Text, ...] = CASES) -> dict[str, Any]:
    """Seconds per sample of each rival, one figure per round."""
    processes = processes or cores().usable
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            turns = case.turns(Path(folder), processes)
            figures[case.name] = {rival: [] for rival in turns}
            for number in range(case.rounds):
                # Who goes first changes, so that nobody always runs on a machine warmed by the same rival.
                for rival in list(turns) if number % 2 == 0 else reversed(list(turns)):
                    figures[case.name][rival].append(turns[rival]())
    return {"processes": processes, "cases": figures}


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over measuring processes."""
    names = list(runs[0]["cases"])
    return {
        "what": f"JPEG images cut at random to {IMAGE_SIZE} pixels, text masked and padded, "
        f"{runs[0]['processes']} loading processes each. The plain DataLoader does the same work on the same files "
        "with Pillow and Python; with full decoding it reads every JPEG at its full size. Medians over "
        f"{len(runs)} processes; a speed is the median of the ratios within rounds",
        "cases": {name: _summary([run["cases"][name] for run in runs]) for name in names},
        "runs": runs,
    }


def _summary(runs: list[Mapping[str, list[float]]]) -> dict[str, dict[str, float]]:
    def median_of(figure: Callable[[Mapping[str, list[float]]], float]) -> float:
        return statistics.median(figure(run) for run in runs)

    return {
        "samples_per_s": {n: median_of(lambda run, n=n: 1 / statistics.median(run[n])) for n in runs[0]},
        "speed_of_ours": {n: median_of(lambda run, n=n: paired(run[OURS], run[n])) for n in runs[0] if n != OURS},
    }


def paired(ours: list[float], theirs: list[float]) -> float:
    """How many times as fast ours is: the median over the rounds."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def _loading(stream: Callable[[], Iterator[Any]], batch: int, batches: int, processes: int) -> Turn:
    def turn() -> float:
        running = stream()
        for _ in range(2 * processes):  # until every process is at work, and has read ahead
            next(running)
        began = time.perf_counter()
        for _ in range(batches):
            next(running)
        return (time.perf_counter() - began) / (batches * batch)

    return turn


def _making(make: Callable[[], Any], samples: int) -> Turn:
    def turn() -> float:
        began = time.perf_counter()
        make()
        return (time.perf_counter() - began) / samples

    return turn


def _plain_stream(dataset: Dataset[Any], batch: int, processes: int, collate: Any = None) -> Iterator[Any]:
    loader = DataLoader(
        dataset, batch, shuffle=True, num_workers=processes, collate_fn=collate, generator=torch.Generator()
    )
    return iter(loader)


def main() -> None:
    """One process's figures, as JSON on the standard output."""
    json.dump(measure(), sys.stdout)


if __name__ == "__main__":
    main()
