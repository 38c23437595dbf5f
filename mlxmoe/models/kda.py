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

from metal_kernels.kda_step import (
    KdaConstants,
    KdaToken,
    KdaWeights,
    gated_norm,
    log_decay,
    normalize,
)
from metal_kernels.kernels import Kernels
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


class ShortConv(nn.Module):
    """Weight of a causal depthwise convolution, [C, 1, taps] as in the checkpoint."""

    def __init__(self, channels: int, taps: int):
        super().__init__()
        self.weight = mx.zeros((channels, 1, taps))


class KimiDeltaAttention(nn.Module):
    """Attention of a KDA layer."""

    def __init__(self, config: KimiConfig, kernels: Kernels):
        super().__init__()
        c = config
        self.kernels = kernels
        self.heads, self.head_dim = c.kda.num_heads, c.kda.head_dim
        self.taps = c.kda.short_conv_kernel_size
        self.constants = KdaConstants(c.kda.gate_lower_bound, c.l2norm_eps, c.rms_norm_eps)
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
        q, k, v = self._qkv(x, cache)
        f, gate = self._by_head(self.f_b_proj(self.f_a_proj(x))), self._by_head(self.g_proj(x))
        b, constants = self.b_proj(x), self.constants
        weights = KdaWeights(self.A_log, self.dt_bias, self.o_norm.weight)
        state = cache.recurrent
        if state is None:
            state = mx.zeros((self.heads, self.head_dim, self.head_dim))
        if x.shape[0] == 1:
            token = KdaToken(q[0], k[0], v[0], f[0], b[0], gate[0])
            out, cache.recurrent = self.kernels.kda_step(token, weights, state, constants)
        else:
            q, k = normalize(q, k, constants.l2norm_eps)
            g = log_decay(f, weights, constants.lower_bound)
            beta = mx.sigmoid(b.astype(mx.float32))
            mixed, cache.recurrent = self.kernels.kda_chunk(q, k, v, g, beta, state)
            out = gated_norm(mixed, gate, weights, constants.norm_eps)
        return self.o_proj(out.reshape(x.shape[0], -1))

    def _by_head(self, x: mx.array) -> mx.array:
        return x.reshape(-1, self.heads, self.head_dim)

    def _qkv(self, x: mx.array, cache: KdaState) -> list[mx.array]:
        """silu of the three causal convolutions, float32 [T, H, Dk] each."""
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
        return [self._by_head(part) for part in mx.split(nn.silu(mixed), 3, axis=-1)]
