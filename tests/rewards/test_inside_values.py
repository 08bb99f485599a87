"""Tests of how values cross between the tests and the program."""

import collections
import datetime
import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_grpo.rewards.inside.values import PROGRAM_MODULE, decode, encode, replace

pytestmark = pytest.mark.slow

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(2**60, 2**2000),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.complex_numbers(allow_nan=False),
    st.fractions(),
    st.decimals(allow_nan=False),
    st.dates(),
    st.datetimes(),
    st.times(),
    st.sampled_from([int, str, list]),
    st.builds(range, st.integers(), st.integers(), st.integers(1)),
)
plain = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.sets(scalars),
        st.frozensets(scalars),
        st.dictionaries(scalars, inner),
    ),
    max_leaves=20,
)


def refuse(value: Any) -> dict[str, Any]:
    raise AssertionError(f"{value!r} is not plain")


def crossed(value: Any) -> Any:
    written = json.loads(json.dumps(encode(value, refuse)))
    return decode(written, lambda tag, content: refuse(tag))


@settings(deadline=None)
@given(plain)
def test_plain_data_comes_out_as_it_went_in(value: Any) -> None:
    copy = crossed(value)
    assert copy == value
    assert type(copy) is type(value)


def test_types_are_kept_where_values_are_equal() -> None:
    assert [type(part) for part in crossed([1, 1.0, True, (1,), -0.0])] == [int, float, bool, tuple, float]
    assert str(crossed(-0.0)) == "-0.0"
    assert str(crossed(float("nan"))) == "nan"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.OrderedDict(a=1), {"a": 1}),
        (bytearray(b"ab"), b"ab"),
        (datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC), datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC)),
        ([Fraction(1, 3), Decimal("1.50")], [Fraction(1, 3), Decimal("1.50")]),
    ],
)
def test_types_of_the_library_are_read_as_the_plain_ones_below_them(value: Any, expected: Any) -> None:
    assert crossed(value) == expected


def test_a_number_that_lies_about_equality_is_read_as_the_number_it_is() -> None:
    liar = type(
        "Liar", (int,), {"__eq__": lambda self, other: True, "__int__": lambda self: 9, "__hash__": int.__hash__}
    )
    assert crossed(liar(3)) == 3
    assert crossed(liar(3)) != 4


@pytest.mark.parametrize("base", [object, list, dict, int])
def test_an_object_of_a_class_of_the_program_is_not_plain(base: type) -> None:
    own = type("Own", (base,), {"__module__": PROGRAM_MODULE})
    assert encode(own(), lambda value: {"mine": 0}) == {"mine": 0}


@settings(deadline=None)
@given(st.lists(st.integers()), st.lists(st.integers()))
def test_replace_keeps_the_object_and_gives_it_the_content(before: list[int], after: list[int]) -> None:
    for kind in (list, set, lambda items: dict.fromkeys(items, 1)):
        target, content = kind(before), kind(after)
        alias = target
        replace(target, content)
        assert alias == content
