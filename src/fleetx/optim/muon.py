"""Muon for matrices and AdamW for the rest, as one optimizer with the groups, names and patterns of ours."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from fleetx.optim import settling
from fleetx.optim.checks import check_count, check_lr, check_number, check_switch
from fleetx.optim.exclusion import ExclusionRow
from fleetx.optim.groups import Group, call_it, fix_lr_shares
from fleetx.optim.sharded import is_sharded

OF_MUON = ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")
OF_ADAMW = ("betas", "eps")


class Muon(Optimizer):
    """torch's Muon on matrices, torch's AdamW on everything else.

    Matrices are parameters of two dimensions that ``exclude_from_muon`` does not take: by default all but embeddings,
    for which orthogonal steps make no sense. Give the name of the output layer too, as Muon's authors advise.

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
          pattern    parameters  such as
          bias                2  1.bias, 2.bias
        moved by AdamW: 4 of 5 parameters
          pattern    parameters  such as
          embedding           1  0.weight
          2.weight            1  2.weight
    """

    _masks: ClassVar[settling.Masks] = {"decays": "exclude_from_weight_decay", "orthogonal": "exclude_from_muon"}
    _settles_each_group = True
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
        exclude_from_muon: Sequence[str] = ("embedding",),
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
        self._rows: dict[str, list[ExclusionRow]] = {}
        self._settles_each_group = False  # a pattern may take something in the last group only
        super().__init__(params, defaults)
        self._settles_each_group = True
        self._settle_groups()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyrefly: ignore[bad-override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer, origins in self._halves():
            for inner, (group, decays) in zip(optimizer.param_groups, origins, strict=True):
                inner.update(self._settings(type(optimizer), group, decays))  # schedules change our groups
            optimizer.state = self.state
            optimizer.step()
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
        return group["orthogonal"][index] and group["params"][index].ndim == 2

    # Groups and exclusions.

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._rows = {}
        super().__setstate__(state)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; its patterns are resolved now, and a group that is refused is not added."""
        super().add_param_group(param_group)
        if self._settles_each_group:
            try:
                self._settle_groups()
            except Exception:
                self.param_groups.pop()
                raise

    def exclusion_rows(self, setting: str = "exclude_from_weight_decay") -> list[ExclusionRow]:
        """Per pattern of a setting: how many parameters it took, and the first of their names."""
        settings = list(self._masks.values())
        if setting not in settings:
            raise ValueError(f"Muon has no {setting!r}: ask for one of {', '.join(settings)}.")
        # Noted when the groups were settled: fp32 masters, which have no names, may stand in the groups by now.
        return self._rows[setting] if setting in self._rows else settling.rows(self.param_groups, setting)

    def exclusion_table(self) -> str:
        """What has no decay, and what AdamW moves, as a table to print."""
        places = [(group, index) for group in self.param_groups for index in range(len(group["params"]))]
        parts = {
            "without weight decay": self.exclusion_rows(),
            "moved by AdamW": self.exclusion_rows("exclude_from_muon"),
        }
        counts = {
            "without weight decay": sum(not group["decays"][index] for group, index in places),
            "moved by AdamW": sum(not self._by_muon(group, index) for group, index in places),
        }
        return settling.table("Muon", parts, counts, of=len(places))

    def _settle_groups(self) -> None:
        for group in self.param_groups:
            settling.check_dtypes("Muon", group)
            _check_group(group)
            if cut := [index for index, parameter in enumerate(group["params"]) if is_sharded(parameter)]:
                raise TypeError(
                    f"Muon needs whole matrices, and of {call_it(group, cut[0])} each rank holds a part: leave "
                    "fully_shard out, or use fleetx.optim.Lamb."
                )
            fix_lr_shares(group, "adamw_lr")
        settling.settle(self.param_groups, self._masks)
        self._rows = {setting: settling.rows(self.param_groups, setting) for setting in self._masks.values()}

    # State dicts.

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load what ``state_dict`` gave; a state trained with other exclusions is refused."""
        for number, (own, saved) in enumerate(zip(self.param_groups, state_dict["param_groups"], strict=False)):
            for mask, setting in self._masks.items():
                if saved.get(mask, own[mask]) != own[mask]:
                    pairs = enumerate(zip(own[mask], saved[mask], strict=False))
                    index = next((index for index, (here, there) in pairs if here != there), 0)
                    raise ValueError(
                        f"{setting} of this Muon and of the saved state treat {call_it(own, index)} of group {number} "
                        f"differently: build the Muon with the saved patterns, {saved[setting]!r}."
                    )
        super().load_state_dict(state_dict)


def _check_group(group: Group) -> None:
    check_lr(group["lr"])
    check_number("weight_decay", group["weight_decay"], usual="0.1 is usual, 0 is none")
    check_number("momentum", group["momentum"], below=1, usual="0.95 is usual")
    check_switch("nesterov", group["nesterov"])
    check_count("ns_steps", group["ns_steps"], usual="5 is usual")
    if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        raise ValueError(
            f"adjust_lr_fn must be 'original' or 'match_rms_adamw', got {group['adjust_lr_fn']!r}: "
            "leave it out for 'original'."
        )
    for name, beta in zip(("betas[0]", "betas[1]"), group["betas"], strict=True):
        check_number(name, beta, below=1, usual="(0.9, 0.999) is usual")
    check_number("eps", group["eps"], above=0, usual="1e-8 is usual")
