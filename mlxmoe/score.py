"""How likely a network finds given tokens: perplexity, and logits for comparisons."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxmoe.errors import PromptError
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
        """exp of the mean loss."""
        return math.exp(self.loss_sum / self.scored) if self.scored else math.nan


def score(
    network: Network[Any],
    ids: Sequence[int],
    span: int,
    on_tokens: Callable[[float], None] = lambda done: None,
    on_logits: Callable[[mx.array], None] | None = None,
) -> Score:
    """Score `ids` from an empty state; the first id is given, not scored.

    `on_logits` gets float32 rows [n, V] in order, one for each id. Raises PromptError
    when there are no ids.
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
    return Score(len(ids), len(ids) - 1, loss)


def _loss(logits: mx.array, following: Sequence[int]) -> float:
    """Sum of -log softmax(logits)[following]."""
    if not following:
        return 0.0
    chosen = mx.take_along_axis(logits, mx.array(list(following))[:, None], axis=-1).squeeze(-1)
    loss = (mx.logsumexp(logits, axis=-1) - chosen).sum().item()
    assert isinstance(loss, float)
    return loss
