"""Segments: a prompt's text in pieces that are tokenized apart.

Only the renderer's own control tokens are special; tag names, attributes and
everything people or tools wrote are ordinary text, whatever they look like.
"""

from collections.abc import Iterator
from typing import NamedTuple

from mlxmoe.chat.markers import CLOSE, END, IMAGE_PLACEHOLDER, OPEN, SEP, escape
from mlxmoe.errors import PromptError


class Segment(NamedTuple):
    """Text that is tokenized on its own; `special` lets it name control tokens."""

    text: str
    special: bool


class SegmentWriter:
    """Collects segments as Kimi's encoding_k3.py cuts them.

    `ends` has, for each message, the number of segments up to its end. With
    `image_prompts`, each image placeholder takes the next of them, else it stays.
    """

    def __init__(self, image_prompts: tuple[str, ...] | None) -> None:
        self.segments: list[Segment] = []
        self.ends: list[int] = []
        self._prompts = image_prompts
        self._num_images = 0

    def text(self, text: str) -> None:
        """Ordinary text, which never becomes structure."""
        self._add(text, False)

    def image(self) -> None:
        """The place of a picture."""
        self._add(IMAGE_PLACEHOLDER, True)

    def open(self, tag: str, **attributes: str) -> None:
        """`<|open|>tag key="value"<|sep|>`."""
        self._add(OPEN, True)
        self._add(tag, False)
        for key, value in attributes.items():
            for text in (f" {key}", '="', escape(value), '"'):
                self._add(text, False)
        self._add(SEP, True)

    def close(self, tag: str) -> None:
        """`<|close|>tag<|sep|>`."""
        self._add(CLOSE, True)
        self._add(tag, False)
        self._add(SEP, True)

    def end_message(self) -> None:
        """Close the message and note where it ends."""
        self.close("message")
        self._add(END, True)
        self.ends.append(len(self.segments))

    def check_images(self) -> None:
        """Raises: PromptError when some image prompts found no placeholder."""
        if self._prompts is not None and self._num_images != len(self._prompts):
            raise PromptError(
                f"{len(self._prompts)} images but {self._num_images} places for them: "
                "expected a place in the messages for each"
            )

    def _add(self, text: str, special: bool) -> None:
        if self._prompts is None or IMAGE_PLACEHOLDER not in text:
            pieces = iter([Segment(text, special)])
        else:
            pieces = self._with_images(text, special)
        self.segments.extend(piece for piece in pieces if piece.text)

    def _with_images(self, text: str, special: bool) -> Iterator[Segment]:
        prompts = self._prompts or ()
        first, *rest = text.split(IMAGE_PLACEHOLDER)
        yield Segment(first, special)
        for piece in rest:
            if self._num_images == len(prompts):
                raise PromptError(
                    f"more places for images than the {len(prompts)} images: "
                    f"leave {IMAGE_PLACEHOLDER} out of the text"
                )
            yield Segment(prompts[self._num_images], True)
            self._num_images += 1
            yield Segment(piece, special)
