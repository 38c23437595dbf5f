"""The rules of the house as checks: each takes a tree and returns what breaks it, one line each."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

PACKAGES = ("mlxmoe", "metal_kernels", "tui")
FILE_LINES = 300
FUNCTION_LINES = 60
SAYING_NOTHING = {"utils", "util", "helpers", "helper", "common", "base", "manager", "misc"}
SHIPPED = {".py", ".metal", ".tcss"}
# What a checkpoint is made of; only the demo's is shipped.
CHECKPOINT, DEMO = {".json", ".model", ".safetensors"}, "mlxmoe/demo"

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def sources(root: Path, folders: Iterable[str]) -> dict[str, str]:
    """Every Python file under `folders` of `root`: its path from there -> its text."""
    paths = (path for folder in folders for path in sorted((root / folder).rglob("*.py")))
    return {path.relative_to(root).as_posix(): path.read_text() for path in paths}


def too_long(files: Mapping[str, str], exceptions: Mapping[str, str]) -> list[str]:
    """Files over 300 lines and functions over 60, but for `exceptions` (place -> reason).

    A place is "path" or "path::function"; an exception that is not needed breaks the rule too.
    """
    found = dict(_long_places(files))
    kept = [line for place, line in found.items() if place not in exceptions]
    stale = [f"{place}: its exception is not needed" for place in exceptions if place not in found]
    return kept + stale


def _long_places(files: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for path, text in files.items():
        lines = len(text.splitlines())
        if lines > FILE_LINES:
            yield path, f"{path}: {lines} lines, at most {FILE_LINES}"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    place = f"{path}::{node.name}"
                    yield place, f"{place}: {lines} lines, at most {FUNCTION_LINES}"


def undocumented(files: Mapping[str, str]) -> list[str]:
    """Modules, and public functions, methods and classes, that have no docstring."""
    found = []
    for path, text in files.items():
        module = ast.parse(text)
        if ast.get_docstring(module) is None:
            found.append(f"{path}: no docstring")
        found += [
            f"{path}:{node.lineno}: {node.name} has no docstring"
            for node in _public(module)
            if ast.get_docstring(node) is None
        ]
    return found


def _public(parent: ast.Module | ast.ClassDef) -> Iterator[Definition]:
    for node in parent.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from _public(node)


def names_saying_nothing(paths: Iterable[str]) -> list[str]:
    """Files or folders called utils, helpers and the like."""
    return [path for path in paths if SAYING_NOTHING & set(re.split(r"[/._]", path))]


def swallowing(files: Mapping[str, str]) -> list[str]:
    """Bare excepts, and catches of Exception that do nothing."""
    found = []
    for path, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ExceptHandler) and (node.type is None or _ignores(node)):
                found.append(f"{path}:{node.lineno}: swallows every error")
    return found


def _ignores(handler: ast.ExceptHandler) -> bool:
    broad = isinstance(handler.type, ast.Name) and handler.type.id in {"Exception", "BaseException"}
    empty = ast.Pass | ast.Continue | ast.Constant
    return broad and all(
        isinstance(line, empty) or (isinstance(line, ast.Expr) and isinstance(line.value, empty))
        for line in handler.body
    )


def mlx_behind(root: Path, module: str) -> list[str]:
    """The mlx packages in memory after importing `module` and all below it, in a new process."""
    code = (
        "import importlib, pkgutil, sys\n"
        f"top = importlib.import_module({module!r})\n"
        "for found in pkgutil.walk_packages(getattr(top, '__path__', ()), top.__name__ + '.'):\n"
        "    importlib.import_module(found.name)\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} & {'mlx', 'mlx_lm'}))"
    )
    return _run(root, [sys.executable, "-c", code]).stdout.split()


def broken_floors(root: Path) -> str:
    """What import-linter says about the tree at `root`, "" when every contract is kept."""
    linter = Path(sys.executable).with_name("lint-imports")
    ran = _run(root, [str(linter), "--no-logo", "--no-cache"], check=False)
    return "" if ran.returncode == 0 else ran.stdout + ran.stderr


def build_wheel(root: Path, out: Path) -> set[str]:
    """Build the wheel of the tree at `root` into `out`; the paths of the files in it."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    _run(root, command)
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def not_to_ship(names: Iterable[str]) -> list[str]:
    """Files of a wheel outside the three packages and its metadata, or of another kind."""
    found = []
    for name in sorted(names):
        top, path = name.split("/")[0], Path(name)
        if top.endswith(".dist-info"):
            continue
        kinds = SHIPPED | CHECKPOINT if path.parent.as_posix() == DEMO else SHIPPED
        if top not in PACKAGES or not (path.suffix in kinds or path.name == "py.typed"):
            found.append(name)
    return found


def map_errors(readme: str, files: Iterable[str]) -> list[str]:
    """Where README's file map (the block under "## Files") and `files` differ.

    Each line of the map is a path, two spaces or more, and a comment. "folder/" stands
    for the folder's `__init__.py`.
    """
    block = re.search(r"^## Files\n.*?```text\n(.*?)```", readme, re.MULTILINE | re.DOTALL)
    if block is None:
        return ["README.md has no file map under ## Files"]
    found, named = [], set()
    for line in block.group(1).splitlines():
        match = re.fullmatch(r"(\S+) {2,}(\S.*)", line)
        if match is None:
            found.append(f"not a path and a comment: {line!r}")
        else:
            named.add(match.group(1))
    there = {re.sub(r"(^|/)__init__\.py$", r"\1", path) for path in files}
    found += [f"not in the map: {path}" for path in sorted(there - named)]
    return found + [f"in the map, but not there: {path}" for path in sorted(named - there)]


def mapped_files(root: Path) -> list[str]:
    """What the file map must name: the packages' files and the scripts."""
    kinds = {*SHIPPED, ".md", ""}
    paths = (path for top in (*PACKAGES, "scripts") for path in (root / top).rglob("*"))
    return [
        path.relative_to(root).as_posix()
        for path in paths
        if path.is_file() and path.suffix in kinds and "__pycache__" not in path.parts
    ]


def _run(root: Path, command: list[str], check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(root)}
    ran = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0 or not check, f"{command} failed:\n{ran.stdout}{ran.stderr}"
    return ran
