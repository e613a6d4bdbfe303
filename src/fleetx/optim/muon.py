"""Muon for matrices and AdamW for the rest, as one optimizer with the groups, names and patterns of ours."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.optimizer import ParamsT, StateDict

from fleetx import inference
from fleetx.optim import settling
from fleetx.optim.checks import check_betas, check_count, check_lr, check_number, check_switch
from fleetx.optim.excluding import ExcludingOptimizer
from fleetx.optim.exclusion import Exclusion, ExclusionRow
from fleetx.optim.groups import Group, call_it, fix_lr_shares, infos
from fleetx.optim.sharded import is_sharded
from fleetx.optim.state_dicts import check_saved

OF_MUON = ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")
OF_ADAMW = ("betas", "eps")
EMBEDDINGS = ("embedding",)
"""What is excluded where nobody says anything: this very tuple, so that a message need not quote what nobody wrote."""
NOT_MATRICES = "not matrices"


class Muon(ExcludingOptimizer):
    """torch's Muon on matrices, torch's AdamW on everything else.

    Matrices are parameters of two dimensions that ``exclude_from_muon`` does not take: by default all but embeddings,
    for which orthogonal steps make no sense. Give the name of the output layer too, as Muon's authors advise.

    Weights, momentum and moments have the parameters' dtype, as torch's: fp32 masters of bf16 parameters come with
    FleetX's ``Step`` and ``minimize``, not with the optimizer alone.

    Args:
        params: parameters, groups of them, or ``model.named_parameters()``.
        lr: learning rate of the matrices, a number or a tensor of one element.
        adamw_lr: learning rate of the rest. It belongs to the ``lr`` given here: a schedule that halves ``lr`` halves
            both. None is ``lr``, which suits ``adjust_lr_fn="match_rms_adamw"``.
        weight_decay: decoupled weight decay, of both.
        momentum: Muon's.
        nesterov: Muon's.
        ns_steps: how often Muon's iteration is repeated.
        adjust_lr_fn: "original" or "match_rms_adamw": how Muon's steps follow the shape of a matrix.
        betas: AdamW's.
        eps: AdamW's.
        exclude_from_weight_decay: patterns (see ``fleetx.optim.exclusion``) of parameters without decay.
        exclude_from_muon: patterns of matrices that AdamW moves.

    Example:
        >>> import torch
        >>> from fleetx import names
        >>> from fleetx.optim import Muon
        >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> names.record(model)
        >>> optimizer = Muon(
        ...     model.parameters(), lr=0.02, adamw_lr=1e-3, exclude_from_weight_decay=["bias"],
        ...     exclude_from_muon=["embedding", "2.weight"],
        ... )
        >>> model(torch.arange(10)).square().mean().backward()
        >>> optimizer.step()
        >>> print(optimizer.exclusion_table())
        Muon
        without weight decay: 2 of 5 parameters
          pattern       parameters  such as
          bias                   2  1.bias, 2.bias
        moved by AdamW: 4 of 5 parameters
          pattern       parameters  such as
          embedding              1  0.weight
          2.weight               1  2.weight
          not matrices           2  1.bias, 2.bias
    """

    _masks: ClassVar[settling.Masks] = {"decays": "exclude_from_weight_decay", "orthogonal": "exclude_from_muon"}
    _made: tuple[Any, list[tuple[Any, list[tuple[Group, bool]]]]] | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.02,
        adamw_lr: float | None = None,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        exclude_from_weight_decay: Sequence[str] = (),
        exclude_from_muon: Sequence[str] = EMBEDDINGS,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise RuntimeError(
                f"fleetx.optim.Muon is torch's, and torch {torch.__version__} has none: install torch 2.9 or later, "
                "or use fleetx.optim.Lamb."
            )
        defaults = {
            "lr": lr,
            "adamw_lr": adamw_lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "eps": eps,
            "exclude_from_weight_decay": exclude_from_weight_decay,
            "exclude_from_muon": exclude_from_muon,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyrefly: ignore[bad-override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not torch.compiler.is_compiling():
            inference.refuse_mode(f"{type(self).__name__}.step")
            self._check_scaling_once()
        for optimizer, origins in self._halves():
            for inner, (group, decays) in zip(optimizer.param_groups, origins, strict=True):
                inner.update(self._settings(type(optimizer), group, decays))  # schedules change our groups
            optimizer.state = self.state
            _step_without_hooks(optimizer)
        return loss

    def _halves(self) -> list[tuple[Any, list[tuple[Group, bool]]]]:
        """torch's optimizers on our parameters, and the origin of each of their groups; made anew if ours change."""
        key = [(id(group), *map(id, group["params"]), *group["decays"]) for group in self.param_groups]
        if self._made is None or self._made[0] != key:
            self._made = (key, [half for half in map(self._half, (torch.optim.Muon, AdamW)) if half[1]])
        return self._made[1]

    def _half(self, kind: Any) -> tuple[Any, list[tuple[Group, bool]]]:
        groups, origins = [], []
        for group in self.param_groups:
            for decays in (True, False):
                own = [
                    parameter
                    for index, parameter in enumerate(group["params"])
                    if group["decays"][index] == decays and self._by_muon(group, index) == (kind is not AdamW)
                ]
                if own:
                    groups.append({"params": own, **self._settings(kind, group, decays)})
                    origins.append((group, decays))
        return kind(groups) if groups else None, origins

    @staticmethod
    def _settings(kind: Any, group: Group, decays: bool) -> dict[str, Any]:
        decay = {"weight_decay": group["weight_decay"] if decays else 0.0}
        if kind is AdamW:
            lr = group["lr"] * group.get("adamw_lr_ratio", 1.0)
            return {"lr": lr, **decay, **{name: group[name] for name in OF_ADAMW}}
        return {"lr": group["lr"], **decay, **{name: group[name] for name in OF_MUON}}

    @staticmethod
    def _by_muon(group: Group, index: int) -> bool:
        return group["orthogonal"][index] and _is_matrix(group["params"][index])

    def _state_names(self, group: Group, index: int) -> tuple[str, ...]:
        return ("momentum_buffer",) if self._by_muon(group, index) else ("step", "exp_avg", "exp_avg_sq")

    # Groups and exclusions.

    def exclusion_table(self) -> str:
        """What has no decay, and what AdamW moves, as a table to print."""
        places = [(group, index) for group in self.param_groups for index in range(len(group["params"]))]
        parts = {
            "without weight decay": self.exclusion_rows(),
            "moved by AdamW": [*self.exclusion_rows("exclude_from_muon"), *self._others()],
        }
        counts = {
            "without weight decay": sum(not group["decays"][index] for group, index in places),
            "moved by AdamW": sum(not self._by_muon(group, index) for group, index in places),
        }
        return settling.table("Muon", parts, counts, of=len(places))

    def _others(self) -> list[ExclusionRow]:
        """What AdamW moves though no pattern took it."""
        if NOT_MATRICES not in self._rows:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            names = [
                info.name if info else f"parameter {number}"
                for number, info in enumerate(infos(self.param_groups))
                if not _is_matrix(parameters[number])
            ]
            self._rows[NOT_MATRICES] = Exclusion((), {NOT_MATRICES: tuple(names)}).rows() if names else []
        return self._rows[NOT_MATRICES]

    def _settle_groups(self) -> None:
        super()._settle_groups()
        self._others()  # noted now, as all rows

    def _check_group(self, group: Group) -> None:
        _check_embeddings_known(group)
        check_lr(group["lr"])
        check_number("weight_decay", group["weight_decay"], usual="0.1 is usual, 0 is none")
        check_number("momentum", group["momentum"], below=1, usual="0.95 is usual")
        check_switch("nesterov", group["nesterov"])
        check_count("ns_steps", group["ns_steps"], below=100, usual="5 is usual")
        if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                f"adjust_lr_fn must be 'original' or 'match_rms_adamw', got {group['adjust_lr_fn']!r}: "
                "leave it out for 'original'."
            )
        check_betas(group["betas"])
        check_number("eps", group["eps"], above=0, usual="1e-8 is usual")
        fix_lr_shares(group, "adamw_lr")
        if cut := [index for index, parameter in enumerate(group["params"]) if is_sharded(parameter)]:
            raise TypeError(
                f"Muon needs whole matrices, and of {call_it(group, cut[0])} each rank holds a part: leave "
                "fully_shard out, or use fleetx.optim.Lamb."
            )

    # State dicts.

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load what ``state_dict`` gave; a state trained with other exclusions is refused."""
        check_saved(self, state_dict)
        super().load_state_dict(state_dict)


def _step_without_hooks(optimizer: Any) -> None:
    """Step one of torch's; hooks of all optimizers, profilers' say, are called once, for the whole step."""
    step = type(optimizer).step
    (step.__wrapped__ if hasattr(step, "hooked") else step)(optimizer)


def _is_matrix(parameter: Tensor) -> bool:
    return parameter.ndim == 2 and parameter.numel() > 0


def _check_embeddings_known(group: Group) -> None:
    """Where nobody said which matrices AdamW moves, the module must tell which are embeddings."""
    if group["exclude_from_muon"] is not EMBEDDINGS:
        return
    if not all(info is not None and info.kinds_known for info in infos([group])):
        raise ValueError(
            "Muon leaves embeddings to AdamW, and nothing told it which matrices are embeddings: call "
            "fleetx.names.record(model) before building it (fleet.distributed_model does it), or give "
            "exclude_from_muon, [] if there are none."
        )
