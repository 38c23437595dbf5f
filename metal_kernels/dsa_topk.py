"""Exact top-k with a fixed rule for ties: the lower index wins."""

import mlx.core as mx


def reference(scores: mx.array, k: int) -> mx.array:
    """The positions of the k largest scores of each row, ascending.

    scores: [..., N] -> int32 [..., k]. Of equal scores the lower index wins. A
    score of -inf is masked and never picked: unused places hold -1, at the end.
    Raises ValueError when k is not in 1..N.
    """
    n = scores.shape[-1]
    if not 1 <= k <= n:
        raise ValueError(f"top-k of {k} from {n} scores: expected 1 <= k <= {n}")
    threshold = mx.partition(scores, n - k, axis=-1)[..., n - k : n - k + 1]
    above = scores > threshold
    level = (scores == threshold) & (scores > -mx.inf)
    room = k - above.sum(axis=-1, keepdims=True)
    picked = above | (level & (mx.cumsum(level.astype(mx.int32), axis=-1) <= room))
    positions = mx.where(picked, mx.arange(n, dtype=mx.int32), n)
    ascending = mx.sort(positions, axis=-1)[..., :k]
    return mx.where(ascending < n, ascending, -1)
