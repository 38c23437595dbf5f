"""The calculator: exact sums by their grammar, and nothing else of what it is given."""

import re
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxmoe.agent.calculator import MOST_CHARACTERS, calculate, number_text

Term = tuple[str, Fraction | None]

NUMBERS = st.one_of(
    st.integers(0, 10**6).map(str),
    st.tuples(st.integers(0, 999), st.integers(0, 999)).map(lambda two: f"{two[0]}.{two[1]:03}"),
).map(lambda text: (text, Fraction(text)))


def joined(parts: tuple[Term, str, Term]) -> Term:
    """Two terms in parentheses with a sign between; None for a division by zero."""
    (left, a), sign, (right, b) = parts
    text = f"({left}{sign}{right})"
    if a is None or b is None or (sign.strip() in "/÷" and b == 0):
        return text, None
    match sign.strip():
        case "+":
            return text, a + b
        case "-":
            return text, a - b
        case "/" | "÷":
            return text, a / b
        case _:
            return text, a * b


SIGNS = st.sampled_from(["+", "-", " - ", "*", "x", " × ", "/", " ÷ "])  # noqa: RUF001
TERMS = st.recursive(
    NUMBERS,
    lambda terms: st.one_of(
        st.tuples(terms, SIGNS, terms).map(joined),
        terms.map(lambda term: (f"-{term[0]}", None if term[1] is None else -term[1])),
    ),
    max_leaves=8,
)


@given(TERMS)
def test_sums_are_exact(term: Term) -> None:
    """Any tree of the four operations against exact fractions."""
    text, value = term
    if len(text) > MOST_CHARACTERS:
        assert calculate(text).startswith("error: not a sum: ")
    else:
        assert calculate(text) == (
            "error: division by zero" if value is None else number_text(value)
        )


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=9),
    st.lists(st.sampled_from("+-*"), min_size=8, max_size=8),
)
def test_precedence_is_python_s(numbers: list[int], signs: list[str]) -> None:
    """Without parentheses, and with spaces anywhere between."""
    text = "".join(f"{n}{sign}" for n, sign in zip(numbers, signs, strict=False)).rstrip("+-*")

    assert str(eval(text)) == calculate(text) == calculate(re.sub(r"([-+*])", r"  \1 ", text))


@given(st.fractions(-(10**9), 10**9))
def test_numbers_are_rounded_to_six_decimals(value: Fraction) -> None:
    """The nearest number of six decimals, in plain digits, nothing needless at its end."""
    text = number_text(value)

    assert abs(Fraction(text) - value) <= Fraction(1, 2 * 10**6)
    assert text == format(Decimal(text).normalize() + 0, "f")
    assert "-0" != text


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12+7", "19"), ("4 - 7", "-3"), ("1/3", "0.333333"), ("2/3", "0.666667"), ("5/2", "2.5"),
        ("12 x 12", "144"), ("0.1+0.2", "0.3"), ("--3", "3"), ("2*-3", "-6"), (".5*4", "2"),
        ("1/10000000", "0"), ("-1/10000000", "0"), ("8/4/2", "1"), ("(1+2)*3", "9"),
        ("9" * 99 + "*" + "9" * 99, str(int("9" * 99) ** 2)),
        ("1/0", "error: division by zero"), ("1/(2-2)", "error: division by zero"),
        ("", "error: not a sum: "), ("2+", "error: not a sum: 2+"),
        ("2 3", "error: not a sum: 2 3"), ("1)", "error: not a sum: 1)"),
        ("2**3", "error: not a sum: 2**3"), ("9^9", "error: not a sum: 9^9"),
        ("()", "error: not a sum: ()"), ("(1", "error: not a sum: (1"),
        ("+1", "error: not a sum: +1"), ("1.", "error: not a sum: 1."),
        ("1e9", "error: not a sum: 1e9"), ("1,000", "error: not a sum: 1,000"),
        ("٣", "error: not a sum: ٣"), ("abs(1)", "error: not a sum: abs(1)"),
        ("__import__('os')", "error: not a sum: __import__('os')"),
        ("1+" * 100 + "1", "error: not a sum: " + "1+" * 30),
    ],
)  # fmt: skip
def test_results(expression: str, result: str) -> None:
    """What the model reads, word for word."""
    assert result == calculate(expression)


@pytest.mark.parametrize(
    "deep", ["(" * 100 + "1" + ")" * 99, "(" * 99 + "1" + ")" * 99, "-" * 199 + "1"]
)
def test_depth_is_bounded_by_the_length(deep: str) -> None:
    """As deep as a sum may be is no trouble."""
    expected = {"(" * 99 + "1" + ")" * 99: "1", "-" * 199 + "1": "-1"}

    assert expected.get(deep, f"error: not a sum: {deep[:60]}") == calculate(deep)


@given(st.text(max_size=30))
def test_any_text_gives_a_result(text: str) -> None:
    """No exception; a number or an error."""
    result = calculate(text)

    assert result.startswith("error: ") or str(Fraction(result))
