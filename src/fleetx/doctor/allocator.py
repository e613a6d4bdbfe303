"""How memory is handed out: settings of the environment that change what a step takes or how fast it runs."""

import os
from typing import Any

import torch

VARIABLES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "MALLOC_ARENA_MAX",
    "XDG_CACHE_HOME",
)


def allocator() -> dict[str, Any]:
    """The allocator in use, and every variable that was set."""
    backend = torch.cuda.get_allocator_backend() if torch.cuda.is_available() else None
    found: dict[str, Any] = {"cuda allocator": backend}
    return found | {name: os.environ[name] for name in VARIABLES if name in os.environ}
