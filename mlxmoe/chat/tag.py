"""An opening tag's attributes, read piece by piece."""

import re

from mlxmoe.chat.markers import SEP, held, unescape

_QUOTE = re.compile('"')
_QUOTE_OR_SEP = re.compile(f'"|{re.escape(SEP)}')


class Tag:
    """`NAME key="value" ...<|sep|>` after its name, in linear time.

    Only a `<|sep|>` outside quotes ends the tag: values may hold one.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.attributes: dict[str, str] = {}
        self._key = ""
        self._pieces: list[str] = []
        self._quoted = False

    def read(self, text: str, at: int) -> tuple[int, bool]:
        """Read `text` from `at`: where reading stopped, and whether the tag ended."""
        while True:
            found = (_QUOTE if self._quoted else _QUOTE_OR_SEP).search(text, at)
            if found is None:
                stop = len(text) - (0 if self._quoted else held(text, at, (SEP,)))
                self._pieces.append(text[at:stop])
                return stop, False
            if found.group() == SEP:
                return found.end(), True
            self._pieces.append(text[at : found.start()])
            self._turn()
            at = found.end()

    def _turn(self) -> None:
        piece = "".join(self._pieces)
        self._pieces = []
        if self._quoted:
            self.attributes[self._key] = unescape(piece)
        else:
            words = piece.split()
            self._key = words[-1].removesuffix("=") if words else ""
        self._quoted = not self._quoted
