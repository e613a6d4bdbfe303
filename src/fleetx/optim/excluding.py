"""Optimizers that leave parameters out by patterns: decided when a group is added, and shown on demand."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

from torch.optim.optimizer import Optimizer, ParamsT

from fleetx.optim import given, settling
from fleetx.optim.exclusion import ExclusionRow
from fleetx.optim.groups import Group
from fleetx.optim.scaling import refuse_scaled_gradients


class ExcludingOptimizer(Optimizer, ABC):
    """An optimizer whose groups hold patterns, and one bool per parameter for each list of them."""

    _masks: ClassVar[settling.Masks]
    # Said once for all groups.
    _common: ClassVar[tuple[str, ...]] = ()
    _settles_each_group = True
    _checked_scaling = False

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        """Python's own message about an unknown argument has no remedy."""
        given.check_keywords(cls, settings)
        return super().__new__(cls)

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        params = given.check_params(type(self).__name__, params)
        self._rows: dict[str, list[ExclusionRow]] = {}
        self._settles_each_group = False  # a pattern may take something in the last group only
        super().__init__(params, defaults)
        self._settles_each_group = True
        self._settle_groups()

    @abstractmethod
    def _check_group(self, group: Group) -> None:
        """Raise if a setting of the group is wrong; derive what depends on several."""

    @abstractmethod
    def _state_names(self, group: Group, index: int) -> tuple[str, ...]:
        """What the state of a parameter holds after a step."""

    def _known_settings(self) -> list[str]:
        """What a group may say."""
        return list(self.defaults)

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
            raise ValueError(f"{type(self).__name__} has no {setting!r}: ask for one of {', '.join(settings)}.")
        # Noted when the groups were settled: fp32 masters, which have no names, may stand in the groups by now.
        return self._rows[setting] if setting in self._rows else settling.rows(self.param_groups, setting)

    def _settle_groups(self) -> None:
        """Check every group, and write the masks its patterns give into it."""
        kind = type(self).__name__
        for group in self.param_groups:
            if self._masks.keys() - group.keys():  # a new one: schedulers may have written into the others since
                given.check_keys(kind, group, self._known_settings())
            settling.check_dtypes(kind, group)
            self._check_group(group)
            self._check_common(group, self.param_groups[0])
        settling.settle(self.param_groups, self._masks)
        self._rows = {setting: settling.rows(self.param_groups, setting) for setting in self._masks.values()}

    def _check_common(self, group: Group, first: Group) -> None:
        for name in self._common:
            if group[name] != first[name]:
                raise ValueError(
                    f"{name} is said once for all groups, got {first[name]!r} and {group[name]!r}: "
                    "give it to the optimizer, not to a group."
                )

    def _check_scaling_once(self) -> None:
        """Before the first step: look for a loss scale that was forgotten."""
        if not self._checked_scaling:
            self._checked_scaling = True
            if getattr(self, "grad_scale", None) is None:
                refuse_scaled_gradients(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._rows = {}
        super().__setstate__(state)
