"""The tensors of a Kimi K3 or K3.1 checkpoint as published: every name, shape and dtype.

A checkpoint either has exactly these or is refused by the name that is wrong. Names are
given without the "language_model." that the published files put before them.
"""

from mlxmoe.config import DsaConfig, KimiConfig

Shape = tuple[int, ...]
FLOATS = ("BF16", "F16", "F32")
INDEXER = "self_attn.indexer."
LANGUAGE = "language_model."


def trunk_shapes(config: KimiConfig) -> dict[str, Shape]:
    """Name -> shape of every tensor outside the experts and the indexers.

    `A_log` stands with one value a head; published files pad it.
    """
    wide = config.hidden_size
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, wide),
        "lm_head.weight": (config.vocab_size, wide),
        "model.norm.weight": (wide,),
        "model.output_attn_res_norm.weight": (wide,),
        "model.output_attn_res_proj.weight": (1, wide),
    }
    for layer in range(config.num_hidden_layers):
        rows = dict(_residual(config))
        rows |= _kda(config) if config.is_kda(layer) else _mla(config)
        rows |= _moe(config) if config.is_moe(layer) else _dense(config)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in rows.items()}
    return shapes


def indexer_shapes(config: KimiConfig, dsa: DsaConfig, query_width: int) -> dict[str, Shape]:
    """Name in the layer -> shape of one indexer; `wq_b` reads `query_width` inputs."""
    return {
        f"{INDEXER}wq_b.weight": (dsa.n_heads * dsa.head_dim, query_width),
        f"{INDEXER}wk.weight": (dsa.head_dim, config.hidden_size),
        f"{INDEXER}weights_proj.weight": (dsa.n_heads, config.hidden_size),
        f"{INDEXER}k_norm.weight": (dsa.head_dim,),
    }


def expert_shapes(config: KimiConfig, packed: bool) -> dict[tuple[str, str], Shape]:
    """(projection, kind) -> shape of one expert's part. Packed: two 4-bit values a byte,
    one scale for 32 inputs."""
    latent, inner = config.routed_expert_hidden_size, config.moe_intermediate_size
    whole = {"gate": (inner, latent), "up": (inner, latent), "down": (latent, inner)}
    if not packed:
        return {(name, "weight"): shape for name, shape in whole.items()}
    return {
        (name, kind): (rows, columns // share)
        for name, (rows, columns) in whole.items()
        for kind, share in (("weight", 2), ("scales", 32))
    }


def _residual(config: KimiConfig) -> dict[str, Shape]:
    wide = (config.hidden_size,)
    return {
        "input_layernorm.weight": wide,
        "post_attention_layernorm.weight": wide,
        "self_attention_res_norm.weight": wide,
        "mlp_res_norm.weight": wide,
        "self_attention_res_proj.weight": (1, *wide),
        "mlp_res_proj.weight": (1, *wide),
    }


def _kda(config: KimiConfig) -> dict[str, Shape]:
    kda, wide = config.kda, config.hidden_size
    inner = kda.num_heads * kda.head_dim
    rows: dict[str, Shape] = {f"{name}_proj.weight": (inner, wide) for name in "qkvg"}
    rows |= {f"{name}_conv1d.weight": (inner, 1, kda.short_conv_kernel_size) for name in "qkv"}
    rows |= {
        "o_proj.weight": (wide, inner),
        "f_a_proj.weight": (kda.head_dim, wide),
        "f_b_proj.weight": (inner, kda.head_dim),
        "b_proj.weight": (kda.num_heads, wide),
        "A_log": (kda.num_heads,),
        "dt_bias": (inner,),
        "o_norm.weight": (kda.head_dim,),
    }
    return {f"self_attn.{name}": shape for name, shape in rows.items()}


def _mla(config: KimiConfig) -> dict[str, Shape]:
    heads, wide = config.num_attention_heads, config.hidden_size
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    rows: dict[str, Shape] = {
        "q_a_proj.weight": (config.q_lora_rank, wide),
        "q_a_layernorm.weight": (config.q_lora_rank,),
        "q_b_proj.weight": (heads * (nope + rope), config.q_lora_rank),
        "kv_a_proj_with_mqa.weight": (config.kv_lora_rank + rope, wide),
        "kv_a_layernorm.weight": (config.kv_lora_rank,),
        "kv_b_proj.weight": (heads * (nope + value), config.kv_lora_rank),
        "g_proj.weight": (heads * value, wide),
        "o_proj.weight": (wide, heads * value),
    }
    return {f"self_attn.{name}": shape for name, shape in rows.items()}


def _dense(config: KimiConfig) -> dict[str, Shape]:
    return _mlp("mlp", config.hidden_size, config.intermediate_size)


def _moe(config: KimiConfig) -> dict[str, Shape]:
    wide, latent = config.hidden_size, config.routed_expert_hidden_size
    shared = config.num_shared_experts * config.moe_intermediate_size
    rows: dict[str, Shape] = {
        "gate.weight": (config.num_experts, wide),
        "gate.e_score_correction_bias": (config.num_experts,),
        "routed_expert_down_proj.weight": (latent, wide),
        "routed_expert_up_proj.weight": (wide, latent),
        "routed_expert_norm.weight": (latent,),
        **_mlp("shared_experts", wide, shared),
    }
    return {f"block_sparse_moe.{name}": shape for name, shape in rows.items()}


def _mlp(name: str, wide: int, inner: int) -> dict[str, Shape]:
    return {
        f"{name}.gate_proj.weight": (inner, wide),
        f"{name}.up_proj.weight": (inner, wide),
        f"{name}.down_proj.weight": (wide, inner),
    }
