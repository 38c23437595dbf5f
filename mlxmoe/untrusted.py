"""Files nobody vouches for: opened without hanging, parsed with a bound, asked by type.

Knows JSON and files, not what a checkpoint is. Every failure is a `CheckpointError`
of one line that names the file.
"""

import json
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from mlxmoe.errors import CheckpointError


class _Refused(ValueError):
    """JSON that Python would take and we don't."""


def show(value: object) -> str:
    """`value` as one short printable line, whatever it holds."""
    if isinstance(value, dict | list | tuple):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, str):
        return ascii(value if len(value) <= 200 else value[:197] + "...")
    return ascii(value)[:60]


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """A regular file, or a link to one, for reading; a pipe is refused, not waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: can't be opened ({reason})") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: is not a file, expected one")
    with os.fdopen(descriptor, "rb") as file:
        try:
            yield file
        except OSError as error:
            raise CheckpointError(f"{path}: can't be read ({error.strerror})") from error


def parse_json(data: bytes, where: str) -> object:
    """The value in `data`, UTF-8 JSON without NaN and without a key given twice."""
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except _Refused as error:
        raise CheckpointError(f"{where}: {error}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{where}: not JSON at character {error.pos}: {error.msg}") from error
    except RecursionError as error:
        raise CheckpointError(f"{where}: nested too deep to be real") from error
    except ValueError as error:
        raise CheckpointError(f"{where}: a number with too many digits") from error


def read_json(path: Path, limit: int) -> dict[str, object]:
    """The JSON object in file `path` of at most `limit` bytes."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CheckpointError(f"{path}: {size:,} bytes, expected at most {limit:,}")
        data = file.read(limit)
    value = parse_json(data, str(path))
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {show(value)}, expected a JSON object")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise _Refused(f"key {show(twice)} is given twice")
    return made


def _no_constant(word: str) -> NoReturn:
    raise _Refused(f"{word} is not a JSON number")


@dataclass(frozen=True, slots=True)
class Fields:
    """An object of a JSON file, asked for by key, type and range.

    `file` names the file, `path` the object in it ("text_config."), for messages.
    A key whose value is null counts as absent.
    """

    file: str
    path: str
    data: Mapping[str, object]

    def error(self, key: str, expected: str) -> CheckpointError:
        """What to raise when `key` does not hold what was `expected`."""
        value = self.data.get(key)
        found = "missing" if value is None else show(value)
        return CheckpointError(f"{self.file}: {self.path}{key} is {found}, expected {expected}")

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self.data.get(key) is not None

    def whole(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number in [low, high]."""
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(key, f"a whole number from {low} to {high}")
        return value

    def real(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number with low < value <= high."""
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        wanted = f"a number over {low:g}, up to {high:g}"
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(key, wanted)
        if not low < value <= high:
            raise self.error(key, wanted)
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """true or false."""
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def expect(self, key: str, wanted: object, absent_is_fine: bool = False) -> None:
        """Refuses anything but `wanted`: the one value this program supports."""
        value = self.data.get(key)
        if value is None and absent_is_fine:
            return
        if type(value) is not type(wanted) or value != wanted:
            raise self.error(key, f"{json.dumps(wanted)} (others are not supported)")

    def wholes(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """A list of distinct whole numbers in [low, high], ascending."""
        value = self.data.get(key)
        wanted = f"a list of distinct whole numbers from {low} to {high}"
        if not isinstance(value, list) or len(value) > high - low + 1:
            raise self.error(key, wanted)
        numbers = [n for n in value if type(n) is int and low <= n <= high]
        if len(set(numbers)) != len(value):
            raise self.error(key, wanted)
        return tuple(sorted(numbers))

    def object(self, key: str) -> "Fields":
        """The object under `key`."""
        value = self.data.get(key)
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return Fields(self.file, f"{self.path}{key}.", value)

    def find(self, key: str) -> "Fields | None":
        """The object under `key`, or None when it is absent."""
        return self.object(key) if self.has(key) else None
