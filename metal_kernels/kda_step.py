"""Kimi Delta Attention, one token: gates, recurrence, norm and output gate in one go.

    q, k = q / |q| / sqrt(Dk), k / |k|;  g = lower_bound * sigmoid(exp(A_log) (f + dt_bias))
    S = S diag(exp g);  S += sigmoid(b) (v - S k) k^T;  o = S q
    out = RMSNorm(o) * norm_weight * sigmoid(gate)

Source: HF `modeling_kimi_linear.py`. The state is kept as [H, Dv, Dk] in float32.
"""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class KdaConstants:
    """Numbers of the config: the gate's bound, and the two eps (l2norm's is added to the
    sum of squares, the output norm's to their mean)."""

    lower_bound: float
    l2norm_eps: float
    norm_eps: float


@dataclass(frozen=True, slots=True)
class KdaToken:
    """One token's projections: q, k [H, Dk] and v [H, Dv] after convolution and silu, in
    float32; f [H, Dk] of the gate, b [H] of beta and gate [H, Dv] in any float dtype."""

    q: mx.array
    k: mx.array
    v: mx.array
    f: mx.array
    b: mx.array
    gate: mx.array


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """A_log [H], dt_bias [H*Dk] and the output norm's weight [Dv], all float32."""

    A_log: mx.array
    dt_bias: mx.array
    norm: mx.array


def reference(
    token: KdaToken, weights: KdaWeights, state: mx.array, constants: KdaConstants
) -> tuple[mx.array, mx.array]:
    """state: float32 [H, Dv, Dk] -> out [H, Dv] in the dtype of `gate`, the state after."""
    q, k = normalize(token.q, token.k, constants.l2norm_eps)
    g = log_decay(token.f, weights, constants.lower_bound)
    state = state * mx.exp(g)[:, None, :]
    beta = mx.sigmoid(token.b.astype(mx.float32))
    fresh = beta[:, None] * (token.v - (state @ k[..., None]).squeeze(-1))
    state = state + fresh[..., None] * k[:, None, :]
    out = (state @ q[..., None]).squeeze(-1)
    return gated_norm(out, token.gate, weights, constants.norm_eps), state


def normalize(q: mx.array, k: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """[..., Dk] each, divided by their lengths, q by sqrt(Dk) too."""
    width = q.shape[-1]
    # rms_norm adds its eps to the mean of the squares.
    q, k = (mx.fast.rms_norm(x, None, eps / width) for x in (q, k))
    return q / width, k * width**-0.5


def log_decay(f: mx.array, weights: KdaWeights, lower_bound: float) -> mx.array:
    """f: [..., H, Dk] -> log decay of each key channel, float32, in (lower_bound, 0)."""
    heads, width = f.shape[-2:]
    z = f.astype(mx.float32) + weights.dt_bias.reshape(heads, width)
    return lower_bound * mx.sigmoid(mx.exp(weights.A_log)[:, None] * z)


def gated_norm(out: mx.array, gate: mx.array, weights: KdaWeights, eps: float) -> mx.array:
    """RMSNorm of `out` [..., H, Dv] times the sigmoid of `gate`, in the dtype of `gate`."""
    normed = mx.fast.rms_norm(out, weights.norm, eps)
    return (normed * mx.sigmoid(gate.astype(mx.float32))).astype(gate.dtype)
