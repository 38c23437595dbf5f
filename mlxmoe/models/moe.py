"""The feed-forward halves of a layer: a dense SiTU MLP, and the stable latent MoE.

    r = sigmoid(W x) in float32; the top K of r + bias are picked; w = r / (sum r + 1e-20)
    out = up_proj(RMSNorm(sum_e w_e * expert_e(down_proj x))) + shared_experts(x)

Source: HF `modeling_kimi_linear.py`. The experts are a plain `SwitchGLU` here; the
loader swaps it for one that streams.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.kimi_k3 import SiTU
from mlx_lm.models.switch_layers import SwitchGLU

from metal_kernels.kernels import Kernels
from mlxmoe.config import KimiConfig


def situ(config: KimiConfig) -> SiTU:
    """The gated activation: beta tanh(g / beta) sigmoid(g) * lambda tanh(u / lambda)."""
    return SiTU(config.activation_situ_beta, config.activation_situ_linear_beta)


class MLP(nn.Module):
    """Gate, up and down projections with SiTU between."""

    def __init__(self, config: KimiConfig, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.activation = situ(config)

    def __call__(self, x: mx.array) -> mx.array:
        """x: [T, D] -> [T, D]."""
        return self.down_proj(self.activation(self.up_proj(x), self.gate_proj(x)))


class Router(nn.Module):
    """Picks K experts a token. `weight` [E, D] and the bias [E] are float32."""

    def __init__(self, config: KimiConfig, kernels: Kernels):
        super().__init__()
        self.kernels = kernels
        self.top_k = config.num_experts_per_token
        # As in mlx-lm: a single pick keeps its own score.
        self.renormalize = config.moe_renormalize and config.num_experts_per_token > 1
        self.scaling = config.routed_scaling_factor
        self.weight = mx.zeros((config.num_experts, config.hidden_size))
        self.e_score_correction_bias = mx.zeros((config.num_experts,))

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x: [T, D] -> expert ids int32 [T, K] ascending, their weights float32 [T, K]."""
        scores = mx.sigmoid(x.astype(mx.float32) @ self.weight.T)
        ids = self.kernels.dsa_topk(scores + self.e_score_correction_bias, self.top_k)
        weights = mx.take_along_axis(scores, ids, axis=-1)
        if self.renormalize:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return ids, weights * self.scaling


class RoutedExperts(SwitchGLU):
    """All routed experts of a layer, in memory."""

    def weighted_sum(
        self, x: mx.array, ids: mx.array, weights: mx.array, meanwhile: Sequence[mx.array] = ()
    ) -> mx.array:
        """sum_k weights_k * expert_ids_k(x), float32 [T, D'].

        x: [T, D'], ids: [T, K], weights: float32 [T, K]. `meanwhile` is work that a
        streaming layer may start while it reads; here it stays lazy.
        """
        return (self(x, ids).astype(mx.float32) * weights[..., None]).sum(axis=-2)


class LatentMoE(nn.Module):
    """Experts in a narrower latent space beside shared experts in the full one."""

    def __init__(self, config: KimiConfig, kernels: Kernels):
        super().__init__()
        c, latent = config, config.routed_expert_hidden_size
        self.gate = Router(c, kernels)
        self.routed_expert_down_proj = nn.Linear(c.hidden_size, latent, bias=False)
        self.routed_expert_up_proj = nn.Linear(latent, c.hidden_size, bias=False)
        self.routed_expert_norm = nn.RMSNorm(latent, eps=c.rms_norm_eps)
        self.experts: Any = RoutedExperts(
            latent, c.moe_intermediate_size, c.num_experts, activation=situ(c)
        )
        self.shared_experts = MLP(c, c.moe_intermediate_size * c.num_shared_experts)

    def __call__(self, chunks: Sequence[mx.array]) -> list[mx.array]:
        """The chunks of a span, each [T, D] -> the same shapes.

        All chunks meet the experts together, so that a span reads each expert once.
        """
        latents, ids, weights, shared = [], [], [], []
        for x in chunks:
            picks = self.gate(x)
            latents.append(self.routed_expert_down_proj(x))
            ids.append(picks[0])
            weights.append(picks[1])
            shared.append(self.shared_experts(x))
            if len(chunks) > 1:
                mx.eval(latents[-1], *picks, shared[-1])
        summed = self.experts.weighted_sum(
            mx.concatenate(latents), mx.concatenate(ids), mx.concatenate(weights), shared
        )
        outs, start = [], 0
        for latent, beside in zip(latents, shared, strict=True):
            part = summed[start : start + latent.shape[0]].astype(latent.dtype)
            outs.append(self.routed_expert_up_proj(self.routed_expert_norm(part)) + beside)
            start += latent.shape[0]
        return outs
