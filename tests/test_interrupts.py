"""Ctrl-C at every stage: exit 130, soon, and what was said is kept."""

import json
import re
import signal
import time
from pathlib import Path

import pytest

import make_checkpoint
from processes import errors, output, read_until, running, watched

GREEDY = ["--temperature", "0", "--max-tokens", "4000"]


@pytest.fixture(scope="module")
def model(goldens: Path) -> str:
    """A checkpoint's folder."""
    return str(goldens / "tiny-k31")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose trunk, and whose layers, take some tenths of a second."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    sizes = "--hidden 1024 --dense-width 2048 --vocab 40000 --layers 4 --experts 4"
    assert 0 == make_checkpoint.main([str(folder), *sizes.split()])
    return folder


def test_interrupted_decoding_keeps_the_answer(model: str) -> None:
    """Between two tokens: what was said stays on stdout, with its figures on stderr."""
    with running("run", model, "hello", "--no-think", *GREEDY) as process:
        assert process.stdout is not None
        said = read_until(process.stdout.fileno(), b"o")
        process.send_signal(signal.SIGINT)
        said += output(process)
        err = errors(process)
        code = process.wait(10)

    assert (130, True) == (code, said.endswith(b"\n"))
    assert re.fullmatch(r"\[cancelled\] \d+ prompt tokens .* planned\n", err)


@pytest.mark.parametrize("decoding", [False, True])
def test_interrupted_json_is_whole(model: str, decoding: bool) -> None:
    """In prefill and in decoding: the object so far, cancelled."""
    prompt = "hello" if decoding else "hello " * 6000
    with watched("run", model, prompt, "--json", "--max-span", "64", *GREEDY) as (process, screen):
        read_until(screen, b"prefill")
        time.sleep(2.0 if decoding else 0.0)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        reply = json.loads(output(process))
        code = process.wait(10)

    assert (130, "cancelled") == (code, reply["finish_reason"])
    assert decoding == (reply["usage"]["completion_tokens"] > 0)
    assert time.monotonic() - begin < 5
    if not decoding:
        assert reply["stats"]["prefill_tokens"] < reply["usage"]["prompt_tokens"]


@pytest.mark.parametrize("verb", ["run", "score"])
def test_interrupted_loading_ends_at_once(wide: Path, verb: str) -> None:
    """While the trunk is read: a line that says so, and no answer."""
    ids = wide / "ids.json"
    ids.write_text(json.dumps([7] * 100))
    arguments = {"run": ["hello"], "score": ["--ids", str(ids)]}[verb]
    with watched(verb, wide, *arguments) as (process, screen):
        read_until(screen, b"load ")
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        err = read_until(screen, b"interrupted\r\n")
        code = process.wait(10)

        assert (130, b"") == (code, output(process))
    assert time.monotonic() - begin < 2
    assert b"mlxmoe: interrupted" in err


def test_interrupted_prefill_ends_soon(wide: Path) -> None:
    """Between two layers of the prompt: the figures so far."""
    with watched("run", wide, "hello") as (process, screen):
        read_until(screen, b"prefill ")
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        read_until(screen, b"[cancelled]")
        code = process.wait(10)

        assert (130, b"") == (code, output(process))
    assert time.monotonic() - begin < 5


def test_a_second_interrupt_does_not_wait(wide: Path) -> None:
    """Two of them while a layer takes its time end the process at once."""
    with watched("run", wide, "hello") as (process, screen):
        read_until(screen, b"prefill ")
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        read_until(screen, b"mlxmoe: interrupted")

        assert 130 == process.wait(10)
    assert time.monotonic() - begin < 2
