"""A tool call's arguments: Python values, their XTML type and text, and back."""

import json
import math
from collections.abc import Mapping
from typing import Any

from mlxmoe.errors import PromptError


def argument_text(value: Any) -> tuple[str, str]:
    """The type word and text of one argument: strings raw, the rest as JSON.

    Raises: PromptError for a value that JSON does not have.
    """
    match value:
        case str():
            return "string", value
        case bool():
            kind = "boolean"
        case None:
            kind = "null"
        case int() | float():
            kind = "number"
        case Mapping():
            kind = "object"
        case list() | tuple():
            kind = "array"
        case _:
            raise PromptError(f"a tool call's argument is a {type(value).__name__}: expected JSON")
    return kind, dump_json(value)


def argument_value(text: str, kind: str) -> Any:
    """The value of one argument; text that is not JSON stays text."""
    if kind == "string":
        return text
    try:
        return _strict(text)
    except (ValueError, RecursionError):
        return text


def _strict(text: str) -> Any:
    """JSON as its grammar has it. Raises: ValueError also for NaN and infinite numbers."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits} is out of range")
    return value


def object_or_text(raw: str) -> dict[str, Any] | str:
    """A JSON object as a mapping, blank text as an empty one, other text as it is.

    Raises: ValueError for valid JSON that is not an object.
    """
    if not raw.strip():
        return {}
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    if not isinstance(value, dict):
        raise ValueError(f"arguments are a JSON {argument_text(value)[0]}, expected an object")
    return value


def dump_json(value: Any, compact: bool = False) -> str:
    """JSON as the model was trained on it: spaced, or compact; nothing escaped.

    Raises: PromptError for a value that JSON does not have, or too deep a one.
    """
    separators = (",", ":") if compact else None
    try:
        return json.dumps(_plain(value, compact), ensure_ascii=False, separators=separators)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"can't be written as JSON: {error}") from error


def _plain(value: Any, sort: bool) -> Any:
    match value:
        case Mapping():
            items = sorted(value.items()) if sort else value.items()
            return {key: _plain(item, sort) for key, item in items}
        case list() | tuple():
            return [_plain(item, sort) for item in value]
        case _:
            return value
