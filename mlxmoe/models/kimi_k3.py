"""Kimi K3 and K3.1: layers that read from a stack of residual blocks.

    h = mix(blocks, p); every `block` layers push p and start it anew
    p = p + attention(norm(h)); h = mix(blocks, p); p = p + mlp(norm(h))

Source: HF `modeling_kimi_linear.py`; the mix is mlx-lm's, kernel included. Names of
modules are the checkpoint's. One sequence at a time; T tokens, D hidden width.
A span of many tokens goes through a layer in chunks, and through one layer at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.kimi_k3 import ResidualBlocks, _attn_res_mix

from metal_kernels.kernels import CHOSEN, Kernels
from mlxmoe.config import KimiConfig
from mlxmoe.models.kda import KdaState, KimiDeltaAttention
from mlxmoe.models.kimi_state import KimiState, LayerState
from mlxmoe.models.latent_cache import LatentCache
from mlxmoe.models.mla import GatedMLA, IndexerConfig
from mlxmoe.models.moe import MLP, LatentMoE
from mlxmoe.models.state import OnLayer

# Tokens that pass attention and the dense parts of a layer together.
CHUNK_TOKENS = 512


@dataclass(slots=True)
class Chunk:
    """Part of a span on its way: p [T, D], and the residual blocks pushed so far.

    `end` counts the tokens of the timeline up to its last; `cut` asks for a snapshot there.
    """

    p: mx.array
    blocks: ResidualBlocks
    end: int
    cut: bool

    def settle(self, *also: mx.array) -> None:
        """Evaluate everything the chunk carries, and `also`."""
        mx.eval(self.p, *also, [self.blocks.raw, self.blocks.inv_rms] if self.pushed else [])

    @property
    def pushed(self) -> bool:
        """Whether there is any block yet."""
        raw: mx.array | None = self.blocks.raw
        return raw is not None


class ResidualMix:
    """softmax over blocks of (v / rms(v)) . (norm * proj), then the weighted sum of v."""

    def __init__(self, norm: nn.RMSNorm, proj: nn.Linear):
        self._norm, self._proj = norm, proj
        self._fused: mx.array | None = None

    def __call__(self, chunk: Chunk) -> mx.array:
        """[T, D], the chunk's p when no block was pushed yet."""
        if self._fused is None:
            self._fused = self._norm.weight.astype(mx.float32) * self._proj.weight.reshape(-1)
        mixed: mx.array = _attn_res_mix(chunk.blocks, chunk.p, self._fused, self._norm.eps)
        return mixed


class DecoderLayer(nn.Module):
    """One layer: KDA or gated MLA, then the dense MLP or the latent MoE."""

    def __init__(self, config: KimiConfig, layer: int, dsa: IndexerConfig | None, kernels: Kernels):
        super().__init__()
        c, width = config, config.hidden_size
        self.is_kda, self.is_moe = c.is_kda(layer), c.is_moe(layer)
        self.opens_block = layer % c.attn_res_block_size == 0
        self.self_attn: Any = (
            KimiDeltaAttention(c, kernels) if self.is_kda else GatedMLA(c, dsa, kernels)
        )
        if self.is_moe:
            self.block_sparse_moe = LatentMoE(c, kernels)
        else:
            self.mlp = MLP(c, c.intermediate_size)
        self.input_layernorm = nn.RMSNorm(width, eps=c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=c.rms_norm_eps)
        self.self_attention_res_norm = nn.RMSNorm(width, eps=c.rms_norm_eps)
        self.self_attention_res_proj = nn.Linear(width, 1, bias=False)
        self.mlp_res_norm = nn.RMSNorm(width, eps=c.rms_norm_eps)
        self.mlp_res_proj = nn.Linear(width, 1, bias=False)
        self._before_attention = ResidualMix(
            self.self_attention_res_norm, self.self_attention_res_proj
        )
        self._before_mlp = ResidualMix(self.mlp_res_norm, self.mlp_res_proj)

    def __call__(self, chunks: list[Chunk], state: LayerState, whole: KimiState) -> None:
        """Move every chunk of the span through this layer, and `state` with them."""
        for chunk in chunks:
            self._attend(chunk, state)
            if chunk.cut and isinstance(state, KdaState):
                whole.keep(state, chunk.end)
            if len(chunks) > 1:
                chunk.settle(*state.arrays)
        inputs = [self.post_attention_layernorm(self._before_mlp(chunk)) for chunk in chunks]
        outs = self.block_sparse_moe(inputs) if self.is_moe else map(self.mlp, inputs)
        for chunk, out in zip(chunks, outs, strict=True):
            chunk.p = chunk.p + out
            if len(chunks) > 1:
                chunk.settle()

    def _attend(self, chunk: Chunk, state: LayerState) -> None:
        h = self._before_attention(chunk)
        if self.opens_block:
            chunk.blocks.append(chunk.p)
        out = self.self_attn(self.input_layernorm(h), state)
        chunk.p = out if self.opens_block else chunk.p + out


class TextModel(nn.Module):
    """Embedding, layers, the last mix and norm."""

    def __init__(self, config: KimiConfig, dsa: IndexerConfig | None, kernels: Kernels):
        super().__init__()
        c = config
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = [DecoderLayer(c, i, dsa, kernels) for i in range(c.num_hidden_layers)]
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.output_attn_res_norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.output_attn_res_proj = nn.Linear(c.hidden_size, 1, bias=False)
        self._eps = c.rms_norm_eps
        self._last_mix = ResidualMix(self.output_attn_res_norm, self.output_attn_res_proj)

    def __call__(
        self, ids: mx.array, state: KimiState, cuts: Sequence[int], on_layer: OnLayer | None
    ) -> mx.array:
        """ids: [T] -> normed hidden states [T, D]."""
        chunks = [
            Chunk(
                self.embed_tokens(ids[start:end]),
                ResidualBlocks(self._eps),
                state.offset + end,
                end in cuts,
            )
            for start, end in pairwise(chunk_borders(ids.shape[0], cuts))
        ]
        for done, (layer, own) in enumerate(zip(self.layers, state.layers, strict=True), 1):
            layer(chunks, own, state)
            if on_layer:
                on_layer(done, len(self.layers))
        state.offset += ids.shape[0]
        mixed = [self._last_mix(chunk) for chunk in chunks]
        normed: mx.array = self.norm(mx.concatenate(mixed) if len(mixed) > 1 else mixed[0])
        return normed


def chunk_borders(tokens: int, cuts: Sequence[int]) -> list[int]:
    """Where a span of `tokens` is cut into chunks: at `cuts`, and every CHUNK_TOKENS."""
    borders = [0]
    for stop in sorted({cut for cut in cuts if 0 < cut < tokens} | {tokens}):
        borders.extend(range(borders[-1] + CHUNK_TOKENS, stop, CHUNK_TOKENS))
        borders.append(stop)
    return borders


class LanguageModel(nn.Module):
    """The text model and its head."""

    def __init__(self, config: KimiConfig, dsa: IndexerConfig | None, kernels: Kernels):
        super().__init__()
        self.model = TextModel(config, dsa, kernels)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class Model(nn.Module):
    """K3, or K3.1 when `dsa` is given. `kernels` is what every layer runs on."""

    def __init__(
        self, config: KimiConfig, dsa: IndexerConfig | None = None, kernels: Kernels = CHOSEN
    ):
        super().__init__()
        self.language_model = LanguageModel(config, dsa, kernels)

    def hidden(
        self,
        ids: mx.array,
        state: KimiState,
        cuts: Sequence[int] = (),
        on_layer: OnLayer | None = None,
    ) -> mx.array:
        """ids: [T], the tokens after those in `state` -> hidden states [T, D].

        `cuts`: counts of `ids` after which `state` keeps a snapshot; `on_layer` may raise
        to stop, which leaves `state` spoilt.
        """
        return self.language_model.model(ids, state, cuts, on_layer)

    def logits(self, hidden: mx.array) -> mx.array:
        """[T, D] -> [T, vocabulary]."""
        return self.language_model.lm_head(hidden)

    def __call__(self, ids: mx.array, state: KimiState) -> mx.array:
        """ids: [T] -> logits [T, vocabulary]."""
        return self.logits(self.hidden(ids, state))

    @property
    def layers(self) -> list[DecoderLayer]:
        """The decoder layers, in order."""
        return self.language_model.model.layers

    def make_state(self) -> KimiState:
        """Empty state of every layer."""
        return KimiState([KdaState() if layer.is_kda else LatentCache() for layer in self.layers])
