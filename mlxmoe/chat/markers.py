"""The words of XTML, Kimi K3's own markup, shared by the renderer and the parser.

A tag is `<|open|>NAME key="value"<|sep|>` ... `<|close|>NAME<|sep|>`.
"""

import re
from collections.abc import Mapping

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END = "<|end_of_msg|>"
CONTROL = (OPEN, CLOSE, SEP, END)
IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"


def opener(tag: str) -> str:
    """The opening marker of a tag without attributes."""
    return f"{OPEN}{tag}{SEP}"


def closer(tag: str) -> str:
    """The closing marker of a tag."""
    return f"{CLOSE}{tag}{SEP}"


def escape(value: str) -> str:
    """An attribute's value as written: only & and the quote are escaped."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    """The inverse of `escape`."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


def held(text: str, start: int, markers: tuple[str, ...]) -> int:
    """How many characters at the end of `text[start:]` could begin a marker.

    While streaming these are kept back until more text decides.
    """
    longest = max(map(len, markers), default=1) - 1
    for at in range(max(start, len(text) - longest), len(text)):
        tail = text[at:]
        if any(marker.startswith(tail) for marker in markers):
            return len(tail)
    return 0


class Markers:
    """A set of markers to look for; `targets` says what each of them leads to."""

    def __init__(self, targets: Mapping[str, str]) -> None:
        self.targets = targets
        self._words = tuple(targets)
        self._longest = max((len(word) for word in targets), default=0)
        # An empty set matches nowhere.
        self._pattern = re.compile("|".join(map(re.escape, targets)) or r"(?!)")

    def search(self, text: str, start: int) -> tuple[int, str]:
        """Where plain text from `start` ends, and the marker there, if any is whole.

        Without one, characters that might begin a marker are not plain text yet.
        """
        found = self._pattern.search(text, start)
        if found:
            return found.start(), found.group()
        return len(text) - held(text, start, self._words), ""

    def match(self, text: str, start: int) -> str | None:
        """The marker at `start`, "" while it may become one, None if it can't."""
        window = text[start : start + self._longest]
        for word in self._words:
            if window.startswith(word):
                return word
        return "" if any(word.startswith(window) for word in self._words) else None
