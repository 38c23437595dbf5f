"""OpenAI-style message dicts to transcript values and back.

Strict about types: what can't be understood is refused, not dropped. Fields that
say nothing to the model are let be.
"""

from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from mlxmoe.chat.arguments import object_or_text
from mlxmoe.errors import PromptError
from mlxmoe.transcript import Image, Message, Part, Role, Text, ToolCall

_ROLES: tuple[Role, ...] = get_args(Role)
_T = TypeVar("_T")


def message_from_dict(message: Mapping[str, Any]) -> Message:
    """One message of a Chat Completions request.

    Reasoning is `reasoning_content`, or `reasoning` when that is empty. Pictures
    are noted but not opened (size 0 x 0). A tool result's `tool` beats its `name`.
    Raises: PromptError naming the field.
    """
    if not isinstance(message, Mapping):
        raise PromptError(f"a message is a {_kind(message)}: expected an object")
    role = _field(message, "role", str)
    if role not in _ROLES:
        raise PromptError(f"message role is {role!r}: expected one of {', '.join(_ROLES)}")
    tools = tuple(_field(message, "tools", list) or ())
    if tools and role != "system":
        raise PromptError(f"tools in a message of role {role}: expected them in a system message")
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise PromptError("tools in a message: expected objects")
    name = _field(message, "name", str)
    if role == "tool":
        name = _field(message, "tool", str) or name
    calls = (_field(message, "tool_calls", list) or []) if role == "assistant" else []
    reasoning = _field(message, "reasoning_content", str) or _field(message, "reasoning", str)
    return Message(
        role,
        _parts(message.get("content")),
        (reasoning or "") if role == "assistant" else "",
        tuple(_call(call) for call in calls),
        _field(message, "tool_call_id", str) if role == "tool" else None,
        name or None,
        tools,
    )


def message_to_dict(message: Message) -> dict[str, Any]:
    """The dict that chat templates and OpenAI-style clients read.

    Raises: PromptError for images and tools inside messages, which it can't hold.
    """
    if message.tools or any(isinstance(part, Image) for part in message.content):
        raise PromptError("images and tools inside messages: this model's chat format has neither")
    result: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning:
        result["reasoning_content"] = message.reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    optional = {"tool_call_id": message.tool_call_id, "name": message.name}
    return result | {key: value for key, value in optional.items() if value is not None}


def _parts(content: Any) -> tuple[Part, ...]:
    match content:
        case None:
            return ()
        case str():
            return (Text(content),) if content else ()
        case list():
            return tuple(_part(part) for part in content)
    raise PromptError(f"message content is a {_kind(content)}: expected a string or a list")


def _part(part: Any) -> Part:
    if not isinstance(part, Mapping):
        raise PromptError(f"a content part is a {_kind(part)}: expected an object")
    kind = _field(part, "type", str)
    if kind == "text":
        text = _field(part, "text", str)
        if text is None:
            raise PromptError("a content part of type text has no text")
        return Text(text)
    if kind in ("image", "image_url"):
        return Image(0, 0)
    raise PromptError(f"a content part's type is {kind!r}: expected text, image or image_url")


def _call(call: Any) -> ToolCall:
    if not isinstance(call, Mapping):
        raise PromptError(f"a tool call is a {_kind(call)}: expected an object")
    function = call.get("function", call)
    if not isinstance(function, Mapping):
        raise PromptError(f"a tool call's function is a {_kind(function)}: expected an object")
    name = _field(function, "name", str)
    if not name:
        raise PromptError("a tool call has no name: expected the tool's name")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    elif isinstance(arguments, str):
        try:
            arguments = object_or_text(arguments)
        except ValueError as error:
            raise PromptError(f"tool call {name}: {error}") from error
    elif not isinstance(arguments, Mapping):
        raise PromptError(
            f"tool call {name}: arguments are a {_kind(arguments)}, expected an object or a string"
        )
    return ToolCall(name, arguments, _field(call, "id", str))


def _field(holder: Mapping[str, Any], key: str, kind: type[_T]) -> _T | None:
    value = holder.get(key)
    if value is not None and not isinstance(value, kind):
        raise PromptError(f"{key} is a {_kind(value)}: expected a {kind.__name__}")
    return value


def _kind(value: Any) -> str:
    return type(value).__name__
