"""The chat of models other than Kimi K3, out of mlx-lm's parts.

mlx-lm's `TokenizerWrapper` has the template, the thinking markers, the tool parser
and a streaming detokenizer; no code from the checkpoint is run. Unlike Kimi's,
these templates are one string: text that looks like a control token becomes one.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import load
from mlx_lm.utils import load_config

from mlxmoe.chat.markers import Markers
from mlxmoe.chat.prompt import Channel, Prompt
from mlxmoe.chat.wire import message_to_dict
from mlxmoe.errors import CheckpointError, PromptError
from mlxmoe.events import (
    Event,
    FinishReason,
    ReasoningDelta,
    Request,
    TextDelta,
    ToolArgumentDelta,
    ToolCallDropped,
    ToolCallFinished,
    ToolCallStarted,
)
from mlxmoe.transcript import ToolCall


class ForeignChat:
    """Reads the tokenizer files and config.json of the checkpoint in `folder`.

    Raises: CheckpointError when mlx-lm can't load them.
    """

    def __init__(self, folder: Path) -> None:
        no_code = {"trust_remote_code": False, "local_files_only": True}
        # Files of strangers make transformers raise errors of every kind.
        try:
            eos = load_config(folder).get("eos_token_id")
            self.tokenizer: Any = load(folder, no_code, eos_token_ids=eos)
        except Exception as error:
            raise CheckpointError(
                f"{folder}: the tokenizer can't be loaded ({_brief(error)}). Expected config.json "
                "and tokenizer files that mlx-lm reads without the checkpoint's own code."
            ) from error
        self._folder = folder
        self.stop_ids = frozenset(self.tokenizer.eos_token_ids)
        self.close_thinking: tuple[int, ...] = self.tokenizer.think_end_tokens or ()

    def render(self, request: Request) -> Prompt:
        """The request's prompt by the model's own template.

        The one end is that of the last message, where the template allows it.
        Raises: PromptError without a template, and for what templates can't say:
        images, forced tools, response formats.
        """
        if not request.messages:
            raise PromptError("the conversation is empty: expected at least one message")
        if not self.tokenizer.has_chat_template:
            raise PromptError(
                f"{self._folder}: the model has no chat template. Put its chat_template.jinja "
                "there, or use a checkpoint made for chat."
            )
        _check_askable(request)
        tools = () if request.tool_choice == "none" else request.tools
        text = self._template(request, tools, answer=True)
        ids = self._encode(text)
        history = self._template(request, tools, answer=False)
        past = self._encode(history) if text.startswith(history) else []
        ends = (len(past),) if past and ids[: len(past)] == past else ()
        begun = self.tokenizer.has_thinking and text.rstrip().endswith(self.tokenizer.think_start)
        return Prompt(tuple(ids), ends, "think" if begun else "response", tools)

    def parser(self, prompt: Prompt) -> "ForeignParser":
        """A fresh parser for the answer to `prompt`."""
        return ForeignParser(self.tokenizer, prompt)

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, without any control token."""
        ids: list[int] = self.tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True
        )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens by their names."""
        text: str = self.tokenizer.decode(list(ids))
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _template(self, request: Request, tools: Sequence[Mapping[str, Any]], answer: bool) -> str:
        messages = [message_to_dict(message) for message in request.messages]
        # A template is a program from the checkpoint: it may raise anything.
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=answer,
                enable_thinking=request.thinking and self.tokenizer.has_thinking,
            )
        except Exception as error:
            raise PromptError(
                f"the model's chat template refuses the conversation: {_brief(error)}"
            ) from error
        return text


class ForeignParser:
    """Reads one answer: reasoning, content, and tool calls by mlx-lm's tool parser,
    which sees a call only when it is whole. Whitespace between them is dropped."""

    def __init__(self, tokenizer: Any, prompt: Prompt) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer
        self._tools = [dict(tool) for tool in prompt.tools]
        self._markers = _markers(tokenizer)
        self._state: str = "think" if prompt.channel == "think" else "between"
        self._text = ""
        self._call: list[str] = []
        self._num_calls = 0
        self._any_finished = False
        self._events: list[Event] = []

    @property
    def channel(self) -> Channel:
        """Where the next token belongs."""
        match self._state:
            case "think" | "tools" | "done":
                return self._state
            case _:
                return "response"

    @property
    def holding(self) -> bool:
        """True while text is kept back that may become a marker."""
        return bool(self._text)

    def feed(self, ids: Sequence[int]) -> list[Event]:
        """Read more tokens; a stop token ends the answer."""
        for token_id in ids:
            if self._state == "done":
                break
            if token_id in self._tokenizer.eos_token_ids:
                self._end(cut=False)
                break
            self._detokenizer.add_token(token_id)
            self._read(self._detokenizer.last_segment)
        return self._taken()

    def finish(self, cut: bool) -> list[Event]:
        """The answer is over: what was kept back, and the last call."""
        if self._state != "done":
            self._end(cut)
        return self._taken()

    def finish_reason(self, cut: bool) -> FinishReason:
        """Length if `cut`, else tool_calls if one is whole, else stop."""
        if cut:
            return "length"
        return "tool_calls" if self._any_finished else "stop"

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _read(self, text: str) -> None:
        self._text += text
        at = 0
        while True:
            if self._state == "between":
                at += len(self._text) - at - len(self._text[at:].lstrip())
                if at == len(self._text):
                    break
            markers = self._markers[self._state]
            end, marker = markers.search(self._text, at)
            self._emit(self._text[at:end])
            at = end + len(marker)
            if not marker:
                break
            if self._state == "tools":
                self._finish_call()
            self._state = markers.targets[marker]
        self._text = self._text[at:]

    def _emit(self, text: str) -> None:
        if not text:
            return
        match self._state:
            case "think":
                self._events.append(ReasoningDelta(text))
            case "tools":
                self._call.append(text)
            case _:
                self._state = "response"
                self._events.append(TextDelta(text))

    def _end(self, cut: bool) -> None:
        self._detokenizer.finalize()
        self._read(self._detokenizer.last_segment)
        self._emit(self._text)
        if self._state == "tools" and cut:
            self._drop("the answer was cut off in it")
        elif self._state == "tools":
            self._finish_call()
        self._text = ""
        self._state = "done"

    def _finish_call(self) -> None:
        text = "".join(self._call)
        self._call = []
        # mlx-lm's tool parsers raise whatever their regexes run into.
        try:
            parsed = self._tokenizer.tool_parser(text, self._tools or None)
        except Exception as error:
            self._drop(f"it can't be read ({_brief(error)})")
            return
        for call in parsed if isinstance(parsed, list) else [parsed]:
            self._tell(call)

    def _tell(self, call: Any) -> None:
        name = call.get("name") if isinstance(call, dict) else None
        arguments = (call.get("arguments") or {}) if isinstance(call, dict) else None
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            self._drop("it has no name, or its arguments are no object")
            return
        index, call_id = self._num_calls, call.get("id")
        raw = json.dumps(arguments, ensure_ascii=False, default=str)
        self._events += [
            ToolCallStarted(index, name),
            ToolArgumentDelta(index, "", "object", raw),
            ToolCallFinished(
                index, ToolCall(name, arguments, call_id if isinstance(call_id, str) else None)
            ),
        ]
        self._num_calls += 1
        self._any_finished = True

    def _drop(self, why: str) -> None:
        self._events.append(ToolCallDropped(self._num_calls, why))
        self._num_calls += 1


def _markers(tokenizer: Any) -> dict[str, Markers]:
    """For each state, the markers to look for and the states they lead to."""
    tools = {tokenizer.tool_call_start: "tools"} if tokenizer.has_tool_calling else {}
    starts = {tokenizer.think_start: "think"} if tokenizer.has_thinking else {}
    ends = {tokenizer.think_end: "between"} if tokenizer.has_thinking else {}
    # An empty closing marker (Mistral's) means that calls go on to the end.
    closes = {tokenizer.tool_call_end: "between"} if tokenizer.tool_call_end else {}
    return {
        "think": Markers(ends | tools),
        "response": Markers(tools),
        "between": Markers(starts | tools),
        "tools": Markers(closes),
    }


def _check_askable(request: Request) -> None:
    if request.tool_choice not in (None, "auto", "none"):
        raise PromptError(
            f"tool_choice {request.tool_choice!r}: this model can only be asked for auto or none"
        )
    wanted = request.response_format
    if wanted is not None and wanted.get("type") != "text":
        raise PromptError(
            f"response_format {wanted.get('type')!r}: this model can only be asked for text"
        )


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
