"""The command line as a process, and terminals to watch it."""

import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A command line in this process (the fixture `run`): its exit code, stdout and stderr.
Run = Callable[..., tuple[int, str, str]]
COMMAND = [sys.executable, "-c", "from mlxmoe.cli import main; main()"]


def mlxmoe(
    *arguments: object,
    text: str | None = None,
    environment: Mapping[str, str] | None = None,
    encoding: str = "utf-8",
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end, `text` on stdin."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        check=False,
        capture_output=True,
        cwd=ROOT,
        encoding=encoding,
        env={**os.environ, **(environment or {})},
        input=text,
        timeout=60,
    )


def python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script that uses the package."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        check=False,
        capture_output=True,
        cwd=ROOT,
        text=True,
        timeout=60,
    )


@contextmanager
def running(*arguments: object, stderr: int = subprocess.PIPE) -> Iterator[subprocess.Popen[bytes]]:
    """The command line while it runs; killed at the end."""
    command = [*COMMAND, *map(str, arguments)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def watched(*arguments: object) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command line with a terminal for stderr, and the terminal's other end."""
    master, slave = pty.openpty()
    try:
        with running(*arguments, stderr=slave) as process:
            os.close(slave)
            yield process, master
    finally:
        os.close(master)


def output(process: subprocess.Popen[bytes]) -> bytes:
    """What is left on stdout."""
    assert process.stdout is not None
    return process.stdout.read()


def errors(process: subprocess.Popen[bytes]) -> str:
    """What is left on stderr."""
    assert process.stderr is not None
    return process.stderr.read().decode()


def read_until(handle: int, words: bytes, seconds: float = 30.0) -> bytes:
    """What comes from a stream until `words` are in it."""
    text, end = b"", time.monotonic() + seconds
    while words not in text and time.monotonic() < end:
        text += os.read(handle, 4096)
    assert words in text
    return text
