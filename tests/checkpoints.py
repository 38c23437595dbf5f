"""Checkpoint folders made on the spot: headers by hand, data as holes in the file.

Written from the published description of Kimi K3's files, not from the code under test.
"""

import json
import struct
from pathlib import Path
from typing import Any

Tensors = dict[str, tuple[str, list[int]]]
WIDTH = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4, "U32": 4}


def nbytes(dtype: str, shape: list[int]) -> int:
    """Bytes of a tensor."""
    size = WIDTH[dtype]
    for dim in shape:
        size *= dim
    return size


def write_shard(path: Path, tensors: Tensors, pad: bool = True) -> None:
    """A safetensors file of these tensors, in this order, all zero (sparse)."""
    at = 0
    header: dict[str, Any] = {}
    for name, (dtype, shape) in tensors.items():
        end = at + nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    write_raw(path, header, at, pad)


def write_raw(path: Path, header: object, data: int, pad: bool = True) -> None:
    """A file with any header (an object, or bytes as they are) and `data` zero bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if pad:
        text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + data)


def write_folder(folder: Path, config: object, shards: list[Tensors]) -> Path:
    """A checkpoint folder: config.json, the index and one file for each of `shards`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):06}.safetensors"
        write_shard(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def k3_shards(text: dict[str, Any]) -> list[Tensors]:
    """What the shards of a K3 with this text_config hold: one a layer, then the top."""
    layers = [_k3_layer(text, i) for i in range(text["num_hidden_layers"])]
    vocab, wide = text["vocab_size"], text["hidden_size"]
    top: Tensors = {
        "language_model.lm_head.weight": ("BF16", [vocab, wide]),
        "language_model.model.embed_tokens.weight": ("BF16", [vocab, wide]),
        "language_model.model.norm.weight": ("BF16", [wide]),
        "language_model.model.output_attn_res_norm.weight": ("BF16", [wide]),
        "language_model.model.output_attn_res_proj.weight": ("BF16", [1, wide]),
    }
    return [*layers, top]


def vision_shards() -> list[Tensors]:
    """Shards 95 and 96 of the real K3: projector and tower."""
    projector: Tensors = {
        "mm_projector.post_norm.weight": ("BF16", [7168]),
        "mm_projector.proj.0.weight": ("BF16", [4096, 4096]),
        "mm_projector.proj.2.weight": ("BF16", [7168, 4096]),
    }
    tower: Tensors = {
        "vision_tower.encoder.final_layernorm.weight": ("BF16", [1024]),
        "vision_tower.patch_embed.pos_emb.weight": ("BF16", [64, 64, 1024]),
        "vision_tower.patch_embed.proj.weight": ("BF16", [1024, 3, 14, 14]),
    }
    for block in range(27):
        shapes: dict[str, list[int]] = {
            "mlp.fc0": [4096, 1024],
            "mlp.fc1": [1024, 4096],
            "norm0": [1024],
            "norm1": [1024],
            "wo": [1024, 1536],
            "wqkv": [4608, 1024],
        }
        for name, shape in shapes.items():
            tower[f"vision_tower.encoder.blocks.{block}.{name}.weight"] = ("BF16", shape)
    return [projector, tower]


def _k3_layer(text: dict[str, Any], layer: int) -> Tensors:
    wide = text["hidden_size"]
    bf16: dict[str, list[int]] = {
        "input_layernorm": [wide],
        "post_attention_layernorm": [wide],
        "self_attention_res_norm": [wide],
        "mlp_res_norm": [wide],
        "self_attention_res_proj": [1, wide],
        "mlp_res_proj": [1, wide],
    }
    f32: dict[str, list[int]] = {}
    experts: Tensors = {}
    if layer + 1 in text["linear_attn_config"]["kda_layers"]:
        _k3_kda(text, bf16, f32)
    else:
        _k3_mla(text, bf16)
    if layer < text["first_k_dense_replace"]:
        bf16["mlp.gate_proj"] = bf16["mlp.up_proj"] = [text["intermediate_size"], wide]
        bf16["mlp.down_proj"] = [wide, text["intermediate_size"]]
    else:
        experts = _k3_moe(text, bf16, f32)
    rows: Tensors = {name: ("F32", shape) for name, shape in f32.items()}
    rows |= {f"{name}.weight": ("BF16", shape) for name, shape in bf16.items()}
    return {f"language_model.model.layers.{layer}.{k}": v for k, v in (rows | experts).items()}


def _k3_kda(text: dict[str, Any], bf16: dict[str, list[int]], f32: dict[str, list[int]]) -> None:
    wide, linear = text["hidden_size"], text["linear_attn_config"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    for name in "qkvg":
        bf16[f"self_attn.{name}_proj"] = [heads * dim, wide]
    for name in "qkv":
        f32[f"self_attn.{name}_conv1d.weight"] = [heads * dim, 1, 4]
    bf16["self_attn.o_proj"] = [wide, heads * dim]
    bf16["self_attn.f_a_proj"] = [dim, wide]
    bf16["self_attn.f_b_proj"] = [heads * dim, dim]
    bf16["self_attn.b_proj"] = [heads, wide]
    f32["self_attn.A_log"] = [max(dim, heads)]
    f32["self_attn.dt_bias"] = [heads * dim]
    f32["self_attn.o_norm.weight"] = [dim]


def _k3_mla(text: dict[str, Any], bf16: dict[str, list[int]]) -> None:
    wide, heads, value = text["hidden_size"], text["num_attention_heads"], text["v_head_dim"]
    nope, rope = text["qk_nope_head_dim"], text["qk_rope_head_dim"]
    q_rank, kv_rank = text["q_lora_rank"], text["kv_lora_rank"]
    bf16["self_attn.q_a_proj"] = [q_rank, wide]
    bf16["self_attn.q_a_layernorm"] = [q_rank]
    bf16["self_attn.q_b_proj"] = [heads * (nope + rope), q_rank]
    bf16["self_attn.kv_a_proj_with_mqa"] = [kv_rank + rope, wide]
    bf16["self_attn.kv_a_layernorm"] = [kv_rank]
    bf16["self_attn.kv_b_proj"] = [heads * (nope + value), kv_rank]
    bf16["self_attn.g_proj"] = [heads * value, wide]
    bf16["self_attn.o_proj"] = [wide, heads * value]


def _k3_moe(text: dict[str, Any], bf16: dict[str, list[int]], f32: dict[str, list[int]]) -> Tensors:
    wide, latent = text["hidden_size"], text["routed_expert_hidden_size"]
    inner, moe = text["moe_intermediate_size"], "block_sparse_moe"
    shared = inner * text["num_shared_experts"]
    bf16[f"{moe}.gate"] = [text["num_experts"], wide]
    bf16[f"{moe}.routed_expert_down_proj"] = [latent, wide]
    bf16[f"{moe}.routed_expert_up_proj"] = [wide, latent]
    bf16[f"{moe}.routed_expert_norm"] = [latent]
    for name in ("gate", "up"):
        bf16[f"{moe}.shared_experts.{name}_proj"] = [shared, wide]
    bf16[f"{moe}.shared_experts.down_proj"] = [wide, shared]
    f32[f"{moe}.gate.e_score_correction_bias"] = [text["num_experts"]]
    sizes = (("w1", inner, latent), ("w2", latent, inner), ("w3", inner, latent))
    return {
        f"{moe}.experts.{e}.{name}.{part}": ("U8", [rows, columns // share])
        for e in sorted(range(text["num_experts"]), key=str)
        for name, rows, columns in sizes
        for part, share in (("weight_packed", 2), ("weight_scale", 32))
    }


def k3_config() -> dict[str, Any]:
    """The published config.json of Kimi K3, without its inert keys."""
    full = [*range(4, 93, 4), 93]
    weights = {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group"}
    text = {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear",
        "vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 93,
        "intermediate_size": 33792, "max_position_embeddings": 1048576, "rms_norm_eps": 1e-05,
        "num_attention_heads": 96, "num_key_value_heads": 96, "hidden_act": "situ",
        "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 12, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "mla_use_nope": True, "mla_use_output_gate": True, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "num_experts": 896, "num_experts_per_token": 16,
        "num_shared_experts": 2, "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True, "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True, "routed_scaling_factor": 1.0, "topk_method": "noaux_tc",
        "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1,
        "num_nextn_predict_layers": 0,
        "linear_attn_config": {
            "full_attn_layers": full, "kda_layers": [i for i in range(1, 94) if i not in full],
            "num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0, "use_full_rank_gate": True,
        },
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        },
    }  # fmt: skip
    return {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3",
        "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839,
        "media_placeholder_token_id": 163605, "tie_word_embeddings": False, "text_config": text,
    }  # fmt: skip
