"""Gated multi-head latent attention without rotation, dense or over DSA's selection.

    q = q_b(norm(q_a x)); [c, k_rot] = kv_a x; c = norm(c); k = [W_uk c; k_rot]; v = W_uv c
    y = o_proj(softmax(q k / sqrt(d)) v * sigmoid(g_proj x))

Sources: HF `modeling_kimi_linear.py` (norm eps 1e-6 is written there, not in the
config); DSA: DeepSeek-V3.2's indexer without its rotation. With at most `topk` visible
keys a DSA layer takes the dense path itself, so both agree bit for bit.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from metal_kernels.kernels import Kernels
from mlxmoe.config import KimiConfig
from mlxmoe.models.attention import BLOCK_ELEMENTS, causal_attention
from mlxmoe.models.latent_cache import LatentCache

# Queries up to this many stay in latent space; more expand the keys of a block.
ABSORBED_QUERIES = 8


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """An indexer as its tensors are: `query_width` is the number of columns of `wq_b`
    (q-LoRA rank or hidden width), `norm_bias` whether `k_norm` has one."""

    heads: int
    head_dim: int
    topk: int
    norm_eps: float
    query_width: int
    norm_bias: bool


class Indexer(nn.Module):
    """The lightning indexer: which keys each query of a DSA layer may see.

    The input of `wq_b` is the q-LoRA residual or the hidden state, whichever its
    columns fit.
    """

    def __init__(self, config: KimiConfig, dsa: IndexerConfig, kernels: Kernels):
        super().__init__()
        self.kernels = kernels
        self.heads, self.width, self.topk = dsa.heads, dsa.head_dim, dsa.topk
        self.scale = dsa.heads**-0.5 * dsa.head_dim**-0.5
        self.wq_b = nn.Linear(dsa.query_width, dsa.heads * dsa.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, dsa.head_dim, bias=False)
        self.weights_proj = nn.Linear(config.hidden_size, dsa.heads, bias=False)
        self.k_norm = nn.LayerNorm(dsa.head_dim, eps=dsa.norm_eps, bias=dsa.norm_bias)

    def index_keys(self, x: mx.array) -> mx.array:
        """x: [T, D] -> index keys [T, d_I]."""
        keys: mx.array = self.k_norm(self.wk(x))
        return keys

    def index_queries(self, x: mx.array, q_residual: mx.array) -> tuple[mx.array, mx.array]:
        """x: [T, D], q_residual: [T, R] -> queries [T, H_I, d_I], head weights [T, H_I]."""
        wide = self.wq_b.weight.shape[1]
        source = q_residual if wide == q_residual.shape[1] else x
        q = self.wq_b(source).reshape(-1, self.heads, self.width)
        return q, self.weights_proj(x).astype(mx.float32) * self.scale

    def __call__(self, q: mx.array, w: mx.array, keys: mx.array, first: int) -> mx.array:
        """Selected rows of each query, ascending: int32 [T, topk], T small.

        q: [T, H_I, d_I], w: [T, H_I], keys: [S, d_I]; query t stands at `first + t`.
        """
        return self.kernels.dsa_topk(self.kernels.dsa_scores(q, keys, w, first), self.topk)

    def step(self, keys: int) -> int:
        """How many queries to score at once against `keys` keys."""
        return max(1, BLOCK_ELEMENTS // (keys * self.heads))


class GatedMLA(nn.Module):
    """Attention of a full-attention layer; `dsa` gives it an indexer."""

    def __init__(self, config: KimiConfig, dsa: IndexerConfig | None, kernels: Kernels):
        super().__init__()
        c = config
        self.kernels = kernels
        self.heads, self.nope, self.rank = c.num_attention_heads, c.qk_nope_head_dim, c.kv_lora_rank
        self.rot, self.v_dim = c.qk_rope_head_dim, c.v_head_dim
        self.scale = (self.nope + self.rot) ** -0.5
        self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(c.q_lora_rank, eps=c.mla_norm_eps)
        self.q_b_proj = nn.Linear(c.q_lora_rank, self.heads * (self.nope + self.rot), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, self.rank + self.rot, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(self.rank, eps=c.mla_norm_eps)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.v_dim), bias=False)
        self.g_proj = nn.Linear(c.hidden_size, self.heads * self.v_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.v_dim, c.hidden_size, bias=False)
        if dsa:
            self.indexer = Indexer(c, dsa, kernels)

    def __call__(self, x: mx.array, cache: LatentCache) -> mx.array:
        """x: [T, D], the tokens after the cached ones -> [T, D]."""
        first = cache.offset
        q_residual = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_residual).reshape(-1, self.heads, self.nope + self.rot)
        c, k_rot = mx.split(self.kv_a_proj_with_mqa(x), [self.rank], axis=-1)
        rows = mx.concatenate([self.kv_a_layernorm(c), k_rot], axis=-1)
        if "indexer" in self:
            latent, keys = cache.append(rows, self.indexer.index_keys(x))
            out = self._selected(x, q, q_residual, latent, keys, first)
        else:
            (latent,) = cache.append(rows)
            out = self._dense(q, latent, first)
        return self.o_proj(out * mx.sigmoid(self.g_proj(x)))

    def _selected(
        self,
        x: mx.array,
        q: mx.array,
        q_residual: mx.array,
        latent: mx.array,
        keys: mx.array,
        first: int,
    ) -> mx.array:
        """Dense for queries that see at most `topk` keys, over the selection for the rest."""
        topk = self.indexer.topk
        dense = min(q.shape[0], max(0, topk - first))
        outs = [self._dense(q[:dense], latent[: first + dense], first)] if dense else []
        step = min(self.indexer.step(keys.shape[0]), self._gather_step())
        for start in range(dense, q.shape[0], step):
            part = slice(start, start + step)
            index_q, index_w = self.indexer.index_queries(x[part], q_residual[part])
            picked = self.indexer(index_q, index_w, keys, first + start)
            absorbed = self._absorb(q[part])
            mixed = self.kernels.sparse_mla(absorbed, latent, picked, self.rank, self.scale)
            outs.append(self._expand_values(mixed))
            if q.shape[0] > step:
                # Lazy steps would hold every gather of the span at once.
                mx.eval(outs[-1])
        return mx.concatenate(outs) if len(outs) > 1 else outs[0]

    def _gather_step(self) -> int:
        return max(1, BLOCK_ELEMENTS // (self.indexer.topk * (self.rank + self.rot + self.heads)))

    def _dense(self, q: mx.array, latent: mx.array, first: int) -> mx.array:
        """q: [T, H, N+P] at `first`.. over all rows [S, R+P], causal -> [T, H*V]."""
        total = latent.shape[0]
        if q.shape[0] <= ABSORBED_QUERIES:
            mixed = causal_attention(
                self._absorb(q).swapaxes(0, 1),
                lambda rows: (latent[None, rows], latent[None, rows, : self.rank]),
                total,
                first,
                self.scale,
            )
            return self._expand_values(mixed.swapaxes(0, 1))
        out = causal_attention(
            q.swapaxes(0, 1),
            lambda rows: self._expand(latent[rows]),
            total,
            first,
            self.scale,
            self.nope + self.rot + self.v_dim,
        )
        return out.swapaxes(0, 1).reshape(q.shape[0], -1)

    def _up(self) -> tuple[mx.array, mx.array]:
        """W_uk [H, N, R] and W_uv [H, V, R]: per head, K rows come before V rows."""
        both = self.kv_b_proj.weight.reshape(self.heads, self.nope + self.v_dim, self.rank)
        return both[:, : self.nope], both[:, self.nope :]

    def _absorb(self, q: mx.array) -> mx.array:
        """[T, H, N+P] -> [T, H, R+P]: W_uk^T on the nope part."""
        nope, rot = mx.split(q, [self.nope], axis=-1)
        low = nope.swapaxes(0, 1) @ self._up()[0]
        return mx.concatenate([low.swapaxes(0, 1), rot], axis=-1)

    def _expand_values(self, mixed: mx.array) -> mx.array:
        """[T, H, R] -> [T, H*V]."""
        out = mixed.swapaxes(0, 1) @ self._up()[1].swapaxes(-1, -2)
        return out.swapaxes(0, 1).reshape(mixed.shape[0], -1)

    def _expand(self, latent: mx.array) -> tuple[mx.array, mx.array]:
        """[B, R+P] -> keys [H, B, N+P], values [H, B, V]."""
        c, rot = mx.split(latent, [self.rank], axis=-1)
        up_k, up_v = self._up()
        shared = mx.broadcast_to(rot[None], (self.heads, *rot.shape))
        keys = mx.concatenate([c[None] @ up_k.swapaxes(-1, -2), shared], axis=-1)
        return keys, c[None] @ up_v.swapaxes(-1, -2)
