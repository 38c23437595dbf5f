"""Dense MLP and latent mixture of experts, in torch."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from train_demo.layers import Weight, mxfp4_round, product, rms_norm, situ

BETA, LINEAR_BETA = 4.0, 25.0


class Mlp(nn.Module):
    """SiTU MLP."""

    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj = Weight(inner, hidden)
        self.up_proj = Weight(inner, hidden)
        self.down_proj = Weight(hidden, inner, std=0.3 * inner**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        both = product(x, torch.cat([self.gate_proj.weight, self.up_proj.weight]))
        return self.down_proj(situ(both, BETA, LINEAR_BETA))


class Gate(nn.Module):
    """The router's weight [E, D], and the bias [E] that only selects."""

    def __init__(self, experts: int, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, hidden) * hidden**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))


class Moe(nn.Module):
    """Latent MoE; `rounded` computes with experts as MXFP4 would give them back.

    `w13` [E, 2I, L] holds gate over up, `w2` [E, L, I] the down maps; the export parts them.
    """

    rounded = False

    def __init__(self, config: dict[str, Any], eps: float):
        super().__init__()
        hidden, experts = config["hidden_size"], config["num_experts"]
        latent, inner = config["routed_expert_hidden_size"], config["moe_intermediate_size"]
        self.experts, self.top_k, self.eps = experts, config["num_experts_per_token"], eps
        self.gate = Gate(experts, hidden)
        self.w13 = nn.Parameter(torch.randn(experts, 2 * inner, latent) * latent**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, latent, inner) * inner**-0.5)
        self.routed_expert_down_proj = Weight(latent, hidden)
        self.routed_expert_up_proj = Weight(hidden, latent, std=0.3 * latent**-0.5)
        self.routed_expert_norm = Weight(latent, value=1.0)
        self.shared_experts = Mlp(hidden, inner * config["num_shared_experts"])
        self.load = torch.zeros(experts)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        flat = x.reshape(-1, x.shape[-1])
        scores = torch.sigmoid(functional.linear(flat, self.gate.weight))
        picked = (scores.detach() + self.gate.e_score_correction_bias).topk(self.top_k, -1).indices
        weights = scores.gather(-1, picked)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        latent = self.routed_expert_down_proj(flat)
        routed = self._experts(latent, picked, weights)
        routed = rms_norm(routed, self.routed_expert_norm.weight, self.eps)
        return (self.routed_expert_up_proj(routed) + self.shared_experts(flat)).view(x.shape)

    def _experts(self, latent: Tensor, picked: Tensor, weights: Tensor) -> Tensor:
        """Tokens sorted by expert, one product an expert."""
        flat = picked.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.experts)
        self.load += counts
        token = order // self.top_k
        rows, shares = latent[token], weights.flatten()[order].unsqueeze(-1)
        w13, w2 = self.w13, self.w2
        if Moe.rounded:
            w13, w2 = mxfp4_round(w13), mxfp4_round(w2)
        sizes = counts.tolist()
        outs = []
        for part, first, second in zip(rows.split(sizes), w13.unbind(), w2.unbind(), strict=True):
            # In float32: oneDNN compiles a bfloat16 product anew for each number of rows.
            inner = situ(functional.linear(part, first), BETA, LINEAR_BETA)
            outs.append(functional.linear(inner, second))
        return torch.zeros_like(latent).index_add(0, token, torch.cat(outs) * shares)
