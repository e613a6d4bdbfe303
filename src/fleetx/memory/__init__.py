"""Where activations live between forward and backward: kept, computed again, or on the host."""

from fleetx.memory.applying import Applied, applied_to, apply
from fleetx.memory.listing import outputs
from fleetx.memory.parts import compile_parts
from fleetx.memory.resident import Resident, resident_on
from fleetx.memory.states import DEAR_KINDS, Segment

__all__ = [
    "DEAR_KINDS",
    "Applied",
    "Resident",
    "Segment",
    "applied_to",
    "apply",
    "compile_parts",
    "outputs",
    "resident_on",
]
