"""The two vocabulary files of a Kimi checkpoint, read with distrust.

`tiktoken.model` has one token a line: base64 of its bytes, a space, its rank.
The 256 ids after the ranks are specials; `tokenizer_config.json` names some of them.
"""

import base64
import re
from pathlib import Path
from typing import Any

from mlxmoe.errors import CheckpointError
from mlxmoe.untrusted import open_file, read_json, show

NUM_SPECIALS = 256
_MAX_FILE_BYTES = 64 * 2**20
_NUMBER = re.compile("[0-9]{1,9}")
_PULL_AGAIN = "Download the file again."


def read_ranks(path: Path) -> dict[bytes, int]:
    """Tokens with their ranks: exactly 0 to n-1, all 256 single bytes among them.

    Raises: CheckpointError naming file and line.
    """
    ranks: dict[bytes, int] = {}
    lines: dict[int, int] = {}
    for number, line in enumerate(_read(path).split(b"\n"), 1):
        if not line.strip():
            continue
        token, rank = _parse_line(path, number, line)
        if token in ranks:
            raise _bad_line(path, number, f"the token of rank {ranks[token]} once more", "new ones")
        if rank in lines:
            found = f"rank {rank}, which line {lines[rank]} has"
            raise _bad_line(path, number, found, "a new rank")
        ranks[token] = rank
        lines[rank] = number
    highest = max(lines, default=-1)
    if highest != len(lines) - 1:
        expected = f"ranks 0 to {len(lines) - 1}, one for each line"
        raise _bad_line(path, lines[highest], f"rank {highest}", expected)
    absent = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if absent:
        last = max(lines.values(), default=1)
        found = f"the end, with no token for byte 0x{absent[0]:02x}"
        raise _bad_line(path, last, found, "all 256 single bytes among the tokens")
    return ranks


def read_specials(path: Path, num_base: int) -> dict[str, int]:
    """Names of the 256 ids from `num_base` on; unnamed ones are
    `<|reserved_token_ID|>` as in Kimi's own tokenizer.

    Raises: CheckpointError naming file and entry.
    """
    names = {i: f"<|reserved_token_{i}|>" for i in range(num_base, num_base + NUM_SPECIALS)}
    for key, entry in _added_tokens(path).items():
        where = f"{path}: added_tokens_decoder[{show(key)}]"
        if not _NUMBER.fullmatch(key) or int(key) not in names:
            raise CheckpointError(
                f"{where}: expected an id from {num_base} to {num_base + NUM_SPECIALS - 1}, "
                f"the {NUM_SPECIALS} after tiktoken.model's. {_PULL_AGAIN}"
            )
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str) or not content or not _is_unicode(content):
            raise CheckpointError(
                f"{where}: expected an object with text as its content, found {show(entry)}. "
                f"{_PULL_AGAIN}"
            )
        names[int(key)] = content
    ids: dict[str, int] = {}
    for token_id, name in names.items():
        if name in ids:
            raise CheckpointError(
                f"{path}: ids {ids[name]} and {token_id} are both named {show(name)}, "
                f"expected a name for each. {_PULL_AGAIN}"
            )
        ids[name] = token_id
    return ids


def _added_tokens(path: Path) -> dict[str, Any]:
    added = read_json(path, _MAX_FILE_BYTES).get("added_tokens_decoder")
    if not isinstance(added, dict):
        raise CheckpointError(
            f"{path}: added_tokens_decoder is {show(added)}, expected an object. {_PULL_AGAIN}"
        )
    return added


def _parse_line(path: Path, number: int, line: bytes) -> tuple[bytes, int]:
    expected = "base64 of a token's bytes, a space and its rank"
    fields = line.split()
    if len(fields) != 2 or not _NUMBER.fullmatch(fields[1].decode("latin-1")):
        raise _bad_line(path, number, show(line), expected)
    try:
        token = base64.b64decode(fields[0], validate=True)
    except ValueError as error:
        raise _bad_line(path, number, show(line), expected) from error
    if not token:
        raise _bad_line(path, number, "an empty token", expected)
    return token, int(fields[1])


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _read(path: Path) -> bytes:
    with open_file(path) as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise CheckpointError(
            f"{path}: more than {_MAX_FILE_BYTES:,} bytes, expected about 3 MB. {_PULL_AGAIN}"
        )
    return data


def _bad_line(path: Path, number: int, found: str, expected: str) -> CheckpointError:
    return CheckpointError(f"{path}:{number}: found {found}, expected {expected}. {_PULL_AGAIN}")
