"""Kimi Delta Attention with a lower-bounded gate and a full-rank output gate.

    q, k, v = silu(causal_conv4(W x)); q, k normalised per head
    g = lower_bound * sigmoid(exp(A_log) * (f_b(f_a x) + dt_bias)); beta = sigmoid(b_proj x)
    y = o_proj(RMSNorm(kda(q, k, v, g, beta)) * sigmoid(g_proj x))

Source: HF `modeling_kimi_linear.py`. Convolution, gates, norm and state are float32;
the stream and the convolution's kept inputs have the stream's dtype.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import gated_delta_kernel, gated_delta_ops, normalize_qk

from metal_kernels.kda import kda_chunk
from mlxmoe.config import KimiConfig


@dataclass(slots=True)
class KdaState:
    """What a KDA layer carries on: it can be replaced or kept whole, never trimmed.

    conv: the last three inputs of the convolution, [3, 3*H*Dk], oldest first;
    recurrent: [H, Dv, Dk] float32. Both None before the first token.
    """

    conv: mx.array | None = None
    recurrent: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate before anything that reads them later."""
        return [array for array in (self.conv, self.recurrent) if array is not None]


def kda_step(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """One token through mlx-lm's gated delta rule. q, k: [1, H, Dk] normalised (q scaled),
    v: [1, H, Dv], g: [1, H, Dk] log decay, beta: [1, H], state: [H, Dv, Dk], all float32
    -> o [1, H, Dv], state."""
    run = gated_delta_kernel if _has_kernel(q.shape[-1]) else gated_delta_ops
    out, after = run(q[None], k[None], v[None], mx.exp(g)[None], beta[None], state[None])
    return out[0], after[0]


def _has_kernel(head_dim: int) -> bool:
    return mx.metal.is_available() and head_dim % 32 == 0


class ShortConv(nn.Module):
    """Weight of a causal depthwise convolution, [C, 1, taps] as in the checkpoint."""

    def __init__(self, channels: int, taps: int):
        super().__init__()
        self.weight = mx.zeros((channels, 1, taps))


class KimiDeltaAttention(nn.Module):
    """Attention of a KDA layer."""

    def __init__(self, config: KimiConfig):
        super().__init__()
        c = config
        self.heads, self.head_dim = c.kda.num_heads, c.kda.head_dim
        self.taps, self.lower_bound = c.kda.short_conv_kernel_size, c.kda.gate_lower_bound
        self.l2norm_eps = c.l2norm_eps
        width = self.heads * self.head_dim
        self.q_proj = nn.Linear(c.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, width, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, width, bias=False)
        self.q_conv1d = ShortConv(width, self.taps)
        self.k_conv1d = ShortConv(width, self.taps)
        self.v_conv1d = ShortConv(width, self.taps)
        self.f_a_proj = nn.Linear(c.hidden_size, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, width, bias=False)
        self.b_proj = nn.Linear(c.hidden_size, self.heads, bias=False)
        self.g_proj = nn.Linear(c.hidden_size, width, bias=False)
        self.A_log = mx.zeros((self.heads,))
        self.dt_bias = mx.zeros((width,))
        self.o_norm = nn.RMSNorm(self.head_dim, eps=c.rms_norm_eps)
        self.o_proj = nn.Linear(width, c.hidden_size, bias=False)

    def __call__(self, x: mx.array, cache: KdaState) -> mx.array:
        """x: [T, D], the tokens after those in `cache` -> [T, D]."""
        q, k, v = (part.reshape(-1, self.heads, self.head_dim) for part in self._qkv(x, cache))
        q, k = normalize_qk(q, k, inv_scale=self.head_dim**-0.5, eps=self.l2norm_eps)
        if cache.recurrent is None:
            cache.recurrent = mx.zeros((self.heads, self.head_dim, self.head_dim))
        run = kda_step if x.shape[0] == 1 else kda_chunk
        beta = mx.sigmoid(self.b_proj(x).astype(mx.float32))
        out, cache.recurrent = run(q, k, v, self._gate(x), beta, cache.recurrent)
        gate = mx.sigmoid(self.g_proj(x).astype(mx.float32))
        normed = self.o_norm(out).reshape(x.shape[0], -1) * gate
        return self.o_proj(normed.astype(x.dtype))

    def _qkv(self, x: mx.array, cache: KdaState) -> list[mx.array]:
        """silu of the three causal convolutions, float32 [T, H*Dk] each."""
        fresh = mx.concatenate([self.q_proj(x), self.k_proj(x), self.v_proj(x)], axis=-1)
        if cache.conv is None:
            cache.conv = mx.zeros((self.taps - 1, fresh.shape[1]), fresh.dtype)
        inputs = mx.concatenate([cache.conv, fresh])
        cache.conv = mx.contiguous(inputs[-(self.taps - 1) :])
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        weight = mx.concatenate([conv.weight.squeeze(1) for conv in convs]).T
        mixed = sum(
            (weight[tap] * inputs[tap : tap + x.shape[0]] for tap in range(1, self.taps)),
            weight[0] * inputs[: x.shape[0]],
        )
        return list(mx.split(nn.silu(mixed), 3, axis=-1))

    def _gate(self, x: mx.array) -> mx.array:
        """Log decay per key channel, float32 [T, H, Dk], in (lower_bound, 0)."""
        z = self.f_b_proj(self.f_a_proj(x)).astype(mx.float32) + self.dt_bias
        rate = mx.exp(self.A_log)[:, None]
        return self.lower_bound * mx.sigmoid(rate * z.reshape(-1, self.heads, self.head_dim))
