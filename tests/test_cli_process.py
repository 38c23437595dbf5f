"""The command line as a process: what comes out where, and pipes that close."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from mlxmoe.engine import Engine, Opened
from mlxmoe.errors import UsageError
from mlxmoe.events import Request, Sampling
from mlxmoe.loader import OnProgress
from mlxmoe.transcript import user
from mlxmoe.verbs import run_request
from networks import load_arrays
from processes import COMMAND, ROOT, errors, mlxmoe, python, running

GREEDY = ["--temperature", "0", "--slots", "28"]
STATS = {
    "prefill_tokens", "prefill_seconds", "decode_tokens", "decode_seconds", "ttft_seconds",
    "host_syncs", "peak_memory_bytes", "planned_memory_bytes", "experts",
}  # fmt: skip
EXPERTS = {"hits", "misses", "rescues", "evictions", "bytes_read"}
USAGE = {"prompt_tokens", "cached_tokens", "reasoning_tokens", "completion_tokens"}


@pytest.fixture(scope="module")
def model(goldens: Path) -> str:
    """A checkpoint's folder."""
    return str(goldens / "tiny-k31")


def test_run_prints_the_answer_on_stdout(model: str) -> None:
    """The answer there, reasoning, notes and one line of figures on stderr. JSON says the
    same, also where the locale lacks letters; plain text then shows what it can."""
    options = [*GREEDY, "--thinking-cap", "6", "--max-tokens", "30"]
    ascii_only = {"PYTHONIOENCODING": "ascii"}

    plain = mlxmoe("run", model, "hello", *options)
    quiet = mlxmoe("run", model, "-", "--json", *options, text="hello", environment=ascii_only)
    lossy = mlxmoe("run", model, "hello", *options, environment=ascii_only)

    reply = json.loads(quiet.stdout)
    assert (0, 0, 0) == (plain.returncode, quiet.returncode, lossy.returncode)
    assert f"{reply['content']}\n" == plain.stdout
    assert not plain.stdout.isascii()
    assert plain.stdout.encode("ascii", "replace").decode() == lossy.stdout
    *thoughts, capped, stats = plain.stderr.splitlines()
    assert reply["reasoning"] == "\n".join(thoughts)
    assert "thinking was closed after 6 tokens" == capped
    assert re.fullmatch(r"\[length\] \d+ prompt tokens in .* s, 30 tokens at .* planned", stats)
    assert {"reasoning", "content", "tool_calls", "finish_reason", "usage", "stats"} == set(reply)
    assert (STATS, EXPERTS, USAGE) == (
        set(reply["stats"]), set(reply["stats"]["experts"]), set(reply["usage"]),
    )  # fmt: skip
    assert (30, 6) == (reply["usage"]["completion_tokens"], reply["usage"]["reasoning_tokens"])
    assert reply["stats"]["experts"]["evictions"] > 0


def test_score_writes_the_golden_logits(goldens: Path, tmp_path: Path) -> None:
    """`--ids --logits` against the float64 logits of the model."""
    main = load_arrays(goldens / "tiny-k3/goldens/main.safetensors")
    ids, out = tmp_path / "ids.json", tmp_path / "logits.safetensors"
    count = 30
    ids.write_text(json.dumps(main["input_ids"][:count].tolist()))
    arguments = ["--ids", str(ids), "--logits", str(out), "--slots", "28", "--max-span", "16"]

    done = mlxmoe("score", str(goldens / "tiny-k3"), *arguments, "--json")

    logits = np.array(main["logits_f64"][:count], np.float64)
    (written,) = load_file(out).values()
    np.testing.assert_allclose(logits, written, atol=2e-4)
    values = json.loads(done.stdout)
    following = np.array(main["input_ids"][1:count])
    p = np.exp(logits - logits.max(1, keepdims=True))
    losses = -np.log(p / p.sum(1, keepdims=True))[np.arange(count - 1), following]
    assert (count, count - 1) == (values["tokens"], values["scored"])
    assert abs(float(losses.mean()) - values["loss"]) < 2e-4


def test_no_verb_that_plans_loads_mlx(model: str) -> None:
    """Help, plan and info run without mlx, and so do refusals before a model is loaded."""
    script = """if True:
        import json, sys
        from mlxmoe.cli import main
        for arguments in json.loads(sys.argv.pop()):
            sys.argv[1:] = arguments
            try:
                main()
            except SystemExit as left:
                print(left.code, file=sys.stderr)
        found = [name for name in sys.modules if name.split(".")[0] in ("mlx", "mlx_lm")]
        sys.exit(f"loaded {found}" if found else 0)
    """
    verbs = [
        ["--help"], ["run", "--help"], ["chat", "--help"],
        ["plan", model], ["plan", model, "--json"],
        ["info", model], ["info", model, "--json"], ["run", model, "x", "--ram", "1kB"],
        ["run", "/nowhere", "x"], ["chat", "/nowhere"], ["run"],
    ]  # fmt: skip

    done = python(script, json.dumps(verbs))

    assert (0, "") == (done.returncode, done.stderr if done.returncode else "")
    codes = [line for line in done.stderr.splitlines() if line.isdigit()]
    assert ["0"] * 7 + ["2", "1", "1", "2"] == codes


def test_a_file_that_may_not_be_read(goldens: Path, tmp_path: Path) -> None:
    """Exit 1 and one line; root may read all, so the process becomes nobody first."""
    shard = "model-00003-of-000011.safetensors"
    script = """if True:
        import os, sys
        from mlxmoe.cli import main
        os.chdir(sys.argv[1])
        sys.argv[1:] = ["plan", "."]
        for turn in range(2):
            try:
                main()
            except SystemExit as left:
                print(left.code, file=sys.stderr)
            # Whatever has to be imported is by now.
            if turn == 0:
                os.chmod("SHARD", 0)
                os.chmod(".", 0o755)
                if os.geteuid() == 0:
                    os.setgid(65534)
                    os.setuid(65534)
    """.replace("SHARD", shard)
    for file in (goldens / "tiny-k31").iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())

    done = python(script, str(tmp_path))

    assert 3 == done.stderr.count("\n"), done.stderr
    good, error, bad = done.stderr.splitlines()
    assert ("0", "1", 0) == (good, bad, done.returncode)
    assert re.fullmatch(rf"mlxmoe: {shard}: .*Permission denied.*", error)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "hello", *GREEDY, "--no-think", "--max-tokens", "400"],
        ["run", "hello", *GREEDY, "--json", "--max-tokens", "4"],
        ["plan"],
    ],
)
def test_a_reader_that_goes_away_is_no_crash(model: str, arguments: list[str]) -> None:
    """`| head -c 1`: the process ends, without a traceback."""
    verb, *rest = arguments
    with running(verb, model, *rest) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.stdout.close()
        err = errors(process)
        code = process.wait(30)

    assert "Traceback" not in err
    assert "Error" not in err
    # What fits into the pipe is written before the reader is gone.
    assert code == 1 if "400" in arguments else code in (0, 1)


def test_a_full_disk_is_one_line(model: str) -> None:
    """What can't be written is an error, and nothing more at exit."""
    if not Path("/dev/full").exists():
        pytest.skip("SKIP: no /dev/full here")
    with Path("/dev/full").open("w") as full:
        command = [*COMMAND, "plan", model]
        done = subprocess.run(
            command, check=False, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )

    assert (1, "mlxmoe: [Errno 28] No space left on device\n") == (done.returncode, done.stderr)


@pytest.mark.parametrize(
    "bad", [{"sampling": Sampling(top_k=-1)}, {"thinking_cap": -1}], ids=["top_k", "thinking_cap"]
)
def test_a_bad_number_is_refused_before_the_load(bad: dict[str, Any]) -> None:
    """Nobody waits for a trunk to hear of a wrong option."""

    def open_model(on_progress: OnProgress) -> Opened:
        raise AssertionError("it was loaded")

    with pytest.raises(UsageError, match=r"is -1, expected 0"):
        run_request(Engine(open_model), Request((user("x"),), **bad), as_json=False)
