"""The machinery of settings, on small tables of its own; and the notices and problems that it speaks with."""

import copy
import enum
import logging
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetx import notices
from fleetx.notices import Problems, did_you_mean, shown, tell_once
from fleetx.settings import (
    Bool,
    ByteSize,
    Choice,
    Configs,
    Float,
    Int,
    ListOf,
    OrNone,
    Section,
    Settings,
    Text,
)


class Inner(Configs):
    """Every kind once."""

    on = Bool(False)
    count = Int(2, at_least=1)
    ratio = Float(0.5, above=0, below=1)
    decay = Float(0.0, at_least=0)
    word = Choice("red", "green")
    names = ListOf(Text("layer"))
    shape = ListOf(Int(1, at_least=1))
    parts = ListOf(Float(0.9, at_least=0, below=1), [0.9])
    budget = OrNone(ByteSize("30GiB"))


class Outer(Settings):
    fast = Bool(False)
    inner = Section(Inner)


def refused(kind, **wrong):
    """The message with which Inner refuses this; and nothing may have changed."""
    settings = Inner()
    with pytest.raises(kind) as caught:
        settings.update(wrong)
    assert settings == Inner()
    return str(caught.value)


# Types and ranges

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
ANYTHING = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=4)


@given(ANYTHING)
def test_a_bool_takes_bools_and_nothing_else(value):
    if isinstance(value, bool):
        assert Inner(on=value).on is value
    else:
        assert "on must be True or False, got" in refused(TypeError, on=value)


@pytest.mark.parametrize(("value", "remedy"), [(1, "True"), (0, "False"), ("true", "True"), ("False", "False")])
def test_a_bool_says_what_was_probably_meant(value, remedy):
    assert refused(TypeError, on=value).endswith(f"; write {remedy}")
    assert refused(TypeError, on=2).endswith("; write True or False")


@given(ANYTHING)
def test_an_int_is_no_bool_and_stays_in_its_range(value):
    if isinstance(value, int) and not isinstance(value, bool):
        if 1 <= value < 2**63:
            assert type(Inner(count=value).count) is int
            assert Inner(count=value).count == value
        else:
            assert "count must be an int >= 1, got" in refused(ValueError, count=value)
    else:
        assert "count must be an int >= 1, got" in refused(TypeError, count=value)


def test_an_int_beyond_all_bounds_is_still_told_properly():
    message = refused(ValueError, count=10**5000)
    assert message == (
        "count must be an int >= 1, got a value of type int that cannot be shown; write 1 or more, and less than 2**63"
    )


@given(ANYTHING)
def test_a_float_takes_finite_numbers_of_its_range(value):
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if 0 < value < 1:
            assert type(Inner(ratio=value).ratio) is float
            assert Inner(ratio=value).ratio == value
        else:
            assert "ratio must be a number > 0 and < 1, got" in refused(ValueError, ratio=value)
    else:
        assert "ratio must be a number > 0 and < 1, got" in refused(TypeError, ratio=value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, -(10**400), -1e-300, -1])
def test_a_float_is_finite_and_in_range(value):
    assert "decay must be a number >= 0, got" in refused(ValueError, decay=value)


def test_an_int_becomes_a_float():
    settings = Inner(decay=3)
    assert type(settings.decay) is float
    assert settings.decay == 3.0


@given(ANYTHING)
def test_a_choice_takes_its_words_only(value):
    kind = ValueError if isinstance(value, str) else TypeError
    assert "word must be one of 'red', 'green', got" in refused(kind, word=value)


def test_a_choice_shows_the_nearest_word():
    assert refused(ValueError, word="gren").endswith("got 'gren'; did you mean 'green'?")
    assert refused(ValueError, word="RED").endswith("got 'RED'; did you mean 'red'?")


@given(ANYTHING)
def test_a_list_of_names_is_a_list_of_names(value):
    names = isinstance(value, list) and all(isinstance(one, str) for one in value)
    if names and all(one.strip() and one.isprintable() for one in value):
        assert Inner(names=value).names == value
    else:
        with pytest.raises((TypeError, ValueError), match="names"):
            Inner(names=value)


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "a\tb", "\x00", "\ud800", "\x7f", "a\u2028b"])
def test_names_are_printable(name):
    assert "names[1] must be a str of printable characters" in refused(ValueError, names=["fine", name])


def test_a_bare_str_is_no_list():
    assert refused(TypeError, names="layer1") == (
        "names must be a list, each item a str of printable characters that is not blank, "
        "got 'layer1' (str); write a list such as ['layer1']"
    )


@pytest.mark.parametrize("value", [{"a"}, {"a": 1}, iter(["a"]), 5, None, b"a", range(3)])
def test_only_lists_and_tuples_are_lists(value):
    assert "write a list such as ['layer']" in refused(TypeError, names=value)


def test_every_wrong_item_is_named():
    message = refused(ValueError, shape=[1, 0, True, 2.0], parts=(0.5, 1))
    assert "shape[1] must be an int >= 1, got 0" in message
    assert "shape[2] must be an int >= 1, got True (bool)" in message
    assert "shape[3] must be an int >= 1, got 2.0 (float)" in message
    assert "parts[1] must be a number >= 0 and < 1, got 1" in message
    assert message.startswith("these settings: 4 problems\n  - ")


def test_a_list_is_copied_and_replaced():
    mine = ["a"]
    settings = Inner(names=mine)
    mine.append("b")
    assert settings.names == ["a"]
    settings.names = ("c", "d")
    assert type(settings.names) is list
    assert settings.names == ["c", "d"]
    settings.parts = []
    assert settings.parts == []


def test_defaults_are_shared_with_nobody():
    Inner().names.append("x")
    Inner().parts.append(0.1)
    assert Inner().names == []
    assert Inner().parts == [0.9]


@pytest.mark.parametrize("value", [None, 1, "30GiB", "1.5 tb", 2**63 - 1])
def test_a_budget_is_kept_as_written(value):
    assert Inner(budget=value).budget == value


@pytest.mark.parametrize("value", [0, -1, "0GiB", "30G", "much", "", 2**63, "99999999999TiB", "1GiB\n"])
def test_a_budget_is_an_amount(value):
    message = refused(ValueError, budget=value)
    assert message.startswith("budget must be an amount of memory above 0 and below 2**63 bytes, got")
    assert message.endswith("; write for example '30GiB', or an int of bytes")


@pytest.mark.parametrize("value", [True, 1.5, [], b"1GiB"])
def test_a_budget_of_a_wrong_type(value):
    assert "budget must be an amount of memory" in refused(TypeError, budget=value)


def test_subclasses_of_int_and_str_are_stored_plain():
    class Number(enum.IntEnum):
        THREE = 3

    class Colour(str, enum.Enum):  # noqa: UP042  the older spelling, whose str() is not its value
        GREEN = "green"

    settings = Inner(
        count=Number.THREE, word=Colour.GREEN, names=[Colour.GREEN], budget=Number.THREE, decay=Number.THREE
    )
    assert [type(v) for v in (settings.count, settings.word, settings.names[0], settings.budget)] == [
        int,
        str,
        str,
        int,
    ]
    assert (settings.count, settings.word, settings.names, settings.decay) == (3, "green", ["green"], 3.0)


# Names


def test_an_unknown_attribute_shows_the_nearest():
    settings = Inner()
    with pytest.raises(AttributeError, match=r"^Inner has no setting 'cuont'; did you mean 'count'\?$"):
        settings.cuont = 1
    with pytest.raises(AttributeError, match=r"did you mean 'count'\?"):
        _ = settings.cuont
    with pytest.raises(AttributeError, match="valid names: on, count, ratio"):
        settings.qqqqqqq = 1
    assert not hasattr(settings, "cuont")


def test_methods_and_private_state_cannot_be_overwritten():
    settings = Outer()
    for name in ("copy", "update", "_values", "__dict__", "_new"):
        with pytest.raises(AttributeError, match="has no setting"):
            setattr(settings, name, {})
    with pytest.raises(AttributeError):
        del settings.fast


def test_an_unknown_key_is_one_of_the_problems():
    with pytest.raises(ValueError) as caught:
        Outer(fsat=True, inner={"cuont": 1, 5: 6, "on": 1})
    assert str(caught.value).splitlines() == [
        "these settings: 4 problems",
        "  - Outer has no setting 'fsat'; did you mean 'fast'?",
        "  - inner has no setting 'cuont'; did you mean 'count'?",
        "  - inner has no setting 5; names are text in quotes",
        "  - inner.on must be True or False, got 1 (int); write True",
    ]


def test_even_self_is_only_an_unknown_name():
    with pytest.raises(ValueError, match="Outer has no setting 'self'"):
        Outer(self=1)


def test_items_and_attributes_are_the_same():
    settings = Inner(count=4)
    assert settings["count"] == settings.count == dict(settings)["count"] == {**settings}["count"] == 4
    settings["count"] = 5
    assert settings.count == 5
    assert list(settings) == list(settings.keys()) == list(Inner._declared)
    assert len(settings) == 9
    assert "count" in settings
    assert "cuont" not in settings
    with pytest.raises(KeyError, match=r"Inner has no setting 'cuont'; did you mean 'count'\?"):
        settings["cuont"]
    with pytest.raises(ValueError, match=r"Inner has no setting 'cuont'; did you mean 'count'\?"):
        settings["cuont"] = 1
    with pytest.raises(TypeError, match="count must be an int"):
        settings["count"] = "5"


# Sections


def test_a_dict_sets_its_keys_and_keeps_the_others():
    outer = Outer()
    held = outer.inner
    outer.inner = {"count": 7, "names": ["a"]}
    outer.inner = {"ratio": 0.25}
    assert (held.count, held.names, held.ratio) == (7, ["a"], 0.25)
    assert outer.inner is held


def test_configs_can_be_taken_from_elsewhere_and_stay_separate():
    first, second = Outer(inner={"names": ["a"], "count": 9}), Outer(inner={"ratio": 0.1})
    second.inner = first.inner
    assert second.inner == first.inner
    second.inner.names.append("b")
    second.inner.count = 1
    assert (first.inner.names, first.inner.count) == (["a"], 9)


@pytest.mark.parametrize("value", [None, 5, "count", ["count"], [("count", 1)], True])
def test_a_section_takes_dicts(value):
    with pytest.raises(TypeError, match=r'inner must be a dict, got .*; write \{"name": value\}'):
        Outer(inner=value)


def test_all_or_nothing_over_sections():
    outer = Outer(inner={"count": 3})
    before = outer.copy()
    with pytest.raises(ValueError, match=r"inner\.ratio must be"):
        outer.update({"fast": True, "inner": {"count": 4, "names": ["n"], "ratio": 7}})
    assert outer == before
    assert not outer.was_given("fast")


# Equality, copies, freezing


def test_equality_is_by_value():
    assert Inner(count=3) == Inner(count=3) != Inner()
    assert Inner() == dict(Inner())
    assert Inner() != {}
    assert Inner() != 5
    assert Outer() != Inner()
    assert Outer(inner={"count": 3}) != Outer()
    for settings in (Inner(), Outer()):
        with pytest.raises(TypeError, match="unhashable"):
            hash(settings)


@pytest.mark.parametrize("copied", [Outer.copy, copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("frozen", [False, True])
def test_copies_are_equal_unfrozen_and_share_nothing(copied, frozen):
    outer = Outer(fast=True, inner={"names": ["a"]})
    if frozen:
        outer.freeze("a test")
    other = copied(outer)
    assert other == outer
    assert other.was_given("fast")
    assert type(other.inner.names) is list
    other.inner.names.append("b")
    other.inner.count = 9
    other.fast = False
    assert (outer.fast, outer.inner.names, outer.inner.count) == (True, ["a"], 2)
    assert not outer.inner.was_given("count")
    with pytest.raises(TypeError, match=r"^inner\.count must be"):
        other.inner.count = "9"


def test_frozen_settings_name_their_user_and_the_remedy():
    outer = Outer(inner={"names": ["a"]})
    held, names = outer.inner, outer.inner.names
    outer.freeze("model(Net)")
    outer.freeze("somebody else")
    listed = outer.inner.names
    attempts = [
        lambda: setattr(outer, "fast", True),
        lambda: setattr(outer, "inner", {"count": 1}),
        lambda: setattr(held, "count", 1),
        lambda: held.update({"count": 1}),
        lambda: held.__setitem__("count", 1),
        *(lambda call=call: getattr(listed, call)() for call in ("pop", "clear", "sort", "reverse")),
        *(lambda call=call: getattr(listed, call)("a") for call in ("append", "extend", "remove", "__iadd__")),
        *(lambda call=call: getattr(listed, call)(0) for call in ("__delitem__", "__imul__")),
        *(lambda call=call: getattr(listed, call)(0, "a") for call in ("insert", "__setitem__")),
    ]
    for attempt in attempts:
        with pytest.raises(TypeError, match=r"cannot be .*: the strategy is in use by model\(Net\); .*\.copy\(\)"):
            attempt()
    names.append("held from before")  # belongs to nobody any more
    assert outer == Outer(inner={"names": ["a"]})
    assert outer.inner.names == ["a"]
    with pytest.raises(AttributeError, match="has no setting 'fsat'"):
        outer.fsat = True


def test_a_frozen_list_reads_and_copies_as_a_list():
    inner = Inner(names=["b", "a"])
    inner.freeze("a test")
    assert (sorted(inner.names), [*inner.names, "c"], repr(inner.names)) == (
        ["a", "b"],
        ["b", "a", "c"],
        "['b', 'a']",
    )
    for copied in (
        copy.copy(inner.names),
        copy.deepcopy(inner.names),
        pickle.loads(pickle.dumps(inner.names)),
    ):
        assert type(copied) is list
        assert copied == ["b", "a"]


def test_a_section_frozen_by_itself_is_respected_by_its_owner():
    outer = Outer()
    outer.inner.freeze("a test")
    with pytest.raises(TypeError, match=r"inner\.count cannot be set: .* a test"):
        outer.update({"fast": True, "inner": {"count": 5}})
    assert not outer.fast


def test_recheck_finds_what_was_changed_in_place():
    outer = Outer()
    outer.inner.names.append(5)
    outer.inner.shape += [3]
    outer.inner.shape.append(-1)
    problems = Problems()
    outer.copy().recheck(problems)  # what is wrong survives a copy
    assert [message.partition(" must")[0] for message in problems.messages] == [
        "inner.names[0]",
        "inner.shape[1]",
    ]


def test_repr_says_it_all():
    assert repr(Inner(count=3)).startswith("Inner(on=False, count=3, ratio=0.5, ")
    assert eval(repr(Inner(names=["a"]))) == Inner(names=["a"])


# Notices and problems


def test_problems_of_types_only_are_a_type_error_and_mixed_ones_a_value_error():
    assert "2 problems" in refused(TypeError, on=1, count="x")
    assert "2 problems" in refused(ValueError, on=1, count=-1)


def test_very_many_problems_are_cut():
    lines = refused(TypeError, names=list(range(1000))).splitlines()
    assert lines[0] == "these settings: 1000 problems"
    assert len(lines) == 22
    assert lines[-1] == "  - and 980 more"


def test_no_problems_raise_nothing():
    Problems().raise_if_any("here")


def test_values_are_shown_short():
    class Rude:
        def __repr__(self):
            raise RuntimeError

    assert shown("x" * 10**6) == "'" + "x" * 76 + "..."
    assert shown(Rude()) == "a value of type Rude that cannot be shown"
    assert refused(TypeError, on=Rude()).startswith("on must be True or False, got a value of type Rude")


def test_a_very_long_misspelling_is_answered_at_once():
    assert did_you_mean("count" * 10**5, ["count", "ratio"]) == "valid names: count, ratio"


def test_a_notice_comes_once_per_topic_and_on_rank_0_only(monkeypatch, caplog):
    monkeypatch.setattr(notices, "_told", set())
    monkeypatch.delenv("RANK", raising=False)
    with caplog.at_level(logging.WARNING, "fleetx"):
        for topic in ("a", "a", "b"):
            tell_once(topic, f"about {topic} 100%")
        monkeypatch.setenv("RANK", "1")
        tell_once("c", "about c")
        monkeypatch.setenv("RANK", "0")
        tell_once("d", "about d")
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("fleetx", "WARNING", "about a 100%"),
        ("fleetx", "WARNING", "about b 100%"),
        ("fleetx", "WARNING", "about d"),
    ]
