"""What Kimi K3 generated, token by token, as events.

An answer is reasoning, content and tool calls in XTML. Markers are read as text,
so one that arrives as ordinary tokens counts too; the price is that a literal
`<|close|>argument<|sep|>` inside a string argument ends it. No character is looked
at twice but for the few that might begin a marker.

- Reasoning ends at think's close, at response's or tools' opener, or at the end;
  the opener that the prompt already holds may be repeated.
- Content may lack its opener; whitespace between channels is dropped.
- Inside a value only its own closing marker counts. Calls that are incomplete,
  nameless or no object are dropped, with an event that says so.
- At the end, a dangling marker is dropped if it holds a whole control token.
"""

import codecs
import re
from collections.abc import Sequence
from typing import Literal

from mlxmoe.chat.call import CallDraft
from mlxmoe.chat.markers import CONTROL, END, OPEN, SEP, Markers, closer, opener
from mlxmoe.chat.prompt import Channel
from mlxmoe.chat.tag import Tag
from mlxmoe.chat.tokenizer import KimiTokenizer
from mlxmoe.events import (
    Event,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    ToolArgumentDelta,
    ToolCallFinished,
    ToolCallStarted,
)

_ENDS = {closer("message"): "done", END: "done"}
_RESPONSE = {closer("response"): "between", opener("tools"): "tools", **_ENDS}
_TOOLS = {
    f"{OPEN}call ": "tag",
    f"{OPEN}call{SEP}": "tag",
    closer("tools"): "between",
    opener("response"): "response",
    **_ENDS,
}
_CALL = {f"{OPEN}{tag}{after}": "tag" for tag in ("argument", "json") for after in (" ", SEP)}
_IN_TEXT = {
    "think": Markers({closer("think"): "between", opener("response"): "response", **_RESPONSE}),
    "response": Markers(_RESPONSE),
    "tools": Markers(_TOOLS),
    "call": Markers({closer("call"): "tools", **_CALL, **_TOOLS}),
    "argument": Markers({closer("argument"): "call"}),
    "json": Markers({closer("json"): "call"}),
}
_BETWEEN_TEXT = {
    "start": Markers({opener("think"): "start", opener("response"): "response"}),
    "between": Markers({opener("think"): "think", opener("response"): "response", **_RESPONSE}),
}
_CHANNELS: dict[str, Channel] = {
    "think": "think",
    "response": "response",
    "between": "response",
    "done": "done",
}
_UNCLOSED = "it has no closing marker"
_SPACE = re.compile(r"\s*")


class XtmlParser:
    """Reads one answer. `channel` is the one that the prompt opened.

    Every value of a call begins with a `ToolArgumentDelta` of no text; a call's
    typed arguments come with `ToolCallFinished`.
    """

    def __init__(self, tokenizer: KimiTokenizer, channel: Literal["think", "response"]) -> None:
        self._tokenizer = tokenizer
        self._end_id = tokenizer.special_id(END)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._opened: Literal["think", "response"] = channel
        self._state = "start"
        self._text = ""
        self._at = 0
        self._tag = Tag("")
        self._draft: CallDraft | None = None
        self._num_calls = 0
        self._any_finished = False
        self._events: list[Event] = []

    @property
    def channel(self) -> Channel:
        """Where the next token belongs."""
        if self._state == "start":
            return self._opened
        return _CHANNELS.get(self._state, "tools")

    @property
    def holding(self) -> bool:
        """True while text is kept back that may become a marker or a character."""
        return bool(self._text) or bool(self._decoder.getstate()[0])

    def feed(self, ids: Sequence[int]) -> list[Event]:
        """Read more tokens; the end-of-message token ends the answer anywhere."""
        for token_id in ids:
            if token_id == self._end_id:
                self._end()
            else:
                self._read(self._decoder.decode(self._tokenizer.decode_bytes((token_id,))))
        return self._taken()

    def feed_text(self, text: str) -> list[Event]:
        """Read more text."""
        self._read(text)
        return self._taken()

    def finish(self, cut: bool) -> list[Event]:
        """The answer is over: what was kept back, and the call that broke off."""
        self._end("the answer was cut off in it" if cut else _UNCLOSED)
        return self._taken()

    def finish_reason(self, cut: bool) -> FinishReason:
        """Length if `cut`, else tool_calls if one is whole, else stop."""
        if cut:
            return "length"
        return "tool_calls" if self._any_finished else "stop"

    def _read(self, text: str) -> None:
        self._text += text
        while self._step():
            pass
        self._text = self._text[self._at :]
        self._at = 0

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _step(self) -> bool:
        """Read up to the next marker; False when more text is needed."""
        if self._state == "done":
            self._at = len(self._text)
            return False
        if self._state == "tag":
            return self._read_tag()
        if self._state in _BETWEEN_TEXT:
            return self._read_between()
        markers = _IN_TEXT[self._state]
        end, marker = markers.search(self._text, self._at)
        self._emit(self._text[self._at : end])
        self._at = end + len(marker)
        if marker:
            self._pass(marker, markers.targets[marker])
        return bool(marker)

    def _read_between(self) -> bool:
        if self._state == "between":
            space = _SPACE.match(self._text, self._at)
            self._at = space.end() if space else self._at
        markers = _BETWEEN_TEXT[self._state]
        marker = markers.match(self._text, self._at)
        if marker is None:
            self._state = self.channel
            return True
        if not marker:
            return False
        self._at += len(marker)
        self._state = markers.targets[marker]
        if marker == opener("think"):
            self._opened = "think"
        return True

    def _read_tag(self) -> bool:
        self._at, ended = self._tag.read(self._text, self._at)
        if not ended:
            return False
        tag = self._tag
        if tag.name == "call":
            self._draft = CallDraft(self._num_calls, tag.attributes.get("tool", ""))
            self._num_calls += 1
            self._state = "call"
            if self._draft.name:
                self._events.append(ToolCallStarted(self._draft.index, self._draft.name))
        elif self._draft:
            self._draft.begin(tag.name, tag.attributes)
            self._state = tag.name
            self._tell_argument("")
        return True

    def _pass(self, marker: str, target: str) -> None:
        """Go over `marker` into the state `target`."""
        draft, state = self._draft, self._state
        self._state = target
        if target == "tag":
            self._tag = Tag(marker.removeprefix(OPEN).removesuffix(SEP).strip())
            # Tag reads the rest of its tag, also where that is only the end.
            self._at -= len(SEP) if marker.endswith(SEP) else 0
        if draft is None or marker in _CALL:
            return
        if state in ("argument", "json"):
            draft.end(state)
            return
        outcome = draft.finish() if marker == closer("call") else draft.drop(_UNCLOSED)
        self._any_finished |= isinstance(outcome, ToolCallFinished)
        self._events.append(outcome)
        self._draft = None

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self._state == "think":
            self._events.append(ReasoningDelta(text))
        elif self._state == "response":
            self._events.append(TextDelta(text))
        elif self._draft and self._state in ("argument", "json"):
            self._draft.add(text)
            self._tell_argument(text)

    def _tell_argument(self, text: str) -> None:
        draft = self._draft
        if draft and draft.usable:
            self._events.append(ToolArgumentDelta(draft.index, draft.key, draft.kind, text))

    def _end(self, why: str = _UNCLOSED) -> None:
        self._read(self._decoder.decode(b"", final=True))
        if self._state in _BETWEEN_TEXT:
            self._state = self.channel
        if not any(token in self._text for token in CONTROL):
            self._emit(self._text)
        if self._draft:
            self._events.append(self._draft.drop(why))
            self._draft = None
        self._text = ""
        self._state = "done"
