"""Words, names and numbers of the made-up dialogues, and which of them training never sees.

A word or number is held out when its CRC-32 leaves no remainder by `HELD_SHARE`. Training
draws only from the rest; the evaluation draws only held-out ones. Numbers under 100 are never
held out: every one-digit sum is a fact to be learned by heart.
"""

import tomllib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

HELD_SHARE = 8

_LISTS = tomllib.loads(Path(__file__).with_name("words.toml").read_text())
WORDS: tuple[str, ...] = tuple(_LISTS["words"].split())
KEYS: tuple[str, ...] = tuple(_LISTS["keys"].split())
EXTENSIONS: tuple[str, ...] = tuple(_LISTS["extensions"].split())
LINES: tuple[str, ...] = tuple(_LISTS["lines"])
_SYLLABLES: tuple[str, ...] = tuple(_LISTS["syllables"].split())


def held(text: str) -> bool:
    """Whether training never sees this word or number."""
    return zlib.crc32(text.encode()) % HELD_SHARE == 0


SEEN_WORDS = tuple(word for word in WORDS if not held(word))
HELD_WORDS = tuple(word for word in WORDS if held(word))


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Draws words and numbers: the seen ones, or with `fresh` only held-out ones."""

    random: Random
    fresh: bool = False

    def word(self) -> str:
        """A word: of the list, or made up."""
        if self.random.random() < 0.65:
            return self.random.choice(HELD_WORDS if self.fresh else SEEN_WORDS)
        return self._until(self._made_up)

    def stem(self) -> str:
        """The name of a file without its extension, or of a folder."""
        roll = self.random.random()
        if roll < 0.68:
            return self.word()
        if roll < 0.84:
            return f"{self.word()}{self.random.randint(0, 99)}"
        return f"{self.word()}{self.random.choice('_-')}{self.word()}"

    def filename(self) -> str:
        """Like `notes.txt`."""
        common = self.random.random() < 0.5
        return f"{self.stem()}.{'txt' if common else self.random.choice(EXTENSIONS)}"

    def whole(self, digits: int) -> str:
        """A whole number of exactly `digits` digits."""
        low = 10 ** (digits - 1) if digits > 1 else 0
        return self._until(lambda: str(self.random.randint(low, 10**digits - 1)), digits > 2)

    def number(self) -> str:
        """A number as people type them: mostly whole, 1 to 6 digits, sometimes a decimal."""
        digits = self.random.choice((1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 6))
        if self.random.random() < 0.12:
            places = self.random.choice((1, 1, 2))
            last = self.random.randint(1, 9)
            middle = str(self.random.randint(0, 9)) if places == 2 else ""
            return f"{self.whole(min(digits, 3))}.{middle}{last}"
        return self.whole(digits)

    def value(self) -> str:
        """What a settings file says after a key."""
        roll = self.random.random()
        if roll < 0.4:
            return self.whole(self.random.randint(1, 5))
        if roll < 0.5:
            return self.number()
        if roll < 0.6:
            return f"{self.word()}{self.random.choice('-_.')}{self.word()}"
        return self.word()

    def allows(self, text: str) -> bool:
        """Whether this number or word may be drawn here."""
        return held(text) == self.fresh

    def _made_up(self) -> str:
        if self.random.random() < 0.4:
            letters = "abcdefghijklmnopqrstuvwxyz"
            return "".join(self.random.choice(letters) for _ in range(self.random.randint(3, 6)))
        return "".join(self.random.choice(_SYLLABLES) for _ in range(self.random.randint(2, 3)))

    def _until(self, draw: Callable[[], str], may_hold: bool = True) -> str:
        while True:
            text = draw()
            if not may_hold or self.allows(text):
                return text
