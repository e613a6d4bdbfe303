"""The guide's boxed tables, as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Fleet's measures: an overview is 38 + 2 + 38 characters inside, a table of environments 40 + 2 + 45.
_GAP = 2
_OVERVIEW_KEY, _OVERVIEW_VALUE = 38, 38
_ENVS_KEY, _ENVS_VALUE = 40, 45


@dataclass(frozen=True)
class Section:
    """A headed part of an overview. A list or tuple as a value takes one line per item."""

    header: str
    rows: Mapping[str, object]


def overview_box(title: str, sections: Sequence[Section], nothing: str = "nothing to show") -> str:
    """A titled box of sections; `nothing` is its only row when there are none."""
    headings = [title, *(section.header for section in sections)] + ([] if sections else [nothing])
    rows = [row for section in sections for row in _rows(section.rows)]
    columns = _Columns.fitting(rows, headings, _OVERVIEW_KEY, _OVERVIEW_VALUE)
    lines = [
        columns.rule("="),
        columns.across(""),
        columns.across(title),
        columns.across(""),
        columns.rule("="),
    ]
    for section in sections:
        lines += [columns.across(section.header), columns.rule("-")]
        lines += [columns.row(key, value) for key, value in _rows(section.rows)]
        lines += [columns.rule("=")]
    if not sections:
        lines += [columns.across(nothing), columns.rule("=")]
    return "\n".join(lines)


def overview_list(title: str, sections: Sequence[Section], nothing: str = "nothing to show") -> str:
    """The same without a box, for terminals that are too narrow for one."""
    lines = [title]
    for section in sections:
        lines += [section.header, *(f"  {key:<{len(key) or 2}} {value}" for key, value in _rows(section.rows))]
    return "\n".join(lines if sections else [title, nothing])


def envs_box(envs: Mapping[str, object], heads: tuple[str, str] = ("Distributed Envs", "Value")) -> str:
    """A box of two columns under their heads: what a launcher gives to a worker."""
    rows = [heads, *_rows(envs)]
    columns = _Columns.fitting(rows, [], _ENVS_KEY, _ENVS_VALUE)
    head, *body = [columns.row(key, value) for key, value in rows]
    return "\n".join([columns.rule("="), head, columns.rule("-"), *body, columns.rule("=")])


@dataclass(frozen=True)
class _Columns:
    """Keys right-aligned, a gap, values centred; headings centred over all of it."""

    key: int
    value: int

    @classmethod
    def fitting(cls, rows: Sequence[tuple[str, str]], headings: Sequence[str], key: int, value: int) -> "_Columns":
        """The given widths, or more where a text would not fit."""
        key = max([key, *(len(k) for k, _ in rows)])
        value = max([value, *(len(v) for _, v in rows), *(len(heading) - key - _GAP for heading in headings)])
        return cls(key, value)

    @property
    def inner(self) -> int:
        return self.key + _GAP + self.value

    def rule(self, stroke: str) -> str:
        return f"+{stroke * self.inner}+"

    def across(self, text: str) -> str:
        return f"|{text:^{self.inner}}|"

    def row(self, key: str, value: str) -> str:
        return f"|{key:>{self.key}}{' ' * _GAP}{value:^{self.value}}|"


def _rows(values: Mapping[str, object]) -> list[tuple[str, str]]:
    """One pair per line: the key stands on the first line of its value only."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        items = value if isinstance(value, (list, tuple)) else [value]
        # A value of several lines would tear the box open, so each of its lines is a row too.
        lines = [line for item in items for line in str(item).splitlines() or [""]] or [""]
        rows += [(key if index == 0 else "", line) for index, line in enumerate(lines)]
    return rows
