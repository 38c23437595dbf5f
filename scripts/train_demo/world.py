"""A made-up folder, held in memory: what the demo's tools would say of it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mlxmoe.agent.calculator import calculate
from train_demo.words import KEYS, LINES, Lexicon


@dataclass(slots=True)
class World:
    """Files by path, `folder/name` or `name`; each folder holds at least one file."""

    files: dict[str, str] = field(default_factory=dict)

    def folders(self) -> list[str]:
        """Folders of the root, sorted."""
        return sorted({path.split("/")[0] for path in self.files if "/" in path})

    def names(self, folder: str = ".") -> list[str]:
        """What `list_files` shows of a folder that is there, sorted."""
        if folder in ("", "."):
            names = [path for path in self.files if "/" not in path]
            names += [f"{name}/" for name in self.folders()]
        else:
            start = f"{folder}/"
            names = [path[len(start) :] for path in self.files if path.startswith(start)]
        return sorted(names, key=lambda name: (name.rstrip("/").casefold(), name.rstrip("/")))

    def call(self, tool: str, arguments: Mapping[str, str]) -> str:
        """A tool's result, in the words of the tools themselves."""
        (argument,) = arguments.values()
        match tool:
            case "calculator":
                return calculate(argument)
            case "list_files":
                names = self.names(argument)
                return "\n".join(names) if names else f"error: no folder {argument}"
            case "read_file":
                return self.files.get(argument, f"error: no file {argument}")
            case _:
                return self._find(argument)

    def _find(self, word: str) -> str:
        whole = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", re.IGNORECASE)
        lines = [
            f"{path}: {line}"
            for path in sorted(self.files)
            for line in self.files[path].splitlines()
            if whole.search(line)
        ]
        return "\n".join(lines) if lines else "no match"

    def write(self, root: Path) -> None:
        """Make the folder real, below `root`."""
        for path, text in self.files.items():
            place = root / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(f"{text}\n")


def make_world(lexicon: Lexicon) -> World:
    """One to six files, in the root and in up to two folders."""
    random, world = lexicon.random, World()
    folders = [lexicon.word() for _ in range(random.choice((0, 1, 1, 2)))]
    for _ in range(random.choice((1, 2, 2, 3, 3, 4))):
        _add(world, lexicon, "")
    for folder in folders:
        for _ in range(random.choice((1, 2, 2, 3))):
            _add(world, lexicon, f"{folder}/")
    return world


def _add(world: World, lexicon: Lexicon, folder: str) -> None:
    path = folder + lexicon.filename()
    # One file per stem and folder, so that a wrong extension has one answer.
    stems = {other.rsplit(".", 1)[0] for other in world.files}
    if path.rsplit(".", 1)[0] in stems or path.rsplit(".", 1)[0] in world.folders():
        return
    text = settings(lexicon) if lexicon.random.random() < 0.5 else note(lexicon)
    world.files[path] = text


def settings(lexicon: Lexicon) -> str:
    """Two to four lines of `key: value`."""
    keys = lexicon.random.sample(KEYS, lexicon.random.choice((2, 2, 3, 3, 4)))
    return "\n".join(f"{key}: {lexicon.value()}" for key in keys)


def note(lexicon: Lexicon) -> str:
    """One to three short lines."""
    lines = [_line(lexicon) for _ in range(lexicon.random.choice((1, 1, 2, 2, 3)))]
    return "\n".join(dict.fromkeys(lines))


def _line(lexicon: Lexicon) -> str:
    line = lexicon.random.choice(LINES)
    return line.format(a=lexicon.word(), b=lexicon.word(), c=lexicon.word(), n=lexicon.number())
