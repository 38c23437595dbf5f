"""How likely a network finds given tokens: perplexity, and logits for comparisons."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxmoe.errors import CheckpointError, PromptError
from mlxmoe.models.state import Network

# Tokens whose logits are held at once.
HEAD_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Score:
    """The sum of -log p(token | those before) over `scored` tokens, in nats."""

    tokens: int
    scored: int
    loss_sum: float

    @property
    def perplexity(self) -> float:
        """exp of the mean loss, a float64's largest at most."""
        if not self.scored:
            return math.nan
        return math.exp(min(self.loss_sum / self.scored, math.log(sys.float_info.max)))


def score(
    network: Network[Any],
    ids: Sequence[int],
    span: int,
    on_tokens: Callable[[float], None] = lambda done: None,
    on_logits: Callable[[mx.array], None] | None = None,
) -> Score:
    """Score `ids` from an empty state; the first id is given, not scored.

    `on_logits` gets float32 rows [n, V] in order, one for each id. Raises PromptError
    when there are no ids, CheckpointError when the logits are no numbers.
    """
    if not ids:
        raise PromptError("nothing to score: the text has no tokens")
    state = network.make_state()
    loss = 0.0
    for start in range(0, len(ids), span):
        part = ids[start : start + span]

        def on_layer(done: int, of: int, start: int = start, size: int = len(part)) -> None:
            on_tokens(start + size * done / of)

        hidden = network.hidden(mx.array(list(part)), state, (), on_layer)
        mx.eval(hidden, *state.arrays())
        for at in range(0, len(part), HEAD_TOKENS):
            logits = network.logits(hidden[at : at + HEAD_TOKENS]).astype(mx.float32)
            following = ids[start + at + 1 : start + at + 1 + logits.shape[0]]
            loss += _loss(logits[: len(following)], following)
            if on_logits:
                on_logits(logits)
    if not math.isfinite(loss):
        raise CheckpointError(
            "the model's logits are not finite numbers, so weights are damaged. "
            "Fetch the checkpoint again"
        )
    return Score(len(ids), len(ids) - 1, loss)


@contextmanager
def logits_file(path: Path, tokens: int) -> Iterator[Callable[[mx.array], None]]:
    """A safetensors file of float32 `logits` [tokens, V], written as its rows come, so that
    memory holds no more of them than a block. Gone again when that fails. Raises OSError.
    """
    begun = False
    try:
        with path.open("wb") as file:

            def write(rows: mx.array) -> None:
                nonlocal begun
                if not begun:
                    file.write(_header((tokens, rows.shape[1])))
                    begun = True
                file.write(np.array(rows).data)

            yield write
    except BaseException:
        if path.is_file():
            path.unlink()
        raise


def _header(shape: tuple[int, int]) -> bytes:
    """The beginning of a safetensors file: its header's length and JSON, padded to 8 bytes."""
    place = {"dtype": "F32", "shape": shape, "data_offsets": (0, 4 * shape[0] * shape[1])}
    text = json.dumps({"logits": place}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _loss(logits: mx.array, following: Sequence[int]) -> float:
    """Sum of -log softmax(logits)[following]."""
    if not following:
        return 0.0
    chosen = mx.take_along_axis(logits, mx.array(list(following))[:, None], axis=-1).squeeze(-1)
    loss = (mx.logsumexp(logits, axis=-1) - chosen).sum().item()
    assert isinstance(loss, float)
    return loss
