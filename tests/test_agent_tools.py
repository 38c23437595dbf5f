"""Tools over a folder: what the model reads of it, word for word, and never of the rest."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxmoe.agent.folder import SEARCHED_FILES
from mlxmoe.agent.tool import Tool
from mlxmoe.agent.toolbox import Toolbox, own_tools
from mlxmoe.transcript import ToolCall

PARAMETERS = {
    "calculator": "expression", "list_files": "folder", "read_file": "path", "find_word": "word",
}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with files, beside something that is nobody's business."""
    (tmp_path / "secret.txt").write_text("the secret word\n")
    folder = tmp_path / "folder"
    (folder / "recipes").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / ".hidden/a.txt").write_text("milk hidden\n")
    (folder / ".env").write_text("milk\n")
    (folder / "notes.txt").write_text("  buy Milk and bread\nno milkshake\n\n\n")
    (folder / "config.txt").write_text("port: 8080\r\nhost: garden\r\n")
    (folder / "Zebra.txt").write_text("")
    (folder / "recipes/soup.txt").write_text("milk, potato\n")
    return folder


def use(root: Path, tool: str, given: str) -> str:
    """The result of one call."""
    return own_tools(root).answer(ToolCall(tool, {PARAMETERS[tool]: given}))


def test_the_four_are_declared_in_order(root: Path) -> None:
    """Names, descriptions and parameters as the demo model was trained on them."""
    said = [declared["function"] for declared in own_tools(root).declarations]

    assert [
        ("calculator", "Work out a sum", "expression"),
        ("list_files", "List a folder", "folder"),
        ("read_file", "Read a file", "path"),
        ("find_word", "Find a word in the files", "word"),
    ] == [(f["name"], f["description"], *f["parameters"]["required"]) for f in said]
    assert {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
            },
        },
    } == own_tools(root).declarations[2]


@pytest.mark.parametrize(
    ("tool", "argument", "result"),
    [
        ("list_files", ".", "config.txt\nnotes.txt\nrecipes/\nZebra.txt"),
        ("list_files", "", "config.txt\nnotes.txt\nrecipes/\nZebra.txt"),
        ("list_files", "recipes", "soup.txt"),
        ("list_files", "./recipes/", "soup.txt"),
        ("list_files", "nowhere", "error: no folder nowhere"),
        ("list_files", "notes.txt", "error: no folder notes.txt"),
        ("read_file", "notes.txt", "  buy Milk and bread\nno milkshake"),
        ("read_file", "config.txt", "port: 8080\nhost: garden"),
        ("read_file", "recipes/soup.txt", "milk, potato"),
        ("read_file", "Zebra.txt", "(empty)"),
        ("read_file", "soup.txt", "error: no file soup.txt"),
        ("read_file", "notes.txt/x", "error: no file notes.txt/x"),
        ("read_file", "recipes", "error: recipes is a folder"),
        ("find_word", "milk", "notes.txt: buy Milk and bread\nrecipes/soup.txt: milk, potato"),
        ("find_word", "MILK ", "notes.txt: buy Milk and bread\nrecipes/soup.txt: milk, potato"),
        ("find_word", "8080", "config.txt: port: 8080"),
        ("find_word", "mil", "no match"),
        ("find_word", ".*", "no match"),
        ("find_word", "", "no match"),
        ("calculator", "6*7", "42"),
    ],
)
def test_results(root: Path, tool: str, argument: str, result: str) -> None:
    """What each tool says."""
    assert result == use(root, tool, argument)


def test_an_empty_folder(tmp_path: Path) -> None:
    """Nothing to see, hidden entries neither."""
    (tmp_path / ".hidden").touch()

    assert "(empty)" == use(tmp_path, "list_files", ".")
    assert "no match" == use(tmp_path, "find_word", "x")


def test_long_results_are_cut_and_counted(tmp_path: Path) -> None:
    """100 entries, 4000 characters, 20 lines of 200 characters, and how many more there are."""
    for number in range(103):
        (tmp_path / f"{number:03}.txt").touch()
    (tmp_path / "long").write_text("é" * 4007 + "\n")
    (tmp_path / "many").write_text(("word " + "x" * 300 + "\n") * 25)

    listed = use(tmp_path, "list_files", ".").splitlines()
    found = use(tmp_path, "find_word", "word").splitlines()

    assert (101, "099.txt", "… and 5 more") == (len(listed), *listed[-2:])
    assert "é" * 4000 + "\n… (7 more characters)" == use(tmp_path, "read_file", "long")
    assert ["many: word " + "x" * 195] * 20 + ["… and 5 more"] == found


def test_a_search_has_an_end(tmp_path: Path) -> None:
    """Of a folder with very many files the first are searched, and it says so."""
    for number in range(SEARCHED_FILES + 1):
        (tmp_path / f"{number:05}").write_text("")
    (tmp_path / "00000").write_text("word")
    (tmp_path / f"{SEARCHED_FILES:05}").write_text("word")

    assert f"00000: word\n… not all searched, only {SEARCHED_FILES} files" == use(
        tmp_path, "find_word", "word"
    )


def test_what_is_not_text(root: Path) -> None:
    """Bytes, a pipe (without waiting for it), and files too large are refused or left out."""
    (root / "bytes").write_bytes(b"milk \xff\n")
    (root / "zeros").write_bytes(b"milk\0\n")
    os.mkfifo(root / "pipe")
    with (root / "large").open("wb") as file:
        file.write(b"milk\n")
        file.truncate(17_000_000)
    (root / "middling").write_text("milk\n" + " " * 1_000_000)

    for name, words in {
        "bytes": "is not text", "zeros": "is not text", "pipe": "can't be read",
        "large": "is over 16 MB",
    }.items():  # fmt: skip
        assert f"error: {name} {words}" == use(root, "read_file", name)
    assert "… (996005 more characters)" in use(root, "read_file", "middling")
    assert 2 == len(use(root, "find_word", "milk").splitlines())


@pytest.mark.parametrize(
    "path",
    ["..", "../secret.txt", "recipes/../../secret.txt", "/etc/passwd", "link", "up",
     "up/secret.txt", "deep/up/secret.txt", "recipes/.."],
)  # fmt: skip
def test_nothing_outside_is_shown(root: Path, path: str) -> None:
    """By dots, absolute paths, or links to files and folders."""
    (root / "link").symlink_to(root.parent / "secret.txt")
    (root / "up").symlink_to(root.parent)
    (root / "deep").symlink_to(root)

    for tool in ("read_file", "list_files"):
        assert f"error: {path} is outside the folder" == use(root, tool, path)
    assert "no match" == use(root, "find_word", "secret")


def test_links_inside_are_followed(root: Path) -> None:
    """A link to a file of the folder is a file, one that goes in a circle is none."""
    (root / "again.txt").symlink_to("recipes/soup.txt")
    (root / "circle").symlink_to("circle")

    assert "milk, potato" == use(root, "read_file", "again.txt")
    assert use(root, "read_file", "circle").startswith("error: ")
    assert "again.txt: milk, potato" == use(root, "find_word", "milk").splitlines()[0]
    assert "circle" in use(root, "list_files", ".").splitlines()


def test_odd_names_are_one_line_of_text(tmp_path: Path) -> None:
    """Line ends and bytes that are no UTF-8 can't make lines or break the prompt."""
    for name in (b"a\nb", b"\xff.txt", b"\x1b[31m"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text("word")

    for text in (use(tmp_path, "list_files", ""), use(tmp_path, "find_word", "word")):
        assert 3 == len(text.split("\n"))
        assert text.encode().decode() == text
        assert "\x1b" not in text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=40) | st.text("./~\0sectrx\\", max_size=40) | st.just("x" * 5000))
def test_any_path_gives_a_result(root: Path, path: str) -> None:
    """No exception, and never the secret."""
    for tool in ("read_file", "list_files"):
        assert "secret word" not in use(root, tool, path)


CALLS: dict[str, tuple[ToolCall, str]] = {
    "unknown": (ToolCall("fly", {}), "no tool fly, there are: calculator, list_files, read_file"),
    "missing": (ToolCall("read_file", {}), "read_file needs path"),
    "number": (ToolCall("calculator", {"expression": 5}), "expression must be a string"),
    "more": (ToolCall("read_file", {"path": "a", "n": "1"}), "read_file has no n, only path"),
    "broken": (ToolCall("read_file", '{"path": '), "the arguments of read_file are not a JSON"),
}


@pytest.mark.parametrize("case", CALLS)
def test_wrong_calls_are_results(root: Path, case: str) -> None:
    """The model is told what is wrong."""
    call, words = CALLS[case]

    assert own_tools(root).answer(call).startswith(f"error: {words}")


def test_arguments_come_in_the_tool_s_order() -> None:
    """However the call orders them; a box without tools says so."""
    join = Tool("join", "Join", ("a", "b"), lambda a, b: f"{a}-{b}")

    assert "1-2" == Toolbox((join,)).answer(ToolCall("join", {"b": "2", "a": "1"}))
    assert "error: no tool join, there are: none" == Toolbox().answer(ToolCall("join", {}))


def test_one_bad_entry_does_not_hide_the_others(tmp_path: Path) -> None:
    """A link to a name that can't be is listed, and the search goes on past it."""
    (tmp_path / "notes.txt").write_text("buy milk\n")
    (tmp_path / "a").symlink_to("x" * 300)
    tools = own_tools(tmp_path)

    assert "a\nnotes.txt" == tools.answer(ToolCall("list_files", {"folder": "."}))
    assert "notes.txt: buy milk" == tools.answer(ToolCall("find_word", {"word": "milk"}))


def test_a_tree_deeper_than_the_stack(tmp_path: Path) -> None:
    """A search goes as deep as the folders do."""
    deepest = tmp_path
    for _ in range(1100):
        deepest /= "d"
        os.mkdir(deepest)
    (tmp_path / "notes.txt").write_text("buy milk\n")

    said = own_tools(tmp_path).answer(ToolCall("find_word", {"word": "milk"}))
    os.removedirs(deepest)
    assert "notes.txt: buy milk" == said


@pytest.mark.parametrize("tool", ["list_files", "read_file", "find_word"])
def test_half_a_surrogate_pair_is_a_result(tmp_path: Path, tool: str) -> None:
    """Text that is no Unicode names nothing, and the message about it is text."""
    (given,) = next(t for t in own_tools(tmp_path).tools if t.name == tool).parameters
    own_tools(tmp_path).answer(ToolCall(tool, {given: "a\ud800b"})).encode()


def test_messages_cut_what_the_model_wrote(tmp_path: Path) -> None:
    """A long path is not said in full."""
    said = own_tools(tmp_path).answer(ToolCall("read_file", {"path": "x/" * 1500}))
    assert f"error: no file {'x/' * 30}" == said
