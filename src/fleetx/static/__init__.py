"""The static door: programs that are compiled once, fed by name and fetched by name."""

from fleetx.static.building import build
from fleetx.static.executor import Executor
from fleetx.static.places import CPUPlace, CUDAPlace
from fleetx.static.program import (
    Program,
    StartupProgram,
    Variable,
    default_main_program,
    default_startup_program,
    reset_default_programs,
)

__all__ = [
    "CPUPlace",
    "CUDAPlace",
    "Executor",
    "Program",
    "StartupProgram",
    "Variable",
    "build",
    "default_main_program",
    "default_startup_program",
    "reset_default_programs",
]
