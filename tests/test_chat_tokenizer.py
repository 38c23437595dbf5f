"""The Kimi tokenizer against the official one's ids, and against hostile files."""

import base64
import hashlib
import itertools
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxmoe.chat.segments import Segment
from mlxmoe.chat.tokenizer import KimiTokenizer
from mlxmoe.errors import CheckpointError, PromptError

GOLDENS = Path(__file__).parent / "goldens" / "tokenizer"
TINY = json.loads((GOLDENS / "cases.json").read_text())
DECODED = json.loads((GOLDENS / "decode_cases.json").read_text())["cases"]
TOKENIZER = KimiTokenizer(GOLDENS)
RANKS = (GOLDENS / "tiktoken.model").read_bytes().splitlines(keepends=True)
CONFIG = (GOLDENS / "tokenizer_config.json").read_bytes()


def segments_of(case: dict[str, Any]) -> list[Segment]:
    """The case's segments; long ones are given as pieces with counts."""
    return [
        Segment(text if isinstance(text, str) else "".join(p * n for p, n in text), special)
        for text, special in case["segments"]
    ]


def write(folder: Path, ranks: bytes, config: bytes = CONFIG) -> Path:
    """A tokenizer folder with these files."""
    (folder / "tiktoken.model").write_bytes(ranks)
    (folder / "tokenizer_config.json").write_bytes(config)
    return folder


def loaded_error(folder: Path) -> str:
    """The message of the CheckpointError that loading `folder` raises."""
    with pytest.raises(CheckpointError) as caught:
        KimiTokenizer(folder)
    return str(caught.value)


def test_sizes_and_special_ids() -> None:
    """The 256 specials follow the base ranks, named as in the config."""
    assert TINY["n_base"] == TOKENIZER.n_base
    assert TINY["n_vocab"] == TOKENIZER.n_vocab
    assert TINY["named_specials"] == {
        name: TOKENIZER.special_id(name) for name in TINY["named_specials"]
    }
    assert TOKENIZER.special_id("<|reserved_token_1352|>") == 1352


def test_absent_special_names_the_token() -> None:
    """Asking for a control token that the vocabulary lacks says which one."""
    with pytest.raises(CheckpointError, match=r"<\|nothing\|>"):
        TOKENIZER.special_id("<|nothing|>")


@pytest.mark.parametrize("case", TINY["cases"], ids=lambda case: case["id"])
def test_encode(case: dict[str, Any]) -> None:
    """Ids equal the official tokenizer's, segment by segment; ids decode to the text."""
    segments = segments_of(case)

    ids = TOKENIZER.encode_segments(segments)

    if "ids" in case:
        assert case["ids"] == ids
        assert case["segment_ids"] == [
            TOKENIZER.encode(text, special) for text, special in segments
        ]
        assert case["token_bytes_hex"] == [TOKENIZER.decode_bytes([i]).hex() for i in ids]
        assert case["decoded"] == TOKENIZER.decode(ids)
    else:
        digest = hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()
        assert case["n_ids"] == len(ids)
        assert case["ids_sha256_u32le"] == digest
        assert "".join(text for text, _ in segments) == TOKENIZER.decode(ids)


@pytest.mark.parametrize("case", DECODED, ids=lambda case: case["id"])
def test_decode_of_cut_characters(case: dict[str, Any]) -> None:
    """Bytes that are no whole character decode to U+FFFD as the official ones do."""
    assert case["decoded"] == TOKENIZER.decode(case["ids"])


@given(st.text())
def test_any_text_survives_without_specials(text: str) -> None:
    """Encoding without specials gives base ids only, and decodes to the same text."""
    ids = TOKENIZER.encode(text, allow_special=False)

    assert all(i < TOKENIZER.n_base for i in ids)
    assert text == TOKENIZER.decode(ids)


def test_lone_surrogates_become_replacements() -> None:
    """Text that is not Unicode (from JSON escapes) is encoded all the same."""
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b", allow_special=False)) == "a\ufffdb"


@pytest.mark.parametrize("unit", ["a", " ", "\n", "!", "中", "1", "\u0301"])
def test_long_runs_take_no_time(unit: str) -> None:
    """A million equal characters are encoded and come back."""
    text = unit * 1_000_000
    assert text == TOKENIZER.decode(TOKENIZER.encode(text, allow_special=False))


@pytest.mark.parametrize("token_id", [-1, 1600, 10**9])
def test_decode_refuses_ids_outside(token_id: int) -> None:
    """An id outside the vocabulary is named with the range."""
    with pytest.raises(PromptError, match=f"{token_id}: expected 0 to 1599"):
        TOKENIZER.decode([5, token_id])


BAD_LINES = {
    "no rank": b"IQ==\n",
    "three fields": b"IQ== 3 4\n",
    "rank is no number": b"IQ== x\n",
    "negative rank": b"IQ== -3\n",
    "signed rank": b"IQ== +3\n",
    "enormous rank": b"IQ== 99999999999999999999999\n",
    "no base64": b"I!Q= 3\n",
    "bad padding": b"IQ= 3\n",
    "token once more": b"IQ== 3\n",
    "rank once more": b"AAAAAAAA 2\n",
    "gap in ranks": b"AAAAAAAA 4000\n",
    "binary": b"\xff\xfe\x00 \x01\n",
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_malformed_line_is_named(tmp_path: Path, line: bytes) -> None:
    """One error, one line long, names tiktoken.model and the line."""
    ranks = [*RANKS[:3], line, *RANKS[4:]]

    message = loaded_error(write(tmp_path, b"".join(ranks)))

    assert f"{tmp_path / 'tiktoken.model'}:4: " in message
    assert "\n" not in message


def test_absent_byte_is_named(tmp_path: Path) -> None:
    """Without a token for each byte some texts can't be encoded: refused."""
    ranks = b"".join(RANKS[:255])
    assert "no token for byte" in loaded_error(write(tmp_path, ranks))


def test_empty_and_absent_files(tmp_path: Path) -> None:
    """Empty and absent files are errors that name the file."""
    assert "tiktoken.model: can't be opened" in loaded_error(tmp_path)
    assert "tiktoken.model:1: " in loaded_error(write(tmp_path, b""))
    write(tmp_path, b"".join(RANKS))
    (tmp_path / "tokenizer_config.json").unlink()
    assert "tokenizer_config.json: can't be opened" in loaded_error(tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """A named pipe in a file's place is an error, not a hang."""
    os.mkfifo(tmp_path / "tiktoken.model")
    assert "tiktoken.model: is not a file" in loaded_error(tmp_path)


BAD_CONFIGS = {
    "truncated": (CONFIG[:100], "tokenizer_config.json:"),
    "not utf-8": (b'{"a": "\xff"}', "not UTF-8"),
    "deep": (b"[" * 100_000, "nested too deep"),
    "list": (b"[]", "expected a JSON object"),
    "no added tokens": (b"{}", "added_tokens_decoder"),
    "base id": (b'{"added_tokens_decoder": {"5": {"content": "x"}}}', "'5'"),
    "id beyond": (b'{"added_tokens_decoder": {"1600": {"content": "x"}}}', "'1600'"),
    "id no number": (b'{"added_tokens_decoder": {"x": {"content": "x"}}}', "'x'"),
    "no content": (b'{"added_tokens_decoder": {"1344": {}}}', "'1344'"),
    "empty content": (b'{"added_tokens_decoder": {"1344": {"content": ""}}}', "'1344'"),
    "surrogate": (b'{"added_tokens_decoder": {"1344": {"content": "\\ud800"}}}', "'1344'"),
    "name twice": (
        b'{"added_tokens_decoder": {"1344": {"content": "x"}, "1345": {"content": "x"}}}',
        "ids 1344 and 1345",
    ),
}


@pytest.mark.parametrize(("config", "part"), BAD_CONFIGS.values(), ids=BAD_CONFIGS.keys())
def test_malformed_config_is_named(tmp_path: Path, config: bytes, part: str) -> None:
    """One error, one line long, names tokenizer_config.json and the entry."""
    message = loaded_error(write(tmp_path, b"".join(RANKS), config))

    assert "tokenizer_config.json" in message
    assert part in message
    assert "\n" not in message


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_files_load_or_say_why(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever bytes are overwritten, loading works or raises one CheckpointError."""
    files = [bytearray(b"".join(RANKS)), bytearray(CONFIG)]
    for _ in range(data.draw(st.integers(1, 3))):
        file = data.draw(st.sampled_from(files))
        at = data.draw(st.integers(0, len(file) - 1))
        file[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    folder = write(tmp_path_factory.mktemp("damaged"), bytes(files[0]), bytes(files[1]))
    said = ""
    try:
        tokenizer = KimiTokenizer(folder)
    except CheckpointError as error:
        said = str(error)
    else:
        assert tokenizer.decode(tokenizer.encode("Hi, 中!", True)) == "Hi, 中!"
    assert "\n" not in said


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> KimiTokenizer:
    """A vocabulary of the real size, 163,584 ranks, with the real offsets of specials."""
    tokens = (bytes(t) for n in (1, 2, 3) for t in itertools.product(range(256), repeat=n))
    lines = (
        base64.b64encode(token) + b" %d\n" % rank
        for rank, token in enumerate(itertools.islice(tokens, 163_584))
    )
    shift = 163_584 - TINY["n_base"]
    added = {i + shift: {"content": name} for name, i in TINY["named_specials"].items()}
    config = json.dumps({"added_tokens_decoder": added}).encode()
    return KimiTokenizer(write(tmp_path_factory.mktemp("wide"), b"".join(lines), config))


def test_real_size_puts_specials_where_the_real_model_has_them(wide: KimiTokenizer) -> None:
    """Ids of the published Kimi K3 vocabulary (model card of the real file)."""
    expected = {
        "[BOS]": 163584,
        "[EOS]": 163585,
        "<|end_of_msg|>": 163586,
        "<|open|>": 163587,
        "<|close|>": 163588,
        "<|sep|>": 163589,
        "<|media_pad|>": 163605,
        "<osagent_mode>": 163649,
        "[UNK]": 163838,
        "[PAD]": 163839,
    }
    assert wide.n_vocab == 163_840
    assert expected == {name: wide.special_id(name) for name in expected}
    assert wide.encode("<|open|>a<|sep|>", True)[::2] == [163587, 163589]


REAL = os.environ.get("MLXMOE_KIMI_TOKENIZER", "")


@pytest.mark.skipif(
    not REAL, reason="SKIP: set MLXMOE_KIMI_TOKENIZER to a folder with the real tiktoken.model"
)
def test_real_file_has_the_real_size() -> None:
    """The published tiktoken.model loads and has 163,584 ranks."""
    assert KimiTokenizer(Path(REAL)).n_base == 163_584
