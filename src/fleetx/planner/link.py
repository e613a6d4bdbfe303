"""How fast bytes travel between the device and pinned host memory, while the device computes."""

import torch

_AMOUNT = 64 * 2**20


def bandwidth(device: torch.device) -> float:
    """Bytes per second in the slower direction, with copies both ways beside a computation; 0 without a GPU."""
    if device.type != "cuda":
        return 0.0
    on_host = [torch.empty(_AMOUNT, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    on_device = [torch.empty(_AMOUNT, dtype=torch.uint8, device=device) for _ in range(2)]
    matrix = torch.zeros(2048, 2048, dtype=torch.bfloat16, device=device)
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    rates = []
    for _ in range(4):
        torch.cuda.synchronize(device)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in streams]
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                events[number][0].record()
                for _ in range(4):
                    if number == 0:
                        on_host[0].copy_(on_device[0], non_blocking=True)
                    else:
                        on_device[1].copy_(on_host[1], non_blocking=True)
                events[number][1].record()
        for _ in range(16):
            matrix = matrix @ matrix
        torch.cuda.synchronize(device)
        rates.append(min(4 * _AMOUNT / (first.elapsed_time(last) / 1e3) for first, last in events))
    return sorted(rates[1:])[1]
