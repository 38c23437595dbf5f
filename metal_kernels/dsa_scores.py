"""DSA: the lightning indexer's scores of queries against cached index keys."""

import mlx.core as mx


def reference(q: mx.array, k: mx.array, w: mx.array, first_position: int) -> mx.array:
    """Index scores of a chunk of queries against every cached key.

    I_ts = sum_h w_th * relu(q_th . k_s), float32 (DeepSeek-V3.2; model of K3.1).
    q: [T, H, d], k: [S, d], w: [T, H] -> [T, S]. Query t stands at position
    `first_position + t`; keys after it are masked with -inf.
    """
    tokens, heads, width = q.shape
    dots = q.astype(mx.float32).reshape(tokens * heads, width) @ k.astype(mx.float32).T
    relu = mx.maximum(dots, 0.0).reshape(tokens, heads, -1)
    scores = (w.astype(mx.float32)[:, None, :] @ relu).squeeze(1)
    position = mx.arange(first_position, first_position + tokens)[:, None]
    return mx.where(mx.arange(k.shape[0]) <= position, scores, -mx.inf)
