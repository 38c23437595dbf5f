"""Tiny models of mlx-lm's, made on the spot: a Qwen MoE and a Kimi-Linear."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

VOCAB, LAYER_EXPERTS, TOP_K = 320, 8, 2
Packing = dict[str, Any]

QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": LAYER_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
KIMI_LINEAR: dict[str, Any] = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "linear_attn_config": {
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
        "num_heads": 2,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
    "num_experts": LAYER_EXPERTS,
    "num_experts_per_token": TOP_K,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "mla_use_nope": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "model_max_length": 4096,
}


def make_checkpoint(folder: Path, config: dict[str, Any], packing: Packing | None) -> Path:
    """Write random weights as mlx-lm saves them, quantised by `packing` (bits, group_size,
    mode) but for the routers."""
    mx.random.seed(1)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    if packing:
        nn.quantize(model, **packing, class_predicate=_packable(packing["group_size"]))
        config = config | {"quantization": packing}
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _packable(group: int) -> Any:
    def packable(path: str, module: Any) -> bool:
        packs = hasattr(module, "to_quantized") and not path.endswith("gate")
        return packs and module.weight.shape[-1] % group == 0

    return packable
