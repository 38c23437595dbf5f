"""Perplexity and logits against the golden ones, in float64."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from mlxmoe import score as scoring
from mlxmoe.checkpoint import open_checkpoint
from mlxmoe.errors import CheckpointError, PromptError
from mlxmoe.loader import Loaded
from mlxmoe.score import Score, logits_file, score
from networks import load_arrays, streamed
from scripted import ScriptedNetwork

TOKENS = 40
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def golden(goldens: Path) -> dict[str, npt.NDArray[np.float64]]:
    """The prompt and the float64 logits of tiny-k3."""
    arrays = load_arrays(goldens / "tiny-k3/goldens/main.safetensors")
    return {name: np.array(arrays[name], np.float64) for name in ("input_ids", "logits_f64")}


@pytest.fixture(scope="module")
def ids(golden: dict[str, npt.NDArray[np.float64]]) -> list[int]:
    """The first ids of the prompt."""
    return [int(id) for id in golden["input_ids"][:TOKENS]]


@pytest.fixture(scope="module")
def loaded(goldens: Path) -> Iterator[Loaded]:
    """tiny-k3 with a quarter of its experts in slots."""
    made = streamed(open_checkpoint(goldens / "tiny-k3"), 28)
    yield made
    made.close()


def oracle(logits: npt.NDArray[np.float64], ids: list[int]) -> float:
    """Sum of -log p(next id), in float64."""
    rows = logits[: len(ids) - 1]
    highest = rows.max(axis=1)
    lse = np.log(np.exp(rows - highest[:, None]).sum(axis=1)) + highest
    return float((lse - rows[np.arange(len(rows)), ids[1:]]).sum())


@pytest.mark.parametrize("span", [1, 7, 16, TOKENS - 1, TOKENS, 1000])
@pytest.mark.parametrize("head", [256, 3])
def test_loss_is_that_of_the_golden_logits(
    loaded: Loaded,
    golden: dict[str, npt.NDArray[np.float64]],
    ids: list[int],
    span: int,
    head: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the span, and however many tokens go through the head together."""
    monkeypatch.setattr(scoring, "HEAD_TOKENS", head)
    expected = oracle(golden["logits_f64"], ids)

    result = score(loaded.network, ids, span)

    assert (TOKENS, TOKENS - 1) == (result.tokens, result.scored)
    assert abs(expected - result.loss_sum) < TOLERANCE * TOKENS
    assert math.isclose(math.exp(expected / (TOKENS - 1)), result.perplexity, rel_tol=2e-4)


def test_logits_file_holds_the_golden_logits(
    loaded: Loaded, golden: dict[str, npt.NDArray[np.float64]], ids: list[int], tmp_path: Path
) -> None:
    """float32 [T, V] under the name `logits`, as safetensors and mlx read it."""
    path = tmp_path / "out.bin"
    with logits_file(path, len(ids)) as keep:
        score(loaded.network, ids, 16, on_logits=keep)

    ((name, logits),) = load_file(path).items()
    assert ("logits", (TOKENS, 1600), "float32") == (name, logits.shape, str(logits.dtype))
    np.testing.assert_allclose(golden["logits_f64"][:TOKENS], logits, atol=TOLERANCE)
    assert np.array_equal(
        logits, np.array(load_arrays(path.rename(tmp_path / "x.safetensors"))[name])
    )


@pytest.mark.parametrize("tokens", [1, 9, 10, 100])
def test_logits_begin_at_a_multiple_of_8_bytes(tmp_path: Path, tokens: int) -> None:
    """As safetensors asks, whatever the header's numbers are."""
    path = tmp_path / "out.safetensors"
    rows = np.arange(tokens * 3, dtype=np.float32).reshape(tokens, 3)
    with logits_file(path, tokens) as keep:
        keep(mx.array(rows))

    assert 0 == int.from_bytes(path.read_bytes()[:8], "little") % 8
    assert np.array_equal(rows, load_file(path)["logits"])


def break_off(path: Path) -> None:
    """Write half of the rows, then fail."""
    with logits_file(path, 4) as keep:
        keep(mx.zeros((2, 8)))
        raise TimeoutError


def test_a_logits_file_that_fails_is_gone(tmp_path: Path) -> None:
    """Half of a file is no file; what is no plain file is left alone."""
    path = tmp_path / "out.safetensors"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    for place in (path, pipe):
        with pytest.raises(TimeoutError):
            break_off(place)
    os.close(reader)

    assert (False, True) == (path.exists(), pipe.exists())


def test_one_token_scores_nothing(loaded: Loaded, tmp_path: Path) -> None:
    """There is nothing before it; its logits are there all the same."""
    rows: list[mx.array] = []

    result = score(loaded.network, [5], 16, on_logits=rows.append)

    assert Score(1, 0, 0.0) == result
    assert math.isnan(result.perplexity)
    assert [(1, 1600)] == [row.shape for row in rows]


def test_no_tokens_are_refused(loaded: Loaded) -> None:
    """One clear error."""
    with pytest.raises(PromptError, match="nothing to score: the text has no tokens"):
        score(loaded.network, [], 16)


class NanNetwork(ScriptedNetwork):
    """A network of damaged weights."""

    def logits(self, hidden: mx.array) -> mx.array:
        """NaN throughout."""
        return super().logits(hidden) * mx.nan


def test_a_loss_that_is_no_number_is_an_error() -> None:
    """NaN is damage, not a perplexity; a perplexity past float64 stays a number."""
    with pytest.raises(CheckpointError, match="not finite numbers, so weights are damaged"):
        score(NanNetwork(8, lambda timeline: 1), [1, 2, 3], 16)
    assert math.isfinite(Score(3, 2, 1e9).perplexity)


def test_progress_reaches_the_end(loaded: Loaded, ids: list[int]) -> None:
    """Tokens done rise to all of them, over the layers of each span."""
    heard: list[float] = []

    score(loaded.network, ids, 16, heard.append)

    assert sorted(heard) == heard
    assert (TOKENS, 3 * 8) == (heard[-1], len(heard))
