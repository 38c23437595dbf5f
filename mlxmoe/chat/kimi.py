"""The chat of Kimi K3 and K3.1: its tokenizer, renderer and parser as one `Chat`."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from mlxmoe.chat.markers import END
from mlxmoe.chat.parser import XtmlParser
from mlxmoe.chat.prompt import Prompt
from mlxmoe.chat.segments import Segment, SegmentWriter
from mlxmoe.chat.tokenizer import KimiTokenizer
from mlxmoe.chat.xtml import XtmlOptions, render
from mlxmoe.errors import PromptError
from mlxmoe.events import Request
from mlxmoe.transcript import Image


class KimiChat:
    """Reads the tokenizer files of the checkpoint in `folder`.

    `stop_ids` is only `<|end_of_msg|>`: [EOS] does not end a Kimi K3 turn.
    Raises: CheckpointError when the files are absent, malformed or not Kimi K3's.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = KimiTokenizer(folder)
        self.stop_ids = frozenset({self.tokenizer.special_id(END)})
        writer = SegmentWriter(None)
        writer.close("think")
        writer.open("response")
        self.close_thinking = tuple(self.tokenizer.encode_segments(writer.segments))

    def render(self, request: Request) -> Prompt:
        """The request's prompt, up to the opened think or response channel.

        Raises: PromptError for no messages, images, and what `xtml.render` refuses.
        """
        if not request.messages:
            raise PromptError("the conversation is empty: expected at least one message")
        if any(isinstance(part, Image) for m in request.messages for part in m.content):
            raise PromptError("images are not supported yet: leave them out of the messages")
        options = XtmlOptions(
            tools=request.tools,
            tool_choice=request.tool_choice,
            response_format=request.response_format,
            thinking=request.thinking,
            effort=request.tier,
        )
        rendered = render(request.messages, options)
        ids, ends = self._encode(rendered.segments, rendered.ends)
        return Prompt(ids, ends, "think" if request.thinking else "response")

    def parser(self, prompt: Prompt) -> XtmlParser:
        """A fresh parser for the answer to `prompt`."""
        return XtmlParser(self.tokenizer, prompt.channel)

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, without any control token."""
        return self.tokenizer.encode(text, allow_special=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens by their names."""
        return self.tokenizer.decode(ids)

    def _encode(
        self, segments: Sequence[Segment], ends: Iterable[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        ids: list[int] = []
        positions: list[int] = []
        start = 0
        for end in ends:
            ids += self.tokenizer.encode_segments(segments[start:end])
            positions.append(len(ids))
            start = end
        ids += self.tokenizer.encode_segments(segments[start:])
        return tuple(ids), tuple(positions)
