"""Three tools over one folder: list a folder, read a file, find a word. They only read.

Nothing outside the folder is shown, by whatever path or link. Names are relative to it,
with "/" between them.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlxmoe.agent.tool import ERROR, Tool, cut
from mlxmoe.errors import CheckpointError
from mlxmoe.untrusted import open_file

MOST_ENTRIES = 100
MOST_CHARACTERS = 4000
MOST_MATCHES = 20
LINE_CHARACTERS = 200
SEARCHED_BYTES = 1_000_000
READ_BYTES = 16_000_000
# A folder may be a whole disk, and a person waits.
SEARCHED_FILES = 5000
EMPTY = "(empty)"


class _RefusedError(Exception):
    """Why a path can't be shown, in words for the model."""


@dataclass(frozen=True, slots=True)
class _Folder:
    """The folder, as its real path."""

    root: Path

    def list_files(self, folder: str) -> str:
        """The entries of a folder, one a line, folders with a "/"."""
        try:
            place = self._place(folder)
            if place is None or not place.is_dir():
                return f"{ERROR}no folder {_told(folder)}"
            names = [name for _, name in sorted(_entry(path) for path in _visible(place))]
        except _RefusedError as refused:
            return f"{ERROR}{_told(folder)} {refused}"
        except OSError:
            return f"{ERROR}{_told(folder)} can't be read"
        return "\n".join(_at_most(names, MOST_ENTRIES)) or EMPTY

    def read_file(self, path: str) -> str:
        """The text of a file, without the newlines at its end."""
        try:
            place = self._place(path)
            if place is None or not place.exists():
                return f"{ERROR}no file {_told(path)}"
            if place.is_dir():
                return f"{ERROR}{_told(path)} is a folder"
            text = _read(place, READ_BYTES).rstrip("\n")
        except _RefusedError as refused:
            return f"{ERROR}{_told(path)} {refused}"
        except OSError:
            return f"{ERROR}{_told(path)} can't be read"
        more = len(text) - MOST_CHARACTERS
        if more > 0:
            return f"{text[:MOST_CHARACTERS]}\n… ({more} more characters)"
        return text or EMPTY

    def find_word(self, word: str) -> str:
        """The lines of all files that hold the word, as "path: line"."""
        word = word.strip()
        if not word:
            return "no match"
        whole = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", re.IGNORECASE)
        found: list[str] = []
        for number, path in enumerate(_files(self.root)):
            if number == SEARCHED_FILES:
                found = _at_most(found, MOST_MATCHES)
                return "\n".join([*found, f"… not all searched, only {SEARCHED_FILES} files"])
            found += self._matches(path, whole)
        return "\n".join(_at_most(found, MOST_MATCHES)) or "no match"

    def _matches(self, path: Path, whole: re.Pattern[str]) -> list[str]:
        """The lines of one file that match; none for a file that is not for reading."""
        name = "/".join(_shown(part) for part in path.relative_to(self.root).parts)
        try:
            if not _real(path).is_relative_to(self.root):
                return []
            text = _read(path, SEARCHED_BYTES)
        except (_RefusedError, OSError):
            return []
        lines = (line.strip()[:LINE_CHARACTERS] for line in text.splitlines() if whole.search(line))
        return [f"{name}: {line}" for line in lines]

    def _place(self, path: str) -> Path | None:
        """The real path, None for a text that can't be one. Raises _RefusedError, OSError."""
        if "\0" in path or len(path) > MOST_CHARACTERS or not _is_unicode(path):
            return None
        if os.path.isabs(path) or ".." in Path(path).parts:
            raise _RefusedError("is outside the folder")
        place = _real(self.root / path)
        if not place.is_relative_to(self.root):
            raise _RefusedError("is outside the folder")
        return place


def _real(path: Path) -> Path:
    """Without links; unlike `Path.resolve` it takes links that go round in a circle."""
    return Path(os.path.realpath(path))


def _entry(path: Path) -> tuple[tuple[str, str], str]:
    """What an entry is sorted by, and how it is shown."""
    name = _shown(path.name)
    return (name.casefold(), name), f"{name}/" if _is_folder(path) else name


def _is_folder(path: Path) -> bool:
    """Whether it is one; a link that leads nowhere is none, whatever is wrong with it."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _visible(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def _files(folder: Path) -> Iterator[Path]:
    """All files below a folder, sorted by path; hidden ones and linked folders are left out."""
    # A stack of our own: a tree may be deeper than Python's.
    waiting = [iter(_sorted(folder))]
    while waiting:
        path = next(waiting[-1], None)
        if path is None:
            waiting.pop()
        elif not _is_folder(path):
            yield path
        elif not path.is_symlink():
            waiting.append(iter(_sorted(path)))


def _sorted(folder: Path) -> list[Path]:
    """What is in a folder, so that paths come out sorted; nothing where it can't be read."""
    try:
        return sorted(_visible(folder), key=lambda path: path.name + "/" * _is_folder(path))
    except OSError:
        return []


def _read(path: Path, limit: int) -> str:
    """A file's text, lines ending in newlines. Raises _RefusedError for anything else."""
    try:
        with open_file(path) as file:
            # A special file that has nothing yet gives None.
            data = file.read(limit + 1) or b""
    except CheckpointError as error:
        raise _RefusedError("can't be read") from error
    if len(data) > limit:
        raise _RefusedError(f"is over {limit // 1_000_000} MB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _RefusedError("is not text") from error
    if "\0" in text:
        raise _RefusedError("is not text")
    return text.replace("\r\n", "\n")


def _is_unicode(text: str) -> bool:
    """Whether it is text at all: a model can write half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _shown(name: str) -> str:
    """A file's name as one line of text, whatever bytes it is made of."""
    return "".join(c if c.isprintable() else "\ufffd" for c in name)


def _told(path: str) -> str:
    """A path of the model's in a message to it."""
    return cut(_shown(path))


def _at_most(lines: list[str], most: int) -> list[str]:
    more = len(lines) - most
    return [*lines[:most], f"… and {more} more"] if more > 0 else lines


def folder_tools(root: Path) -> tuple[Tool, ...]:
    """list_files, read_file and find_word over `root`."""
    folder = _Folder(_real(root))
    return (
        Tool("list_files", "List a folder", ("folder",), folder.list_files),
        Tool("read_file", "Read a file", ("path",), folder.read_file),
        Tool("find_word", "Find a word in the files", ("word",), folder.find_word),
    )
