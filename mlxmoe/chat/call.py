"""A tool call while it comes in."""

from typing import Any

from mlxmoe.chat.arguments import argument_value, object_or_text
from mlxmoe.events import ToolCallDropped, ToolCallFinished
from mlxmoe.transcript import ToolCall


class CallDraft:
    """Call number `index`: its arguments become typed values one by one.

    A JSON block replaces all arguments; one that is not JSON stays raw text, so
    that the model can be shown its own mistake.
    """

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self.key = ""
        self.kind = "string"
        self._arguments: dict[str, Any] = {}
        self._block: str | None = None
        self._pieces: list[str] = []
        self._why = "" if name else "it names no tool"

    @property
    def usable(self) -> bool:
        """False once it is known that the call will be dropped."""
        return not self._why

    def begin(self, tag: str, attributes: dict[str, str]) -> None:
        """A value begins: an `argument` of that key and type, or a `json` block."""
        self._pieces = []
        if tag == "json":
            self.key, self.kind = "", "object"
            return
        self.key, self.kind = attributes.get("key", ""), attributes.get("type", "string")
        if "key" not in attributes:
            self._why = self._why or "an argument has no key"

    def add(self, text: str) -> None:
        """More of the value."""
        self._pieces.append(text)

    def end(self, tag: str) -> None:
        """The value is whole."""
        text = "".join(self._pieces)
        if tag == "json":
            self._block = text
        else:
            self._arguments[self.key] = argument_value(text, self.kind)

    def finish(self) -> ToolCallFinished | ToolCallDropped:
        """The call is whole: what became of it."""
        if self._why:
            return ToolCallDropped(self.index, self._why)
        if self._block is None:
            return ToolCallFinished(self.index, ToolCall(self.name, self._arguments))
        try:
            whole = object_or_text(self._block)
            # A block with NaN or an infinite number can't be carried as JSON: keep its text.
            carried = not self._block.strip() or argument_value(self._block, "object") == whole
            arguments = whole if carried else self._block
            return ToolCallFinished(self.index, ToolCall(self.name, arguments))
        except ValueError as error:
            return ToolCallDropped(self.index, str(error))

    def drop(self, why: str) -> ToolCallDropped:
        """The call broke off."""
        return ToolCallDropped(self.index, self._why or why)
