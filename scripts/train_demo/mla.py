"""Gated latent attention with a lightning indexer, in torch.

Dense until `Sparse.on`; then each query sees only the `topk` keys its indexer scores highest, as
in the runner. The indexer learns from the attention itself (KL divergence, as DeepSeek-V3.2).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from train_demo.layers import Weight, rms_norm

NORM_EPS = 1e-6
TEACH_QUERIES = 48


class Sparse:
    """How attention runs now: `on` selects keys, `teach` computes the indexer's loss."""

    on = False
    teach = False


@dataclass(frozen=True, slots=True)
class MlaState:
    """Keys [B, H, S, Dk], values [B, H, S, Dv] and index keys [B, S, Di] so far."""

    keys: Tensor
    values: Tensor
    index_keys: Tensor

    def expand(self, batch: int) -> "MlaState":
        """The state of one timeline as that of `batch` equal ones."""
        return MlaState(
            self.keys.expand(batch, -1, -1, -1),
            self.values.expand(batch, -1, -1, -1),
            self.index_keys.expand(batch, -1, -1),
        )

    def keep(self, rows: Tensor) -> "MlaState":
        """Only these timelines."""
        return MlaState(self.keys[rows], self.values[rows], self.index_keys[rows])


class Indexer(nn.Module):
    """I_ts = sum_h w_th relu(q_th . k_s): which keys matter to a query."""

    def __init__(self, hidden: int, q_rank: int, heads: int, dim: int, eps: float):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.wq_b = Weight(heads * dim, q_rank)
        self.wk = Weight(dim, hidden)
        self.weights_proj = Weight(heads, hidden)
        self.k_norm = nn.LayerNorm(dim, eps=eps)

    def keys(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, Di]."""
        found: Tensor = self.k_norm(functional.linear(x, self.wk.weight))
        return found

    def forward(self, x: Tensor, q_residual: Tensor, keys: Tensor) -> Tensor:
        """x [B, T, D], q_residual [B, T, R], keys [B, S, Di] -> scores [B, T, S]."""
        q = functional.linear(q_residual, self.wq_b.weight).unflatten(-1, (self.heads, self.dim))
        weights = functional.linear(x, self.weights_proj.weight) * (self.heads * self.dim) ** -0.5
        batch, tokens = q.shape[:2]
        dots = torch.relu(q.reshape(batch, -1, self.dim) @ keys.transpose(-1, -2))
        dots = dots.view(batch * tokens, self.heads, -1)
        return (weights.view(batch * tokens, 1, -1) @ dots).view(batch, tokens, -1)


class Mla(nn.Module):
    """One full-attention layer."""

    def __init__(self, config: dict[str, Any], eps: float):
        super().__init__()
        c = config
        hidden, q_rank = c["hidden_size"], c["q_lora_rank"]
        self.heads, self.nope, self.rope = (
            c["num_attention_heads"],
            c["qk_nope_head_dim"],
            c["qk_rope_head_dim"],
        )
        self.value, self.rank = c["v_head_dim"], c["kv_lora_rank"]
        self.topk = c["dsa_config"]["index_topk"]
        self.scale = (self.nope + self.rope) ** -0.5
        self.q_a_proj = Weight(q_rank, hidden)
        self.q_a_layernorm = Weight(q_rank, value=1.0)
        self.q_b_proj = Weight(self.heads * (self.nope + self.rope), q_rank)
        self.kv_a_proj_with_mqa = Weight(self.rank + self.rope, hidden)
        self.kv_a_layernorm = Weight(self.rank, value=1.0)
        self.kv_b_proj = Weight(self.heads * (self.nope + self.value), self.rank)
        self.g_proj = Weight(self.heads * self.value, hidden)
        width = self.heads * self.value
        self.o_proj = Weight(hidden, width, std=0.3 * width**-0.5)
        dsa = c["dsa_config"]
        self.indexer = Indexer(hidden, q_rank, dsa["index_n_heads"], dsa["index_head_dim"], eps)
        self.teaching = torch.zeros(())
        # How far each query's last chosen key is from the first that was not; for checks.
        self.gaps = torch.zeros(())

    def forward(self, x: Tensor, state: MlaState | None) -> tuple[Tensor, MlaState]:
        """x [B, T, D] after `state` -> [B, T, D] and the state after it."""
        q_residual = rms_norm(self.q_a_proj(x), self.q_a_layernorm.weight, NORM_EPS)
        q = self.q_b_proj(q_residual).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        latent, rope = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], -1)
        latent = rms_norm(latent, self.kv_a_layernorm.weight, NORM_EPS)
        kv = self.kv_b_proj(latent).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        shared = rope.unsqueeze(1).expand(-1, self.heads, -1, -1)
        keys = torch.cat([kv[..., : self.nope], shared], -1)
        values = kv[..., self.nope :]
        still = x.detach()
        index_keys = self.indexer.keys(still)
        if state is not None:
            keys = torch.cat([state.keys, keys], 2)
            values = torch.cat([state.values, values], 2)
            index_keys = torch.cat([state.index_keys, index_keys], 1)
        after = MlaState(keys, values, index_keys)
        tokens, total = x.shape[1], keys.shape[2]
        position = torch.arange(total - tokens, total).unsqueeze(1)
        visible = torch.arange(total) <= position
        if Sparse.teach:
            self.teaching = self._teach(still, q_residual.detach(), q, after, visible)
        mask = visible
        if Sparse.on and total > self.topk:
            with torch.no_grad():
                scores = self.indexer(still, q_residual, index_keys)
                mask = self._selected(scores.masked_fill(~visible, -torch.inf)).unsqueeze(1)
        out = functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, scale=self.scale
        )
        gate = torch.sigmoid(self.g_proj(x))
        return self.o_proj(out.transpose(1, 2).flatten(-2) * gate), after

    def _selected(self, scores: Tensor) -> Tensor:
        """The `topk` highest of each row as a mask; of equal ones the lower index wins."""
        best = scores.topk(self.topk + 1, -1).values
        least = best[..., -2:-1]
        self.gaps = (best[..., -2] - best[..., -1]).nan_to_num(torch.inf)
        above = scores > least
        level = (scores == least) & (scores > -torch.inf)
        room = self.topk - above.sum(-1, keepdim=True)
        return above | (level & (level.cumsum(-1) <= room))

    def _teach(
        self, x: Tensor, q_residual: Tensor, q: Tensor, after: MlaState, visible: Tensor
    ) -> Tensor:
        """KL from the mean attention of the heads to the softmax of the index scores."""
        rows = torch.randperm(x.shape[1])[:TEACH_QUERIES]
        hidden = ~visible[rows]
        with torch.no_grad():
            scores = (q[:, :, rows] @ after.keys.transpose(-1, -2)) * self.scale
            target = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).mean(1)
        index = self.indexer(x[:, rows], q_residual[:, rows], after.index_keys)
        log_index = torch.log_softmax(index.masked_fill(hidden, -1e9), -1)
        return (torch.special.xlogy(target, target) - target * log_index).sum(-1).mean()
