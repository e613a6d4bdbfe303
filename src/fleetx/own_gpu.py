"""Which of this machine's GPUs a worker uses: one of its own, unless sharing was asked for."""

from collections.abc import Mapping

SHARE = "FLEETX_SHARE_GPUS"


def own_gpu(environment: Mapping[str, str], count: int) -> int:
    """The number among the `count` visible GPUs for the worker that a launcher has described."""
    text = environment.get("LOCAL_RANK", "0")
    if not text.isdecimal() or len(text) > 9:
        raise ValueError(
            f"LOCAL_RANK must be a worker's number on its machine, from 0, got LOCAL_RANK={text!r}. Start this script "
            "with fleetrun or torchrun, which set it."
        )
    local = int(text)
    if local < count:
        return local
    if "SLURM_GPUS_PER_TASK" in environment and environment.get("SLURM_LOCALID") == text:
        return 0  # srun lets each task see its own GPUs alone
    if may_share(environment):
        return local % count
    raise RuntimeError(
        f"each worker needs a GPU of its own, and this machine has {count} that this one sees, too few for its worker "
        f"{local} (LOCAL_RANK={local}). Start fewer workers, train on the host with CUDA_VISIBLE_DEVICES= (empty), or "
        f"set {SHARE}=1 if workers are meant to share a GPU, or each sees only its own."
    )


def may_share(environment: Mapping[str, str]) -> bool:
    """Whether several workers may use one GPU."""
    value = environment.get(SHARE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{SHARE} must be 1, to let workers share GPUs, or 0, got {value!r}.")
    return value == "1"
