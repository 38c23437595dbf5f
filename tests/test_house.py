"""The house keeps its rules, and each rule is seen to catch a planted breach."""

import shutil
from pathlib import Path

import pytest

from house import (
    CHECKPOINT,
    PACKAGES,
    broken_floors,
    build_wheel,
    map_errors,
    mapped_files,
    mlx_behind,
    names_saying_nothing,
    not_to_ship,
    sources,
    swallowing,
    too_long,
    undocumented,
)

# "path" or "path::function" -> why it may be longer than the caps
EXCEPTIONS: dict[str, str] = {}
FREE_OF_MLX = ("mlxmoe.cli", "mlxmoe.server", "mlxmoe.agent", "tui")


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """The packages and what builds them, in a folder of their own to plant breaches in."""
    for package in PACKAGES:
        junk = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / package, tmp_path / package, ignore=junk)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, tmp_path)
    return tmp_path


def plant(folder: Path, name: str, text: str) -> None:
    """Add `text` to the end of a file of the copy, which may be new."""
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    with path.open("a") as file:
        file.write(text)


def test_files_and_functions_are_short(root: Path) -> None:
    """No file is over 300 lines and no function over 60."""
    assert [] == too_long(sources(root, (*PACKAGES, "tests", "scripts")), EXCEPTIONS)


def test_length_is_caught() -> None:
    """A long file and a long function are named; an exception excuses and must be needed."""
    body = "    x = 1\n" * 60
    planted = {"a.py": "x = 1\n" * 301, "b.py": f"class A:\n  async def f(self):\n{body}"}

    assert ["a.py: 301 lines, at most 300", "b.py::f: 61 lines, at most 60"] == too_long(
        planted, {}
    )
    assert ["c.py: its exception is not needed"] == too_long(
        planted, {"a.py": "a table", "b.py::f": "a table", "c.py": "gone"}
    )
    assert [] == too_long({"a.py": "x = 1\n" * 300, "b.py": f"def f():\n{body[:-10]}"}, {})


def test_public_names_are_documented(root: Path) -> None:
    """Every module, public class, method and function of the packages has a docstring."""
    assert [] == undocumented(sources(root, PACKAGES))


def test_missing_docstrings_are_caught() -> None:
    """A module, class, method and function without one are named; private ones are free."""
    text = "class A:\n    def f(self): ...\n    def _g(self): ...\nasync def h(): ...\n"

    assert [
        "a.py: no docstring",
        "a.py:1: A has no docstring",
        "a.py:2: f has no docstring",
        "a.py:4: h has no docstring",
    ] == undocumented({"a.py": text})


def test_names_say_something(root: Path) -> None:
    """No file is called utils, helpers, common, base or manager."""
    assert [] == names_saying_nothing(sources(root, (*PACKAGES, "tests", "scripts")))
    assert ["m/utils.py", "m/base/x.py", "m/slot_manager.py"] == names_saying_nothing(
        ["m/utils.py", "m/base/x.py", "m/slot_manager.py", "m/database.py"]
    )


def test_no_error_is_swallowed(root: Path) -> None:
    """No bare except, and no catch of Exception that does nothing."""
    assert [] == swallowing(sources(root, (*PACKAGES, "tests", "scripts")))


def test_swallowed_errors_are_caught() -> None:
    """A bare except and an empty catch of Exception are named, others are not."""
    form = "try:\n    f()\nexcept{}:\n    {}\n"
    planted = {
        "bare.py": form.format("", "g()"),
        "broad.py": form.format(" Exception", "pass"),
        "dots.py": form.format(" BaseException as e", "..."),
        "used.py": form.format(" Exception as e", "g(e)"),
        "narrow.py": form.format(" KeyError", "pass"),
    }

    assert [f"{name}.py:3: swallows every error" for name in ("bare", "broad", "dots")] == (
        swallowing(planted)
    )


@pytest.mark.parametrize("module", FREE_OF_MLX)
def test_surfaces_load_no_mlx(root: Path, module: str) -> None:
    """Importing a surface, with all its modules, leaves mlx and mlx-lm unloaded."""
    assert [] == mlx_behind(root, module)


def test_loaded_mlx_is_caught(copy: Path) -> None:
    """An import of mlx somewhere below a surface is seen."""
    plant(copy, "tui/deep.py", "import mlx.core\n")

    assert ["mlx"] == mlx_behind(copy, "tui")


def test_floors_hold_and_a_breach_is_caught(copy: Path) -> None:
    """Modules import only from lower floors; an upward import, mlx in a surface by way of
    another module, and a module without a floor are each named."""
    assert "" == broken_floors(copy)
    plant(copy, "mlxmoe/errors.py", "import mlxmoe.loader\n")
    plant(copy, "tui/__init__.py", "import mlxmoe.experts.tables\n")
    plant(copy, "metal_kernels/__init__.py", "import mlxmoe.events\n")
    plant(copy, "mlxmoe/strange.py", "")
    said = broken_floors(copy)

    assert "mlxmoe.errors is not allowed to import mlxmoe.loader" in said
    assert "tui is not allowed to import mlx" in said
    assert "metal_kernels is not allowed to import mlxmoe" in said
    assert "- mlxmoe.strange" in said


def test_wheel_holds_three_packages_and_nothing_else(copy: Path, tmp_path: Path) -> None:
    """Python, .metal and .tcss files of the three packages are in the wheel, and the demo's
    checkpoint; planted junk is not, nor a checkpoint elsewhere."""
    plant(copy, "metal_kernels/planted.metal", "//")
    plant(copy, "tui/planted.tcss", "Screen {}")
    for kind in CHECKPOINT:
        plant(copy, f"mlxmoe/demo/planted{kind}", "{}")
    for junk in (
        "metal_kernels/x.metallib", "mlxmoe/x.so", "tui/notes.md", "tests/x.py", "y.py",
        "mlxmoe/x.safetensors", "mlxmoe/agent/x.json", "tui/x.model", "mlxmoe/demo/x.pt",
        "mlxmoe/demo/deep/x.json",
    ):  # fmt: skip
        plant(copy, junk, "x")
    packaged = {
        path.relative_to(copy).as_posix()
        for path in (copy / "mlxmoe/demo").iterdir()
        if path.suffix in CHECKPOINT
    }
    names = build_wheel(copy, tmp_path / "out")

    wanted = {*sources(copy, PACKAGES), "mlxmoe/py.typed"}
    wanted |= {"metal_kernels/planted.metal", "tui/planted.tcss", *packaged}
    assert len(packaged) >= len(CHECKPOINT)
    assert [] == not_to_ship(names)
    assert {*PACKAGES, "mlxmoe-0.1.0.dist-info"} == {name.split("/")[0] for name in names}
    assert wanted == {name for name in names if ".dist-info/" not in name}
    assert "mlxmoe-0.1.0.dist-info/licenses/LICENSE" in names


def test_junk_in_a_wheel_is_caught() -> None:
    """A fourth package, a compiled kernel, a note and a stray checkpoint are named."""
    good = [
        "mlxmoe/a.py",
        "mlxmoe/py.typed",
        "tui/a.tcss",
        "metal_kernels/a.metal",
        "mlxmoe/demo/a.safetensors",
        "m.dist-info/X",
    ]
    bad = ["metal_kernels/a.metallib", "mlxmoe/a.md", "tests/a.py", "top.py"]
    bad += ["mlxmoe/a.safetensors", "mlxmoe/demo/a.pt", "mlxmoe/demo/x/a.json", "tui/a.json"]

    assert sorted(bad) == not_to_ship(good + bad)


def test_file_map_is_the_tree(root: Path) -> None:
    """README's map names every file of the packages and scripts, and no other."""
    assert [] == map_errors((root / "README.md").read_text(), mapped_files(root))


def test_a_wrong_file_map_is_caught() -> None:
    """A file left out, one that is gone, a line without comment, and no map are each named."""
    text = "# x\n\n## Files\n\n```text\nm/  all\nm/a.py  does\nm/b.py\nm/gone.py   x\n```\n"

    assert [
        "not a path and a comment: 'm/b.py'",
        "not in the map: m/b.py",
        "in the map, but not there: m/gone.py",
    ] == map_errors(text, ["m/__init__.py", "m/a.py", "m/b.py"])
    assert ["README.md has no file map under ## Files"] == map_errors("# x\n", [])
