"""Made-up profiles, with figures like those of BERT-large on a large GPU."""

import random
from dataclasses import replace

from fleetx.planner.chain import State
from fleetx.planner.costs import EXACTLY, OptionCost, Profile, SegmentCost
from fleetx.planner.lines import Line

MIB = 2**20
BYTES = ("kept", "forward_bytes", "backward_bytes", "sent", "holds", "released")


def transformer(layers=24, *, bandwidth=50e9, overhead=2e-4, launches=0.0, scale=1, reserve=EXACTLY, **others):
    """Layers with three states each; `scale` divides all bytes."""

    def size(mib):
        return Line(0, mib * MIB / scale)

    def option(save, again, kept):
        seconds = Line(overhead * (2 + again), 4e-5 * (2 + again))
        here = OptionCost(State(save), seconds, size(kept), size(25), size(31), launches=launches * (3 + again))
        away = replace(here, state=State(save, "host"), kept=Line(), sent=size(kept), released=size(1))
        return here, away

    options = (*option("everything", 0, 22.0), *option("dear", 0.25, 9.0), *option("inputs", 1, 1.0))
    segments = [SegmentCost(f"encoder.layer.{i}", Line(overhead, 4e-5), options) for i in range(layers)]
    return Profile(
        tuple(segments),
        tail_bytes=size(40),
        tail_forward_seconds=Line(1e-4, 5e-5),
        tail_backward_seconds=Line(1e-4, 1e-4),
        fixed={"parameters": 1300 * MIB // scale, "gradients": 1300 * MIB // scale, "optimizer": 2600 * MIB // scale},
        batch_bytes=Line(0, 10_000),
        update_seconds=5e-3,
        bandwidth=bandwidth,
        reserve=reserve,
        device="a test",
        **others,
    )


def differing(layers=24, *, seed=0, **others):
    """The same with layers of which no two are alike."""
    draw, profile = random.Random(seed), transformer(layers, **others)

    def scaled(line, factor):
        return line._replace(fixed=line.fixed * factor, per_sample=line.per_sample * factor)

    def varied(segment):
        size, speed = draw.uniform(0.3, 2.0), draw.uniform(0.5, 1.5)
        options = [
            replace(
                option,
                seconds=scaled(option.seconds, speed),
                **{name: scaled(getattr(option, name), size) for name in BYTES},
            )
            for option in segment.options
        ]
        return replace(segment, forward_seconds=scaled(segment.forward_seconds, speed), options=tuple(options))

    return replace(profile, segments=tuple(varied(segment) for segment in profile.segments))
