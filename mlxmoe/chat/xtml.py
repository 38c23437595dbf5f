"""Kimi K3's prompt format: a transcript becomes segments of XTML.

Follows the released encoding_k3.py (no Jinja template exists). All reasoning of
earlier turns is rendered; nothing is stripped.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxmoe.chat.arguments import argument_text, dump_json, object_or_text
from mlxmoe.chat.segments import Segment, SegmentWriter
from mlxmoe.errors import PromptError
from mlxmoe.transcript import TIERS, Message, Text, ToolCall

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema."
_MORE_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools."
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": "You MUST call tools in the next message.",
    "none": "You MUST NOT call any tools in the next message.",
}
_RAW_JSON = (
    "Your response must be raw JSON data without markdown code blocks (```json) or any "
    "additional formatting."
)


@dataclass(frozen=True, slots=True)
class XtmlOptions:
    """What surrounds the conversation. `effort` None leaves its message out;
    `image_prompts` None leaves image placeholders as they are."""

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    response_format: str | Mapping[str, Any] | None = None
    response_schema: Mapping[str, Any] | None = None
    thinking: bool = True
    effort: str | None = None
    add_generation_prompt: bool = True
    image_prompts: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Rendered:
    """Segments, and for each message the number of segments up to its end."""

    segments: tuple[Segment, ...]
    ends: tuple[int, ...]


def render(messages: Sequence[Message], options: XtmlOptions) -> Rendered:
    """The whole prompt, up to the opened channel of the answer.

    Raises: PromptError for an unknown effort or response format, a tool result
    whose tool is unknown, arguments that are no object, images without a place.
    """
    writer = SegmentWriter(options.image_prompts)
    if options.tools:
        _system(writer, "tool-declare", _declared(_TOOLS, options.tools))
    if options.thinking and options.effort is not None:
        if options.effort not in TIERS:
            raise PromptError(f"effort {options.effort!r}: expected one of {', '.join(TIERS)}")
        _system(writer, "thinking-effort", _EFFORT.format(options.effort))
    _conversation(writer, messages, options.thinking)
    if isinstance(options.tool_choice, str) and options.tool_choice in _TOOL_CHOICE:
        choice = options.tool_choice
        said = f"The system is invoked with `tool_choice={choice}`.\n{_TOOL_CHOICE[choice]}"
        _system(writer, "tool-choice", said)
    said = _format_text(options)
    if said:
        _system(writer, "response-format", said)
    if options.add_generation_prompt:
        writer.open("message", role="assistant")
        writer.open("think" if options.thinking else "response")
    writer.check_images()
    return Rendered(tuple(writer.segments), tuple(writer.ends))


def _system(writer: SegmentWriter, kind: str, text: str) -> None:
    writer.open("message", role="system", type=kind)
    writer.text(text)
    writer.end_message()


def _declared(title: str, tools: Sequence[Mapping[str, Any]]) -> str:
    return f"{title}\n\n```json\n{dump_json(tools, compact=True)}\n```"


def _format_text(options: XtmlOptions) -> str:
    wanted = options.response_format
    kind = wanted.get("type") if isinstance(wanted, Mapping) else wanted
    if kind is None or kind == "text":
        return ""
    if kind not in ("json_object", "json_schema"):
        raise PromptError(f"response_format {kind!r}: expected text, json_object or json_schema")
    said = f"The system is invoked with `response_format={kind}`.\n{_RAW_JSON}"
    if kind == "json_object":
        return said
    schema: Any = options.response_schema
    if schema is None and isinstance(wanted, Mapping):
        schema = wanted.get("json_schema")
        schema = schema.get("schema", schema) if isinstance(schema, Mapping) else schema
    return (
        f"{said}\nThe JSON data must match the following schema:\n"
        f"```json\n{dump_json(schema, compact=True)}\n```"
    )


def _conversation(writer: SegmentWriter, messages: Sequence[Message], thinking: bool) -> None:
    calls: tuple[ToolCall, ...] = ()
    results: list[Message] = []
    num_results = 0
    for message in (*messages, None):
        if message is not None and message.role == "tool":
            results.append(message)
            continue
        for name, result in _named(results, calls, num_results):
            num_results += 1
            writer.open("message", role="tool", tool=name, index=str(num_results))
            _content(writer, result)
            writer.end_message()
        results = []
        if message is None:
            return
        if message.role == "assistant":
            calls, num_results = message.tool_calls, 0
            _assistant(writer, message, thinking)
        elif message.role == "system" and message.tools:
            _system(writer, "tool-declare", _declared(_MORE_TOOLS, message.tools))
        else:
            writer.open("message", **_role(message))
            _content(writer, message)
            writer.end_message()


def _named(
    results: list[Message], calls: tuple[ToolCall, ...], num_before: int
) -> Iterable[tuple[str, Message]]:
    """A run of tool results with their tools' names, in the order of the calls if
    every result has the id of a call."""
    place: dict[str | None, int] = {call.id: i for i, call in enumerate(calls) if call.id}
    if all(result.tool_call_id in place for result in results):
        ordered = sorted(results, key=lambda result: place[result.tool_call_id])
        return [(calls[place[result.tool_call_id]].name, result) for result in ordered]
    named = []
    for index, result in enumerate(results, num_before):
        name = result.name or (calls[index].name if index < len(calls) else None)
        if not name:
            raise PromptError(
                f"tool result {index + 1} belongs to no tool call: expected a tool name in it, "
                f"or one of the {len(calls)} calls of the assistant message before it"
            )
        named.append((name, result))
    return named


def _role(message: Message) -> dict[str, str]:
    return {"role": message.role} | ({"name": message.name} if message.name else {})


def _content(writer: SegmentWriter, message: Message) -> None:
    for part in message.content:
        if isinstance(part, Text):
            writer.text(part.text)
        else:
            writer.image()


def _assistant(writer: SegmentWriter, message: Message, thinking: bool) -> None:
    writer.open("message", **_role(message))
    if thinking:
        writer.open("think")
        writer.text(message.reasoning if message.reasoning.strip() else "")
        writer.close("think")
    writer.open("response")
    _content(writer, message)
    writer.close("response")
    if message.tool_calls:
        writer.open("tools")
        for index, call in enumerate(message.tool_calls, 1):
            writer.open("call", tool=call.name, index=str(index))
            _arguments(writer, call)
            writer.close("call")
        writer.close("tools")
    writer.end_message()


def _arguments(writer: SegmentWriter, call: ToolCall) -> None:
    arguments = call.arguments
    if isinstance(arguments, str):
        try:
            arguments = object_or_text(arguments)
        except ValueError as error:
            raise PromptError(f"tool call {call.name}: {error}") from error
    if isinstance(arguments, str):
        writer.open("json", type="object")
        writer.text(arguments)
        writer.close("json")
        return
    for key, value in arguments.items():
        kind, text = argument_text(value)
        writer.open("argument", key=key, type=kind)
        writer.text(text)
        writer.close("argument")
