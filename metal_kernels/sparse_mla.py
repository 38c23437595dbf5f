"""Absorbed MLA attention over the rows that DSA selected."""

import mlx.core as mx


def reference(q: mx.array, latent: mx.array, rows: mx.array, rank: int, scale: float) -> mx.array:
    """Absorbed MLA attention of each query over its own selected cache rows.

    q: [T, H, R+P] (nope part already multiplied by W_uk), latent: [S, R+P],
    rows: int32 [T, k] with -1 for unused -> [T, H, R] in q's dtype, R = `rank`.
    """
    keys = latent[mx.maximum(rows, 0)]
    scores = (q @ keys.swapaxes(-1, -2)).astype(mx.float32) * scale
    scores = mx.where((rows >= 0)[:, None, :], scores, -mx.inf)
    weights = mx.softmax(scores, axis=-1, precise=True).astype(q.dtype)
    return weights @ keys[..., :rank]
