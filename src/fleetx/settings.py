"""Typed, range-checked settings. A class of them reads as their table:

class MergeConfigs(Configs):
    k_steps = Int(1, at_least=1)
    avg = Bool(True)
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, overload

from fleetx.notices import Problems, did_you_mean, shown
from fleetx.units import parse_bytes

Got = TypeVar("Got")  # what reading a setting gives
Given = TypeVar("Given")  # what may be assigned to it

_INT_LIMIT = 2**63  # TOML's integers stay below


class Setting(Generic[Got, Given]):
    """One setting: its default and its rule. It is a descriptor, so its attribute is typed and checked."""

    name = ""
    rule = ""

    def __init__(self, default: Got) -> None:
        self.default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, settings: None, owner: type) -> Self: ...
    @overload
    def __get__(self, settings: "Settings", owner: type) -> Got: ...
    def __get__(self, settings: "Settings | None", owner: type) -> "Self | Got":
        return self if settings is None else self.read(settings)

    def __set__(self, settings: "Settings", value: Given) -> None:
        settings.update({self.name: value})

    def read(self, settings: "Settings") -> Got:
        """The value that these settings hold."""
        return settings._values[self.name]

    def fresh_default(self) -> Got:
        """The default, shared with nobody."""
        return self.default

    def accept(self, value: object, path: str, problems: Problems) -> Got:
        """The value as it is stored. One that breaks the rule becomes a problem and gives the default."""
        raise NotImplementedError


class Bool(Setting[bool, bool]):
    """True or False, and nothing that merely counts as one of them."""

    rule = "True or False"

    def accept(self, value: object, path: str, problems: Problems) -> bool:
        """See Setting."""
        if isinstance(value, bool):
            return value
        meant = {"0": "False", "1": "True", "false": "False", "true": "True"}.get(shown(value).strip("'").lower())
        problems.wrong_type(path, self.rule, value, f"write {meant or self.rule}")
        return self.default


class Int(Setting[int, int]):
    """A whole number."""

    def __init__(self, default: int, *, at_least: int) -> None:
        super().__init__(default)
        self.at_least = at_least
        self.rule = f"an int >= {at_least}"

    def accept(self, value: object, path: str, problems: Problems) -> int:
        """See Setting."""
        if isinstance(value, bool) or not isinstance(value, int):
            problems.wrong_type(path, self.rule, value, f"write a whole number such as {self.default}")
        elif not self.at_least <= value < _INT_LIMIT:
            problems.wrong_value(path, self.rule, value, f"write {self.at_least} or more, and less than 2**63")
        else:
            return int(value)  # a plain one: an IntEnum prints as its name
        return self.default


class Float(Setting[float, float]):
    """A finite number; an int is taken and stored as a float."""

    def __init__(
        self,
        default: float,
        *,
        at_least: float = -math.inf,
        above: float = -math.inf,
        below: float = math.inf,
    ) -> None:
        super().__init__(default)
        self.at_least, self.above, self.below = at_least, above, below
        limits = {">=": at_least, ">": above, "<": below}
        self.rule = "a number " + " and ".join(f"{s} {x:g}" for s, x in limits.items() if math.isfinite(x))

    def accept(self, value: object, path: str, problems: Problems) -> float:
        """See Setting."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            problems.wrong_type(path, self.rule, value, f"write a number such as {self.default}")
            return self.default
        try:
            number = float(value)
        except OverflowError:  # an int beyond the largest float
            number = math.inf
        if self.at_least <= number and self.above < number < self.below:  # no inf, and NaN is in no range
            return number
        problems.wrong_value(path, self.rule, value, f"write a number in that range, such as {self.default}")
        return self.default


class Text(Setting[str, str]):
    """One line of text that is not blank."""

    rule = "a str of printable characters that is not blank"

    def accept(self, value: object, path: str, problems: Problems) -> str:
        """See Setting."""
        if not isinstance(value, str):
            problems.wrong_type(path, self.rule, value, f'write text in quotes, such as "{self.default}"')
        elif not value.strip() or not value.isprintable():
            problems.wrong_value(path, self.rule, value, f'write text on one line, such as "{self.default}"')
        else:
            return str.__str__(value)  # the plain text of a str enum or another subclass
        return self.default


class Choice(Setting[str, str]):
    """One of a few words; the first is the default."""

    def __init__(self, *options: str) -> None:
        super().__init__(options[0])
        self.options = options
        self.rule = "one of " + ", ".join(repr(option) for option in options)

    def accept(self, value: object, path: str, problems: Problems) -> str:
        """See Setting."""
        if isinstance(value, str) and value in self.options:
            return str.__str__(value)
        if isinstance(value, str):
            problems.wrong_value(path, self.rule, value, did_you_mean(value, self.options))
        else:
            problems.wrong_type(path, self.rule, value, f"write {self.default!r} with its quotes")
        return self.default


class ByteSize(Setting["int | str", "int | str"]):
    """An amount of memory, kept as it was written."""

    rule = "an amount of memory above 0 and below 2**63 bytes"

    def accept(self, value: object, path: str, problems: Problems) -> int | str:
        """See Setting."""
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            problems.wrong_type(path, self.rule, value, f"write for example {self.default!r}")
            return self.default
        try:
            if 0 < parse_bytes(value) < _INT_LIMIT and (isinstance(value, int) or value.isprintable()):
                return int(value) if isinstance(value, int) else str.__str__(value)
        except ValueError:
            pass  # the message below says the same, and where
        problems.wrong_value(path, self.rule, value, f"write for example {self.default!r}, or an int of bytes")
        return self.default


class ListOf(Setting[list[Got], "list[Given] | tuple[Given, ...]"]):
    """A list of one kind. Assigning replaces it: what is stored is a new list, from a list or a tuple."""

    def __init__(self, item: Setting[Got, Given], default: Iterable[Got] = ()) -> None:
        super().__init__(list(default))
        self.item = item
        self.rule = f"a list, each item {item.rule}"

    def fresh_default(self) -> list[Got]:
        """See Setting."""
        return list(self.default)

    def accept(self, value: object, path: str, problems: Problems) -> list[Got]:
        """See Setting."""
        if isinstance(value, (list, tuple)):
            return [self.item.accept(one, f"{path}[{index}]", problems) for index, one in enumerate(value)]
        # A text is likely meant as the only item, where items are texts.
        example = shown(value) if isinstance(value, str) and isinstance(self.item, Text) else repr(self.item.default)
        problems.wrong_type(path, self.rule, value, f"write a list such as [{example}]")
        return self.fresh_default()


class OrNone(Setting["Got | None", "Given | None"], Generic[Got, Given]):
    """None, the default, or what another kind accepts."""

    def __init__(self, kind: Setting[Got, Given]) -> None:
        super().__init__(None)
        self.kind = kind

    def accept(self, value: object, path: str, problems: Problems) -> Got | None:
        """See Setting."""
        return None if value is None else self.kind.accept(value, path, problems)


class Settings:
    """A table of settings. Names and values are checked, and a change is made whole or not at all."""

    _declared: ClassVar[dict[str, Setting[Any, Any]]] = {}
    _values: dict[str, Any]
    _given: set[str]  # the names that somebody assigned, default or not
    _path: str  # how messages call these settings: "", or the name of their section
    _used_by: str | None  # who froze them

    def __init_subclass__(cls) -> None:
        found = {name: one for base in reversed(cls.__mro__) for name, one in vars(base).items()}
        cls._declared = {name: one for name, one in found.items() if isinstance(one, Setting)}

    def __init__(self, /, **settings: Any) -> None:
        fresh = {name: one.fresh_default() for name, one in self._declared.items()}
        vars(self).update(_values=fresh, _given=set(), _path="", _used_by=None)
        if settings:
            self.update(settings)

    def update(self, settings: Mapping[str, Any], source: str = "") -> None:
        """Set several at once. All that is wrong is reported, with its `source`; then nothing is changed."""
        problems = Problems()
        accepted = self._accepted(settings, problems)
        problems.raise_if_any(source)
        self._store(accepted)

    def copy(self) -> Self:
        """An equal copy that shares nothing with this one, and may be changed."""
        made = object.__new__(type(self))
        values = {name: _own(value) for name, value in self._values.items()}
        vars(made).update(vars(self), _values=values, _given=set(self._given), _used_by=None)
        return made

    def __getstate__(self) -> dict[str, Any]:  # so pickle, copy.copy and copy.deepcopy give what copy() gives
        return vars(self.copy())

    def freeze(self, reason: str) -> None:
        """From now on every change raises an error that says who uses these settings: `reason`."""
        if self._used_by is not None:
            return
        vars(self)["_used_by"] = reason
        for name, value in self._values.items():
            if isinstance(value, Settings):
                value.freeze(reason)
            elif isinstance(value, list):
                self._values[name] = FrozenList(value, reason)

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain values that share nothing with these."""
        values = {name: _own(getattr(self, name)) for name in self._declared}
        return {name: value.to_dict() if isinstance(value, Settings) else value for name, value in values.items()}

    def was_given(self, name: str) -> bool:
        """Whether somebody assigned this setting, be it to its default."""
        return name in self._given

    def recheck(self, problems: Problems) -> None:
        """Check all values again: a list may have been changed in place."""
        for name, one in self._declared.items():
            if isinstance(one, Section):
                self._values[name].recheck(problems)
            else:
                one.accept(self._values[name], self._path_of(name), problems)

    def _accepted(self, settings: object, problems: Problems) -> dict[str, Any]:
        """The given settings, checked, as `_store` takes them."""
        if not isinstance(settings, Mapping):
            problems.wrong_type(self._path or type(self).__name__, "a dict", settings, 'write {"name": value}')
            return {}
        if settings and self._used_by is not None:
            what = ", ".join(self._path_of(str(name)) for name in settings)
            raise TypeError(_frozen_message(f"{what} cannot be set", self._used_by))
        accepted: dict[str, Any] = {}
        for name, value in settings.items():
            one = self._declared.get(name) if isinstance(name, str) else None
            if one is None:
                problems.add(self._unknown(name))
            elif isinstance(one, Section):
                accepted[name] = self._values[name]._accepted(value, problems)
            else:
                accepted[name] = one.accept(value, self._path_of(name), problems)
        return accepted

    def _store(self, accepted: dict[str, Any]) -> None:
        for name, value in accepted.items():
            if isinstance(self._declared[name], Section):
                self._values[name]._store(value)  # in place: a user may hold the section's object
            else:
                self._values[name] = value
        self._given.update(accepted)

    def _path_of(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def _unknown(self, name: object) -> str:
        remedy = did_you_mean(name, self._declared) if isinstance(name, str) else "names are text in quotes"
        return f"{self._path or type(self).__name__} has no setting {shown(name)}; {remedy}"

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if type(other) is type(self) else NotImplemented

    if not TYPE_CHECKING:  # a type checker would read these two as "any name is fine"

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise AttributeError(self._unknown(name))

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in self._declared:
                raise AttributeError(self._unknown(name))
            object.__setattr__(self, name, value)


class Configs(Settings, Mapping[str, Any]):
    """Settings that are read and set as attributes, or as the items of a dict."""

    def in_force(self) -> dict[str, object]:
        """What an overview shows: everything but empty lists and None."""
        return {name: value for name, value in self.items() if value is not None and value != []}

    def __getitem__(self, name: str) -> Any:
        if name not in self._declared:
            raise KeyError(self._unknown(name))
        return getattr(self, name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)

    def __len__(self) -> int:
        return len(self._declared)

    def __eq__(self, other: object) -> bool:
        return Settings.__eq__(self, other) if isinstance(other, Settings) else Mapping.__eq__(self, other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.items())})"


AnyConfigs = TypeVar("AnyConfigs", bound=Configs)


class Section(Setting[AnyConfigs, Mapping[str, Any]]):
    """Settings within settings. Assigning a dict sets the keys that it holds and keeps the others."""

    def __init__(self, kind: type[AnyConfigs]) -> None:
        self.kind = kind

    def fresh_default(self) -> AnyConfigs:
        """New settings that know under which name messages should mention them."""
        made = self.kind()
        vars(made)["_path"] = self.name
        return made


class FrozenList(list[Any]):
    """A list in frozen settings: it reads as a list, and a change in place raises as an assignment would."""

    def __init__(self, items: Iterable[Any], used_by: str) -> None:
        super().__init__(items)
        self._used_by = used_by

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError(_frozen_message("this list cannot be changed", self._used_by))

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # a copy of it is in nobody's use


def _frozen_message(what: str, used_by: str) -> str:
    return f"{what}: the strategy is in use by {used_by}; change a copy, made by strategy.copy(), and pass that"


def _own(value: Any) -> Any:
    """The value, and a copy where it could be changed in place."""
    if isinstance(value, Settings):
        return value.copy()
    return list(value) if isinstance(value, list) else value
