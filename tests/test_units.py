import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetx.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        ("30GiB", 30 * 2**30),
        ("30 gib", 30 * 2**30),
        (" 30GIB ", 30 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("0.5KiB", 512),
        ("2TiB", 2**41),
        ("16MiB", 2**24),
        ("1KB", 1000),
        ("1.5 MB", 1_500_000),
        ("80gb", 80 * 10**9),
        ("1TB", 10**12),
        ("512B", 512),
        ("0GiB", 0),
        (0, 0),
        (32212254720, 32212254720),
    ],
)
def test_amounts(amount, expected):
    assert parse_bytes(amount) == expected
    assert type(parse_bytes(amount)) is int


def test_decimals_are_exact_and_parts_of_a_byte_are_dropped():
    assert parse_bytes("0.1GB") == 100_000_000
    assert parse_bytes("0.3TB") == 300_000_000_000
    assert parse_bytes("0.1KiB") == 102
    assert parse_bytes("999999999999999999TiB") == 999999999999999999 * 2**40


@pytest.mark.parametrize(
    "amount",
    [
        "",
        " ",
        "GiB",
        "30",
        "30G",
        "30GiBB",
        "30 Gi B",
        "-1GiB",
        "+1GiB",
        "1e3GiB",
        "1.GiB",
        ".5GiB",
        "1,5GiB",
        "1_000GiB",
        "0x10GiB",
        "nanGiB",
        "infGiB",
        "٣GiB",
        "30GiB\x00",
        "30PiB",
        "9" * 5000 + "GiB",
        "1" * 10**6,
    ],
)
def test_what_is_no_amount_is_refused_with_rule_value_and_remedy(amount):
    with pytest.raises(ValueError) as caught:
        parse_bytes(amount)
    message = str(caught.value)
    assert "must be a number and one of the units" in message
    assert repr(amount)[:20] in message
    assert "30GiB" in message.rpartition(";")[2]
    assert len(message) < 300


def test_what_is_easily_overlooked_in_an_amount_is_said():
    for amount in ("0", "256", " 1.5 "):
        with pytest.raises(ValueError, match=r"got .*, which has no unit; write for example"):
            parse_bytes(amount)
    with pytest.raises(ValueError, match=r"got '-1GiB' \(str\), which is negative; write for example"):
        parse_bytes("-1GiB")


def test_negative_bytes():
    with pytest.raises(ValueError, match=r"must not be negative, got -5 \(int\); write 0 or more"):
        parse_bytes(-5)


@pytest.mark.parametrize("amount", [True, 1.5, None, b"1GiB", ["1GiB"]])
def test_wrong_types(amount):
    with pytest.raises(TypeError, match=r"must be text or an int of bytes, got .*; write for example"):
        parse_bytes(amount)


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1019 * 1024, "1019 KiB"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (10 * 1024, "10 KiB"),
        (100 * 2**20, "100 MiB"),
        (2**20 - 1, "1 MiB"),
        (2**30 - 1, "1 GiB"),
        (30 * 2**30, "30 GiB"),
        (int(1.25 * 2**30), "1.25 GiB"),
        (2**40, "1 TiB"),
        (5000 * 2**40, "5000 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_format(n, expected):
    assert format_bytes(n) == expected


@pytest.mark.parametrize("n", [1.0, "1", True, None])
def test_format_takes_ints_only(n):
    with pytest.raises(TypeError, match=r"takes an int of bytes, got .*; round it"):
        format_bytes(n)


@given(st.integers(0, 10**18 - 1), st.sampled_from(["KiB", "mib", "GIB", "TiB", "kb", "MB", "Gb", "tB", "b"]))
def test_any_whole_number_of_any_unit(n, unit):
    size = parse_bytes(f"1{unit}")
    assert parse_bytes(f"{n}{unit}") == parse_bytes(f"{n} {unit}") == parse_bytes(f"{n}.0{unit}") == n * size


@given(st.integers(0, 2**60))
def test_what_is_printed_reads_back_within_its_rounding(n):
    text = format_bytes(n)
    assert abs(parse_bytes(text) - n) <= n * 0.005 + 1  # half a hundredth, and a part of a byte
    assert text.endswith("TiB") or not text.startswith("1024 ")


@given(st.text(max_size=20))
def test_any_text_is_an_amount_or_a_value_error(text):
    try:
        assert parse_bytes(text) >= 0
    except ValueError as error:
        assert "must be a number" in str(error)  # noqa: PT017  either way is right here
