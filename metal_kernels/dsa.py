"""DSA: the lightning indexer's scores, and attention over selected rows only."""

import mlx.core as mx


def dsa_scores(q: mx.array, k: mx.array, w: mx.array, first_position: int) -> mx.array:
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


def sparse_mla(q: mx.array, latent: mx.array, rows: mx.array, rank: int, scale: float) -> mx.array:
    """Absorbed MLA attention of each query over its own selected cache rows.

    q: [T, H, R+P] (nope part already multiplied by W_uk), latent: [S, R+P],
    rows: int32 [T, k] with -1 for unused -> [T, H, R] in q's dtype, R = `rank`.
    """
    keys = latent[mx.maximum(rows, 0)]
    scores = (q @ keys.swapaxes(-1, -2)).astype(mx.float32) * scale
    scores = mx.where((rows >= 0)[:, None, :], scores, -mx.inf)
    weights = mx.softmax(scores, axis=-1, precise=True).astype(q.dtype)
    return weights @ keys[..., :rank]
