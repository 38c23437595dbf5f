"""The model name `demo`, on a checkpoint that stands in for the packaged one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlxmoe import demo
from mlxmoe.budget import Settings
from mlxmoe.errors import CheckpointError
from processes import ROOT, Run


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, goldens: Path) -> Path:
    """The folder that is the demo's for a test."""
    monkeypatch.setattr(demo, "FOLDER", goldens / "tiny-k31")
    return demo.FOLDER


def test_only_the_bare_name_is_the_demo(stand_in: Path) -> None:
    """A path that ends so is a folder of one's own."""
    assert stand_in == demo.model_folder("demo")
    for model in ("./demo", "demo/", "/x/demo", "Demo", "model"):
        assert Path(model) == demo.model_folder(model)


def test_files_that_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error that says where they should be and what to do."""
    monkeypatch.setattr(demo, "FOLDER", tmp_path)

    with pytest.raises(CheckpointError, match=r"not in .*, expected config\.json and more there"):
        demo.model_folder("demo")


@pytest.mark.parametrize(
    ("given", "filled"),
    [
        (Settings(), Settings(slots=40, context=4096)),
        (Settings(slots=9), Settings(slots=9, context=4096)),
        (Settings(ram=7), Settings(ram=7, context=4096)),
        (Settings(context=1), Settings(slots=40, context=1)),
        (Settings(max_span=3, width=4), Settings(slots=40, max_span=3, context=4096, width=4)),
    ],
)
def test_defaults_where_nothing_was_asked(given: Settings, filled: Settings) -> None:
    """Slots unless memory or slots were given; other models are left alone."""
    assert filled == demo.fill_settings("demo", given)
    assert given == demo.fill_settings("./demo", given)


def test_run_without_a_model_is_the_demo(run: Run, stand_in: Path) -> None:
    """One word is the prompt; the answer is the greedy one, and experts were evicted."""
    options = ["--max-tokens", "8", "--json"]
    greedy = ["--temperature", "0", "--slots", "40", "--context", "4096"]

    replies = [
        json.loads(run("run", *words, *options)[1])
        for words in (["hello"], ["demo", "hello"], [stand_in, "hello", *greedy])
    ]

    said = [(reply["reasoning"], reply["content"]) for reply in replies]
    assert 1 == len(set(said))
    assert any(said[0])
    assert all(reply["stats"]["experts"]["evictions"] > 0 for reply in replies)
    warm = json.loads(run("run", "hello", *options, "--temperature", "50", "--seed", "1")[1])
    assert said[0] != (warm["reasoning"], warm["content"])


def test_every_verb_knows_it(run: Run, stand_in: Path, tmp_path: Path) -> None:
    """plan with the default slots, or with those of the environment; info; score."""
    text = tmp_path / "text"
    text.write_text("the sea")

    planned = json.loads(run("plan", "demo", "--json")[1])
    about = json.loads(run("info", "demo", "--json")[1])
    scored = json.loads(run("score", "demo", text, "--json")[1])

    assert (40, 4096) == (planned["slots"], planned["context"])
    assert str(stand_in) == about["folder"]
    assert scored["perplexity"] > 1


def test_the_environment_comes_before_the_demo_s_defaults(
    run: Run, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLXMOE_RAM takes the slots' default away, MLXMOE_SLOTS and MLXMOE_CONTEXT replace theirs."""
    monkeypatch.setenv("MLXMOE_RAM", "1GB")
    assert 112 == json.loads(run("plan", "demo", "--json")[1])["slots"]
    monkeypatch.delenv("MLXMOE_RAM")
    monkeypatch.setenv("MLXMOE_SLOTS", "28")
    monkeypatch.setenv("MLXMOE_CONTEXT", "500")
    planned = json.loads(run("plan", "demo", "--json")[1])

    assert (28, 500) == (planned["slots"], planned["context"])


def test_a_folder_called_demo(
    run: Run, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """./demo is that folder; demo is not."""
    shutil.copytree(stand_in, tmp_path / "demo")
    monkeypatch.chdir(tmp_path)

    assert "demo" == json.loads(run("info", "./demo", "--json")[1])["folder"]
    assert str(stand_in) == json.loads(run("info", "demo", "--json")[1])["folder"]


def test_no_prompt_is_misuse(run: Run, tmp_path: Path) -> None:
    """Nothing, or a model alone: exit 2 and what to type."""
    cases = {
        (): 'no prompt. Type one: mlxmoe run "hello", or mlxmoe run MODEL "your question"',
        ("demo",): 'demo is a model, and there is no prompt. Type: mlxmoe run demo "your question"',
        (tmp_path,): f"{tmp_path} is a path, and there is no prompt. Type: mlxmoe run {tmp_path} ",
    }
    for words, expected in cases.items():
        code, out, err = run("run", *words)

        assert (2, "", 1) == (code, out, err.count("\n"))
        assert err.startswith(f"mlxmoe: {expected}"), err


def test_the_first_look(root: Path, goldens: Path, tmp_path: Path) -> None:
    """scripts/demo without a terminal: four lines, a sample folder, a conversation; its
    arguments go to the chat."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    shutil.copy(root / "scripts/demo", tmp_path / "scripts/demo")
    (tmp_path / "scripts/setup").write_text('set -euo pipefail\ncd "$(dirname "$0")/.."\n')
    chat = (
        "from pathlib import Path; from mlxmoe import cli, demo; "
        f"demo.FOLDER = Path({str(goldens / 'tiny-k31')!r}); cli.main()"
    )
    for name, more in {"python": "", "mlxmoe": f' -c "{chat}"'}.items():
        program = tmp_path / ".venv/bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable}{more} "$@"\n')
        program.chmod(0o755)
    places = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}

    done = subprocess.run(
        [str(tmp_path / "scripts/demo"), "--max-tokens", "3"],
        check=False, capture_output=True, env={**os.environ, **places, "PYTHONPATH": str(ROOT)},
        text=True, stdin=subprocess.DEVNULL, timeout=120,
    )  # fmt: skip

    assert 0 == done.returncode, done.stderr
    lines = done.stdout.splitlines()
    prompts = [line for line in lines if line.startswith("> ")]
    assert (4, "> hello", "> /tier low") == (lines.index("> hello"), prompts[0], prompts[-2])
    assert (4, 1) == (done.stderr.count("[max, length] 3 "), done.stderr.count("[low, length] 3 "))
    (notes,) = tmp_path.rglob("notes.txt")
    assert str(notes.parent) in done.stdout
    assert "port: 8080" in (notes.parent / "config.txt").read_text()
    assert (notes.parent / "recipes/soup.txt").is_file()
