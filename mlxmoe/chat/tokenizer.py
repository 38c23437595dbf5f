"""Text to ids and back with a Kimi checkpoint's own vocabulary, by tiktoken.

Knows nothing of messages. Control tokens come only from text that the caller
marks as its own (`allow_special`), so what people type never becomes structure.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tiktoken

from mlxmoe.chat.segments import Segment
from mlxmoe.chat.vocabulary import read_ranks, read_specials
from mlxmoe.errors import CheckpointError, PromptError

# Kimi's tokenization_kimi.py cuts text to these sizes first; it changes the ids.
_MAX_PIECE_CHARS = 400_000
_MAX_RUN_CHARS = 25_000
_RUN = re.compile(r"\s+|\S+")
SPLIT = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


class KimiTokenizer:
    """The tokenizer of the checkpoint in `folder` (tiktoken.model and
    tokenizer_config.json; no code from there is run).

    Base tokens are ids 0 to n_base-1, the 256 specials follow.
    Raises: CheckpointError when a file is absent or malformed.
    """

    def __init__(self, folder: Path) -> None:
        ranks = read_ranks(folder / "tiktoken.model")
        self.n_base = len(ranks)
        self.specials = read_specials(folder / "tokenizer_config.json", self.n_base)
        self.n_vocab = self.n_base + len(self.specials)
        self._folder = folder
        self._bytes = [token for token, _ in sorted(ranks.items(), key=lambda item: item[1])]
        self._bytes += [name.encode() for name in self.specials]
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens=self.specials
        )

    def special_id(self, name: str) -> int:
        """The id of the control token `name`. Raises: CheckpointError without it."""
        if name not in self.specials:
            raise CheckpointError(
                f"{self._folder / 'tokenizer_config.json'}: no token {name}, expected one as in "
                "Kimi K3's. Is this a Kimi K3 or K3.1 checkpoint?"
            )
        return self.specials[name]

    def encode(self, text: str, allow_special: bool) -> list[int]:
        """Ids of `text`; names of specials in it become their ids only if allowed."""
        ids: list[int] = []
        for piece in _pieces(text):
            if allow_special:
                ids += self._encoding.encode(piece, allowed_special="all")
            else:
                ids += self._encoding.encode_ordinary(piece)
        return ids

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of segments, each encoded on its own (joining them changes the ids)."""
        return [i for segment in segments for i in self.encode(segment.text, segment.special)]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`, specials as their names.

        Raises: PromptError for an id outside the vocabulary.
        """
        table, parts = self._bytes, []
        for token_id in ids:
            if not 0 <= token_id < self.n_vocab:
                raise PromptError(f"token id {token_id}: expected 0 to {self.n_vocab - 1}")
            parts.append(table[token_id])
        return b"".join(parts)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are no whole character become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")


def _pieces(text: str) -> Iterator[str]:
    """`text` cut to 400,000 characters, and each of those so that no run of
    (non-)space characters is longer than 25,000."""
    for base in range(0, len(text), _MAX_PIECE_CHARS):
        piece = text[base : base + _MAX_PIECE_CHARS]
        start = 0
        if len(piece) > _MAX_RUN_CHARS:
            for run in _RUN.finditer(piece):
                for cut in range(run.start() + _MAX_RUN_CHARS, run.end(), _MAX_RUN_CHARS):
                    yield piece[start:cut]
                    start = cut
        yield piece[start:]
