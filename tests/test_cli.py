"""The command line in one process: what each misuse says, and how it exits."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import Run


@pytest.fixture
def model(goldens: Path) -> Path:
    """A checkpoint's folder."""
    return goldens / "tiny-k31"


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """A checkpoint's folder to spoil."""
    return shutil.copytree(model, tmp_path / "model")


MISUSES: dict[str, tuple[list[str], str]] = {
    "tier": (["--tier", "medium"], "unknown tier 'medium', expected low, high, max"),
    "ram-unit": (["--ram", "12XB"], "'12XB' is not a size; expected like 96GB"),
    "ram-over": (["--ram", "900TB"], "--ram 900000.0 GB, this machine has"),
    "ram-under": (["--ram", "1MB"], "budget 1.0 MB is under the floor"),
    "slots-under": (["--slots", "3"], "--slots 3, expected at least 4"),
    "span": (["--max-span", "0"], "--max-span 0, expected at least 1"),
    "context": (["--context", "0"], "context 0, this model takes 1 to"),
    "prompt-over": (["--context", "50"], "the prompt has 100 tokens, and the context holds 50"),
    "temperature": (["--temperature", "-1"], "temperature is -1.0, expected 0 to 100"),
    "top-p": (["--top-p", "nan"], "top_p is nan, expected 0 to 1"),
    "top-k": (["--top-k", "-2"], "top_k is -2, expected 0"),
    "max-tokens": (["--max-tokens", "0"], "max_tokens is 0, expected 1"),
    "cap": (["--thinking-cap", "-1"], "thinking_cap is -1, expected 0"),
    "stop": (["--stop", ""], "a stop string is empty"),
    "tools-none": (["--tools", "/nowhere.json"], "/nowhere.json: can't be read (No such file"),
}


@pytest.mark.parametrize("case", MISUSES)
def test_misuse_exits_2_with_one_line(run: Run, model: Path, case: str) -> None:
    """Nothing on stdout; stderr says what was found and what was expected."""
    options, words = MISUSES[case]

    code, out, err = run("run", model, "What is the sea?", *options)

    assert (2, "", 1) == (code, out, err.count("\n"))
    assert err.startswith(f"mlxmoe: {words}"), err


@pytest.mark.parametrize("prompt", ["", "  \n\t"])
def test_an_empty_prompt_is_misuse(run: Run, model: Path, prompt: str) -> None:
    """Blank is empty too."""
    code, out, err = run("run", model, prompt)

    assert (2, "") == (code, out)
    assert 'mlxmoe: the prompt is empty. Type one: mlxmoe run [MODEL] "your question"\n' == err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", ".", "x", "--nope"], "No such option: --nope"),
        (["score"], "Missing argument 'model'"),
        (["run", ".", "x", "--slots", "many"], "Invalid value for '--slots'"),
        (["fly"], "No such command 'fly'"),
    ],
)
def test_what_the_parser_refuses(run: Run, arguments: list[str], words: str) -> None:
    """Exit 2, a usage line with the program's name, and the reason."""
    code, out, err = run(*arguments)

    assert (2, "") == (code, out)
    assert err.startswith("Usage: mlxmoe ")
    assert words in err


def test_help(run: Run) -> None:
    """Verbs by --help, exit 0; no arguments show the same as misuse."""
    code, out, _ = run("--help")
    nothing = run()

    assert 0 == code
    for verb in ("run", "chat", "score", "plan", "info"):
        assert f"  {verb} " in out
    assert (2, True) == (nothing[0], "score" in nothing[2])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON ("),
        ("[" * 100_000 + "]" * 100_000, "not JSON ("),
        ('{"name": "f"}', "expected a JSON list of tools"),
        ('["f"]', "expected a JSON list of tools"),
    ],
)
def test_bad_tools(run: Run, model: Path, tmp_path: Path, content: str, words: str) -> None:
    """A file that is not a list of objects."""
    tools = tmp_path / "tools.json"
    tools.write_text(content)

    code, _, err = run("run", model, "hi", "--tools", tools)

    assert 2 == code
    assert err.startswith(f"mlxmoe: {tools}: {words}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1, 2, 99999999]", "token id 99999999, this model knows 0 to 1599"),
        ("[1600]", "token id 1600, this model knows 0 to 1599"),
        ("[-1]", "{path}: expected a JSON list of token ids"),
        ("[true]", "{path}: expected a JSON list of token ids"),
        ("[1.5]", "{path}: expected a JSON list of token ids"),
        ("7", "{path}: expected a JSON list of token ids"),
        ("[]", "nothing to score: the text has no tokens"),
        ("[" + "1," * 40 + "1]", "the text has 41 tokens, the context holds 40"),
        ("\xff", "{path}: not JSON ("),
    ],
)
def test_bad_ids(run: Run, model: Path, tmp_path: Path, content: str, words: str) -> None:
    """Ids the model does not have would read past its embeddings."""
    path = tmp_path / "ids.json"
    path.write_text(content)

    code, out, err = run("score", model, "--ids", path, "--slots", "28", "--context", "40")

    assert (2, "") == (code, out)
    assert err.startswith(f"mlxmoe: {words.format(path=path)}"), err


def test_bad_score_inputs(run: Run, model: Path, tmp_path: Path) -> None:
    """One input, of text, and a place for the logits that can be written."""
    text, odd = tmp_path / "a.txt", tmp_path / "b.txt"
    text.write_text("some text")
    odd.write_bytes(b"\xff\xfe")
    cases = {
        (): "give a text FILE or --ids IDS.json, not both and not neither",
        (text, "--ids", text): "give a text FILE or --ids IDS.json",
        (odd,): f"{odd}: not UTF-8 text",
        (tmp_path / "none",): f"{tmp_path / 'none'}: can't be read (No such file",
        (tmp_path,): f"{tmp_path}: can't be read (Is a directory)",
        (text, "--logits", tmp_path): f"{tmp_path}: can't be written",
        (text, "--logits", tmp_path / "no/x"): f"{tmp_path / 'no/x'}: can't be written",
    }
    for arguments, words in cases.items():
        code, out, err = run("score", model, *arguments)

        assert (2, "", 1) == (code, out, err.count("\n"))
        assert err.startswith(f"mlxmoe: {words}"), err


def no_index(folder: Path) -> str:
    """Take the index away."""
    (folder / "model.safetensors.index.json").unlink()
    return "but no model.safetensors.index.json"


def no_shard(folder: Path) -> str:
    """Take a shard away."""
    (folder / "model-00004-of-000011.safetensors").unlink()
    return "model-00004-of-000011.safetensors"


def cut_shard(folder: Path) -> str:
    """Cut a shard's last bytes off."""
    shard = folder / "model-00004-of-000011.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    return "model-00004-of-000011.safetensors"


def empty_shard(folder: Path) -> str:
    """A shard of no bytes."""
    (folder / "model-00004-of-000011.safetensors").write_bytes(b"")
    return "model-00004-of-000011.safetensors"


def broken_config(folder: Path) -> str:
    """A config that is no JSON."""
    (folder / "config.json").write_text('{"model_type": ')
    return "config.json"


def other_config(folder: Path) -> str:
    """A config whose numbers are not those of the tensors."""
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_experts"] = 17
    (folder / "config.json").write_text(json.dumps(config))
    return "gate.weight is BF16 [16, 128], expected"


def no_tokenizer(folder: Path) -> str:
    """A checkpoint without its vocabulary."""
    (folder / "tiktoken.model").unlink()
    return "tiktoken.model"


def odd_tokenizer(folder: Path) -> str:
    """A vocabulary of which a line is damaged."""
    path = folder / "tiktoken.model"
    path.write_bytes(path.read_bytes().replace(b" 7\n", b" \xff\x1b[31m\n", 1))
    return "tiktoken.model"


SPOILERS: list[Callable[[Path], str]] = [
    no_index, no_shard, cut_shard, empty_shard, broken_config, other_config, no_tokenizer,
    odd_tokenizer,
]  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILERS)
def test_a_damaged_checkpoint_exits_1_with_one_line(
    run: Run, copy: Path, spoil: Callable[[Path], str]
) -> None:
    """Each is found before the first token and named, without codes of the file's own."""
    words = spoil(copy)

    code, out, err = run("run", copy, "hi", "--slots", "28")

    assert (1, "", 1) == (code, out, err.count("\n"))
    assert err.startswith("mlxmoe: ")
    assert words in err
    assert err.rstrip("\n").isprintable()


@pytest.mark.parametrize("verb", ["run", "score", "plan", "info"])
def test_a_folder_that_is_none(run: Run, tmp_path: Path, verb: str) -> None:
    """Nothing there, an empty folder, a file: exit 1 and one line from every verb."""
    file = tmp_path / "file"
    file.write_text("x")
    (tmp_path / "empty").mkdir()
    more = {"run": ["hi"], "score": [str(file)]}.get(verb, [])
    cases = {
        "none": "found nothing, expected a checkpoint's folder",
        "empty": "has no config.json",
        "file": "found a file, expected a checkpoint's folder",
    }
    for name, words in cases.items():
        code, out, err = run(verb, tmp_path / name, *more)

        assert (1, "", 1) == (code, out, err.count("\n"))
        assert err.startswith(f"mlxmoe: {tmp_path / name}: {words}"), err


def test_plan_and_info_in_json_and_in_lines(run: Run, model: Path) -> None:
    """One object each, whose sums fit; lines that hold the same words."""
    code, out, _ = run("plan", model, "--slots", "28", "--json")
    planned = json.loads(out)
    lines = run("plan", model, "--slots", "28")[1]
    about = json.loads(run("info", model, "--json")[1])

    parts = ("trunk_bytes", "state_bytes", "scratch_bytes", "slot_bytes")
    assert 0 == code
    assert sum(planned[part] for part in parts) == planned["planned_bytes"]
    assert planned["planned_bytes"] <= planned["budget_bytes"]
    assert (28, 112, "cached") == (planned["slots"], planned["experts"], planned["residency"])
    assert 28 * planned["record_bytes"] == planned["slot_bytes"]
    assert 4 * 7 * planned["record_bytes"] == planned["working_set_bytes"]
    for word in ("trunk", "state", "scratch", "slots", "floor", "working set", "cached"):
        assert word in lines
    assert ("kimi_k31", 8, 7, 16, 4, 24) == tuple(
        about[key]
        for key in (
            "model_type", "layers", "moe_layers", "experts_per_layer", "experts_per_token",
            "index_topk",
        )
    )  # fmt: skip
    assert "kimi_k31" in run("info", model)[1]
