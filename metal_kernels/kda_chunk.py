"""Kimi Delta Attention in its chunkwise form, for prefill.

Recurrence (model of K3, KDA): S = diag(exp g) S; S += beta k (v - S^T k)^T; o = S^T q.
The state is kept as [H, Dv, Dk] in float32, like mlx-lm's kernels keep it.
"""

import mlx.core as mx

HALF = 16
CHUNK = 2 * HALF
# Half of a half's decay, exp(8 * 10), stays below float32's largest value.
LOWEST_GATE = -10.0


def reference(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Any number of tokens, in chunks of 32 (fla `naive_chunk_kda`, restated).

    q, k: [T, H, Dk] normalised (q scaled), v: [T, H, Dv], g: [T, H, Dk] log decay,
    beta: [T, H], state: [H, Dv, Dk] -> o [T, H, Dv], state; all float32.
    Needs `LOWEST_GATE` <= g <= 0: decays are formed as differences inside halves of
    16 tokens, centred, and from the border between halves, so that exp never overflows.
    """
    tokens = q.shape[0]
    q, k, v, g = (_chunked(x, tokens) for x in (q, k, v, g))
    beta = _chunked(beta[..., None], tokens)
    total = mx.cumsum(g, axis=2)
    near, cross = _pair_weights(mx.stack([q, k]), k, g, total)
    attend = _lower(near[0], cross[0])
    inverse = _unit_inverse(
        near[1] * _halves(beta) * mx.tril(mx.ones((HALF, HALF)), -1),
        cross[1] * beta[:, :, HALF:],
    )
    decayed = mx.exp(total)
    u = inverse @ (beta * v)
    w = inverse @ (beta * decayed * k)
    q_in = q * decayed
    k_out = k * mx.exp(total[:, :, -1:] - total)
    last = decayed[:, :, -1:]
    outs = []
    for n in range(q.shape[1]):
        fresh = u[:, n] - w[:, n] @ state.swapaxes(-1, -2)
        outs.append(q_in[:, n] @ state.swapaxes(-1, -2) + attend[:, n] @ fresh)
        state = state * last[:, n] + fresh.swapaxes(-1, -2) @ k_out[:, n]
    out = mx.concatenate(outs, axis=1)[:, :tokens]
    return out.swapaxes(0, 1), state


def _chunked(x: mx.array, tokens: int) -> mx.array:
    """[T, H, D] -> [H, N, CHUNK, D]; padding of zeros leaves the state as it is."""
    padded = mx.pad(x, [(0, -tokens % CHUNK), (0, 0), (0, 0)])
    return padded.swapaxes(0, 1).reshape(x.shape[1], -1, CHUNK, x.shape[2])


def _halves(x: mx.array) -> mx.array:
    """[..., CHUNK, D] -> [..., 2, HALF, D]."""
    return x.reshape(*x.shape[:-2], 2, HALF, x.shape[-1])


def _pair_weights(
    left: mx.array, k: mx.array, g: mx.array, total: mx.array
) -> tuple[mx.array, mx.array]:
    """sum_d left_i k_j exp(G_i - G_j) for j <= i, each chunk cut in two halves.

    left: [2, H, N, C, D] -> inside the halves [2, H, N, 2, HALF, HALF] (lower
    triangle), and second half against first [2, H, N, HALF, HALF].
    """
    inner = mx.cumsum(_halves(g), axis=-2)
    centred = inner - inner[..., HALF // 2 - 1 : HALF // 2, :]
    rows = _halves(left) * mx.exp(centred)
    columns = _halves(k) * mx.exp(-centred)
    lower = mx.tril(mx.ones((HALF, HALF), mx.bool_))
    near = mx.where(lower, rows @ columns.swapaxes(-1, -2), 0.0)
    border = total[:, :, HALF - 1 : HALF]
    late = left[..., HALF:, :] * mx.exp(total[:, :, HALF:] - border)
    early = k[:, :, :HALF] * mx.exp(border - total[:, :, :HALF])
    return near, late @ early.swapaxes(-1, -2)


def _lower(near: mx.array, cross: mx.array) -> mx.array:
    """The chunk's [C, C] lower triangle from its halves' and their cross block."""
    top = mx.concatenate([near[:, :, 0], mx.zeros_like(cross)], axis=-1)
    return mx.concatenate([top, mx.concatenate([cross, near[:, :, 1]], axis=-1)], axis=-2)


def _unit_inverse(near: mx.array, cross: mx.array) -> mx.array:
    """(I + A)^-1 for strictly lower A, by blocks of doubling size.

    Blockwise substitution is as stable as the row by row one; the product of
    powers of A cancels badly when keys repeat.
    """
    inverse = mx.ones((*near.shape[:-2], HALF, 1, 1))
    size = 1
    while size < HALF:
        blocks = near.reshape(*near.shape[:-2], HALF // size // 2, 2 * size, -1, 2 * size)
        diagonal = mx.moveaxis(mx.diagonal(blocks, 0, -4, -2), -1, -3)
        inverse = _join(inverse[..., 0::2, :, :], inverse[..., 1::2, :, :],
                        diagonal[..., size:, :size])  # fmt: skip
        size *= 2
    whole = inverse.squeeze(-3)
    return _join(whole[:, :, 0], whole[:, :, 1], cross)


def _join(first: mx.array, second: mx.array, below: mx.array) -> mx.array:
    """The inverse of [[F, 0], [B, S]] from F^-1, S^-1 and B."""
    corner = -(second @ below @ first)
    top = mx.concatenate([first, mx.zeros_like(corner)], axis=-1)
    return mx.concatenate([top, mx.concatenate([corner, second], axis=-1)], axis=-2)
