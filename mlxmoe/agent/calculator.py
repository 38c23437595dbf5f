"""The calculator: sums in exact fractions, read by their grammar and never evaluated as code.

sum: product, then any number of "+" or "-" and a product.
product: factor, then any number of "*" or "/" and a factor.
factor: "-" and a factor, or a sum in parentheses, or a number.
"""

import re
from fractions import Fraction

from mlxmoe.agent.tool import ERROR, Tool, cut

# Bounds the depth of the parse and, as there are no powers, the digits of the result.
MOST_CHARACTERS = 200
DECIMALS = 6
_TOKEN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+|[-+*/()])")
# Also x, the signs for times and divided by, and the typographic minus.
_SIGNS = str.maketrans("xX\u00d7\u00f7\u2212", "***/-")


class _NotASumError(Exception):
    """The text does not follow the grammar."""


class _Sum:
    """One pass over the tokens of a sum."""

    def __init__(self, text: str):
        self._tokens = _tokens(text)
        self._at = 0

    def value(self) -> Fraction:
        """All of it. Raises _NotASumError, ZeroDivisionError."""
        value = self._sum()
        if self._at < len(self._tokens):
            raise _NotASumError
        return value

    def _sum(self) -> Fraction:
        value = self._product()
        while (sign := self._take("+", "-")) is not None:
            value += self._product() if sign == "+" else -self._product()
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while (sign := self._take("*", "/")) is not None:
            value = value * self._factor() if sign == "*" else value / self._factor()
        return value

    def _factor(self) -> Fraction:
        if self._take("-"):
            return -self._factor()
        if self._take("("):
            value = self._sum()
            if not self._take(")"):
                raise _NotASumError
            return value
        if self._at == len(self._tokens) or self._tokens[self._at] in "+*/)":
            raise _NotASumError
        self._at += 1
        return Fraction(self._tokens[self._at - 1])

    def _take(self, *wanted: str) -> str | None:
        """The next token, if it is one of `wanted`."""
        if self._at < len(self._tokens) and self._tokens[self._at] in wanted:
            self._at += 1
            return self._tokens[self._at - 1]
        return None


def _tokens(text: str) -> list[str]:
    if len(text) > MOST_CHARACTERS:
        raise _NotASumError
    text, at, tokens = text.translate(_SIGNS).rstrip(), 0, []
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _NotASumError
        tokens.append(match.group(1))
        at = match.end()
    return tokens


def number_text(value: Fraction) -> str:
    """`value` in digits: whole numbers as they are, others rounded to 6 decimals."""
    scaled = round(value * 10**DECIMALS)
    whole, rest = divmod(abs(scaled), 10**DECIMALS)
    decimals = f".{rest:0{DECIMALS}}".rstrip("0").rstrip(".")
    return f"{'-' if scaled < 0 else ''}{whole}{decimals}"


def calculate(expression: str) -> str:
    """The value of a sum, or "error: division by zero", or "error: not a sum: …"."""
    try:
        return number_text(_Sum(expression).value())
    except ZeroDivisionError:
        return f"{ERROR}division by zero"
    except _NotASumError:
        return f"{ERROR}not a sum: {cut(expression)}"


CALCULATOR = Tool("calculator", "Work out a sum", ("expression",), calculate)
