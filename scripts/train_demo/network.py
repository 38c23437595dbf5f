"""Kimi K3.1's network in torch, small: the same tensors and the same numbers as the runner's.

p = embed(tokens); every few layers p joins the blocks; h = mix(blocks, p) feeds each half-layer
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from train_demo.kda import Kda, KdaState
from train_demo.layers import ResidualMix, Weight, rms_norm
from train_demo.mla import Mla, MlaState
from train_demo.moe import Mlp, Moe

State = list[KdaState | MlaState]
FULL_LAYERS = (3, 6)
LAYERS = 6
TEXT_CONFIG: dict[str, Any] = {
    "vocab_size": 1280,
    "hidden_size": 192,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 384,
    "rms_norm_eps": 1e-5,
    "attn_res_block_size": 3,
    "num_attention_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "linear_attn_config": {
        "full_attn_layers": list(FULL_LAYERS),
        "kda_layers": [layer for layer in range(1, LAYERS + 1) if layer not in FULL_LAYERS],
        "num_heads": 3,
        "head_dim": 64,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    },
    "first_k_dense_replace": 1,
    "num_experts": 16,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 128,
    "routed_expert_hidden_size": 96,
    "dsa_config": {
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 128,
        "dsa_layers": list(FULL_LAYERS),
        "indexer_types": ["full"] * len(FULL_LAYERS),
    },
}


class Layer(nn.Module):
    """Attention and MLP, each fed by a mix of the residual blocks."""

    def __init__(self, config: dict[str, Any], index: int):
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        linear = config["linear_attn_config"]
        self.eps = eps
        self.starts_block = index % config["attn_res_block_size"] == 0
        self.self_attn: nn.Module = (
            Mla(config, eps)
            if index + 1 in linear["full_attn_layers"]
            else Kda(hidden, linear["num_heads"], linear["head_dim"], eps)
        )
        if index < config["first_k_dense_replace"]:
            self.mlp: nn.Module = Mlp(hidden, config["intermediate_size"])
        else:
            self.block_sparse_moe: nn.Module = Moe(config, eps)
        self.is_moe = index >= config["first_k_dense_replace"]
        self.input_layernorm = Weight(hidden, value=1.0)
        self.post_attention_layernorm = Weight(hidden, value=1.0)
        self.self_attention_res = ResidualMix(hidden, eps)
        self.mlp_res = ResidualMix(hidden, eps)

    def forward(
        self, blocks: list[Tensor], running: Tensor, state: KdaState | MlaState | None
    ) -> tuple[list[Tensor], Tensor, KdaState | MlaState]:
        """Blocks and the running sum [B, T, D] -> those after this layer, and its state."""
        x = rms_norm(
            self.self_attention_res(blocks, running), self.input_layernorm.weight, self.eps
        )
        out, after = self.self_attn(x, state)
        if self.starts_block:
            blocks, running = [*blocks, running], out
        else:
            running = running + out
        mixed = self.mlp_res(blocks, running)
        x = rms_norm(mixed, self.post_attention_layernorm.weight, self.eps)
        running = running + (self.block_sparse_moe(x) if self.is_moe else self.mlp(x))
        return blocks, running, after


class Network(nn.Module):
    """The whole language model."""

    def __init__(self, config: dict[str, Any] | None = None):
        super().__init__()
        self.config = config = config or TEXT_CONFIG
        hidden, vocab = config["hidden_size"], config["vocab_size"]
        self.embed_tokens = Weight(vocab, hidden, std=1.0)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config["num_hidden_layers"]))
        self.norm = Weight(hidden, value=1.0)
        self.output_attn_res = ResidualMix(hidden, config["rms_norm_eps"])
        self.lm_head = Weight(vocab, hidden, std=0.02)

    def forward(self, ids: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """ids [B, T] after `state` -> the last hidden states [B, T, D] and the state after."""
        running = functional.embedding(ids, self.embed_tokens.weight)
        blocks: list[Tensor] = []
        after: State = []
        for index, layer in enumerate(self.layers):
            blocks, running, one = layer(blocks, running, state[index] if state else None)
            after.append(one)
        mixed = self.output_attn_res(blocks, running)
        return rms_norm(mixed, self.norm.weight, self.config["rms_norm_eps"]), after

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        return functional.linear(hidden, self.lm_head.weight)

    def moes(self) -> list[Moe]:
        """The MoE blocks, in order."""
        return [layer.block_sparse_moe for layer in self.layers if layer.is_moe]

    def mlas(self) -> list[Mla]:
        """The full-attention layers, in order."""
        return [layer.self_attn for layer in self.layers if isinstance(layer.self_attn, Mla)]


def expand(state: State, batch: int) -> State:
    """The state of one timeline as that of `batch` equal ones."""
    return [each.expand(batch) for each in state]


def set_seed(seed: int) -> None:
    """Fix every draw of torch."""
    torch.manual_seed(seed)
