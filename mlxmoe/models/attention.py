"""Causal attention over blocks of keys, so that no score matrix grows with the context."""

from collections.abc import Callable

import mlx.core as mx

# Elements of the largest temporary of one block: 256 MiB in float32.
BLOCK_ELEMENTS = 1 << 26

KeysOf = Callable[[slice], tuple[mx.array, mx.array]]


def causal_attention(
    q: mx.array, keys_of: KeysOf, total: int, first: int, scale: float, key_width: int = 1
) -> mx.array:
    """softmax(q k^T * scale) v with a running maximum (online softmax), float32 inside.

    q: [H, T, d], standing at positions `first`.. among `total` keys; `keys_of(rows)`
    gives k [H or 1, B, d] and v [H or 1, B, dv] of those rows -> [H, T, dv]. `key_width`:
    elements that `keys_of` makes for a row and head, which bound a block like scores do.
    """
    heads, tokens, _ = q.shape
    block = max(1, BLOCK_ELEMENTS // (heads * max(tokens, key_width)))
    running: tuple[mx.array, mx.array, mx.array] | None = None
    for start in range(0, total, block):
        rows = slice(start, min(start + block, total))
        k, v = keys_of(rows)
        scores = (q @ k.swapaxes(-1, -2)).astype(mx.float32) * scale
        if rows.stop - 1 > first:
            position = mx.arange(first, first + tokens)[:, None]
            scores = mx.where(mx.arange(rows.start, rows.stop) <= position, scores, -mx.inf)
        running = _joined(running, scores, v, q.dtype)
        if total > block:
            # Lazy blocks would all be held until the last one.
            mx.eval(running)
    assert running is not None, "attention over no keys"
    _, weight, mixed = running
    return (mixed / weight).astype(q.dtype)


def _joined(
    running: tuple[mx.array, mx.array, mx.array] | None,
    scores: mx.array,
    v: mx.array,
    dtype: mx.Dtype,
) -> tuple[mx.array, mx.array, mx.array]:
    """(maximum, sum of weights, weighted values) with one more block of keys."""
    peak = scores.max(axis=-1, keepdims=True)
    # Every query sees row 0, so the maximum is finite from the first block on.
    best = peak if running is None else mx.maximum(running[0], peak)
    weights = mx.exp(scores - best)
    weight = weights.sum(axis=-1, keepdims=True)
    mixed = (weights.astype(dtype) @ v).astype(mx.float32)
    if running is None:
        return best, weight, mixed
    fade = mx.exp(running[0] - best)
    return best, running[1] * fade + weight, running[2] * fade + mixed
