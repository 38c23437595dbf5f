"""The demo's tiktoken vocabulary: bytes, letter merges, and whole words of the fixed sentences.

Copying must be an identity on tokens, so a word that may be copied splits the same way after
a space, a newline or a slash: merges are learned on words without what stands before them, there
are no merges of digits, and tokens with a leading space exist only for words of fixed sentences.
"""

import base64
import json
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from random import Random

import regex
import tiktoken

from checkpoint_files import tokenizer_config
from mlxmoe.chat.tokenizer import SPLIT
from train_demo.words import KEYS, SEEN_WORDS, Lexicon

BASE_TOKENS = 1024
LETTER_MERGES = 200
FIXED_LEAST = 40
_CUT = regex.compile(SPLIT, regex.V1)


def make_vocabulary(texts: Iterable[str]) -> list[bytes]:
    """Tokens in the order of their ranks; `texts` are dialogues, for the fixed words."""
    tokens = [bytes([value]) for value in range(256)]
    tokens += _letter_merges()
    copied = {*SEEN_WORDS, *KEYS}
    counts = Counter(piece for text in texts for piece in _pieces(text))
    for piece, count in counts.most_common():
        bare = piece.lstrip(" ")
        if count < FIXED_LEAST or not bare or bare.lower() in copied or _has_digit(bare):
            continue
        _add(tokens, bare.encode())
        if piece == bare or not _splits_words(tokens, bare):
            _add(tokens, piece.encode())
        if len(tokens) >= BASE_TOKENS:
            break
    return tokens[:BASE_TOKENS]


def _letter_merges() -> list[bytes]:
    """Byte-pair merges of copyable words."""
    lexicon = Lexicon(Random(7))
    words = Counter(SEEN_WORDS) + Counter(lexicon.word() for _ in range(4000)) + Counter(KEYS)
    split = {word: [letter.encode() for letter in word] for word in words}
    merges: list[bytes] = []
    while len(merges) < LETTER_MERGES:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, parts in split.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        best = max(sorted(pairs), key=lambda pair: pairs[pair])
        merges.append(b"".join(best))
        for word, parts in split.items():
            split[word] = _merged(parts, best)
    return merges


def _pieces(text: str) -> list[str]:
    """The text as Kimi's tokenizer cuts it: a merge never crosses a cut."""
    return [found[0] for found in _CUT.finditer(text)]


def _has_digit(text: str) -> bool:
    return any(character.isdigit() for character in text)


def _merged(parts: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    found: list[bytes] = []
    for part in parts:
        if found and (found[-1], part) == pair:
            found[-1] = b"".join(pair)
        else:
            found.append(part)
    return found


def _add(tokens: list[bytes], word: bytes) -> None:
    """Append `word`, and first the merges that lead to it from the left."""
    if word in tokens:
        return
    ids = _encoding(tokens).encode_ordinary(word.decode())
    grown = tokens[ids[0]]
    for token_id in ids[1:]:
        grown += tokens[token_id]
        if grown not in tokens:
            tokens.append(grown)


def _splits_words(tokens: list[bytes], bare: str) -> bool:
    """Whether `bare` is how the split of some longer word begins: with a space before it, it
    would swallow the space of that word, too."""
    encoding = _encoding(tokens)
    lexicon = Lexicon(Random(8))
    longer = [*SEEN_WORDS, *(lexicon.word() for _ in range(1000))]
    words = [word for word in longer if word.startswith(bare) and word != bare]
    first = tokens.index(bare.encode())
    return any(encoding.encode_ordinary(word)[0] == first for word in words)


def _encoding(tokens: list[bytes]) -> tiktoken.Encoding:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding("part", pat_str=r"[\s\S]+", mergeable_ranks=ranks, special_tokens={})


def vocabulary_files(tokens: list[bytes]) -> dict[str, str]:
    """File name -> text: `tiktoken.model` and `tokenizer_config.json`."""
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    config = tokenizer_config(len(tokens))
    return {"tiktoken.model": "".join(lines), "tokenizer_config.json": json.dumps(config, indent=2)}
