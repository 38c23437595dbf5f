"""The small files of a random Kimi K3 checkpoint: config, generation config, tokenizer.

The keys are those of the published files that say something about the text model.
"""

import base64
import itertools
import json
from typing import Any

from checkpoint_tensors import GROUP, Sizes

BYTES = 256
SPECIALS = 256
# offset after the ranks -> name, and whether it counts as special when text is cleaned
SPECIAL_NAMES = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|end_of_msg|>", True),
    3: ("<|open|>", False),
    4: ("<|close|>", False),
    5: ("<|sep|>", False),
    6: ("[start_header_id]", True),
    7: ("[end_header_id]", True),
    9: ("[EOT]", True),
    18: ("<|media_begin|>", True),
    19: ("<|media_content|>", True),
    20: ("<|media_end|>", True),
    21: ("<|media_pad|>", True),
    65: ("<osagent_mode>", True),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}
# pieces of the chat layout that become one token each, so that prompts stay short
WORDS = (
    "message", " role", '="', "system", "user", "assistant", "tool", "tools", "think",
    "response", "call", " tool", " index", "argument", " key", " type", "string", "number",
    "boolean", "null", "object", "array", "json", "name", " name", "thinking", "-effort",
    "-declare", "-choice", "-format", " the", " and", " to", " of", " is", " in", " on", " how",
    " you", " with", " think", " thinking", " channel", " supported", " values", " include",
    " low", " medium", " high", " max", " system", " invoked", " effort",
)  # fmt: skip
LETTERS = b" etaoinshrdlucmfwypvbgkjqxz"


def small_files(sizes: Sizes) -> dict[str, str]:
    """File name -> its text, for everything that is not a shard or their index."""
    ranks = sizes.vocab - SPECIALS
    generation = {"max_length": 1048576, "eos_token_id": ranks + 2}
    return {
        "config.json": json.dumps(config(sizes), indent=2),
        "generation_config.json": json.dumps(generation),
        "tokenizer_config.json": json.dumps(tokenizer_config(ranks), indent=2),
        "tiktoken.model": tiktoken_model(ranks),
    }


def config(sizes: Sizes) -> dict[str, Any]:
    """config.json: K3's, or K3.1's with its `dsa_config` when there is an indexer."""
    ranks = sizes.vocab - SPECIALS
    version = "31" if sizes.indexer else "3"
    ends = {
        "bos_token_id": ranks,
        "eos_token_id": ranks + 2,
        "pad_token_id": ranks + SPECIALS - 1,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    return {
        "architectures": [f"KimiK{version}ForConditionalGeneration"],
        "model_type": f"kimi_k{version}",
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": ranks + 21,
        **ends,
        "text_config": {**ends, **_text_config(sizes)},
    }


def _text_config(sizes: Sizes) -> dict[str, Any]:
    layers = range(1, sizes.layers + 1)
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "intermediate_size": sizes.dense_width,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-05,
        "initializer_range": 0.02,
        "use_cache": True,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": sizes.block,
        "q_lora_rank": sizes.q_lora,
        "kv_lora_rank": sizes.kv_lora,
        "qk_nope_head_dim": sizes.nope,
        "qk_rope_head_dim": sizes.rope,
        "v_head_dim": sizes.v_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "full_attn_layers": list(sizes.full_attention),
            "kda_layers": [layer for layer in layers if layer not in sizes.full_attention],
            "num_heads": sizes.heads,
            "head_dim": sizes.head_dim,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
        **_moe_config(sizes),
    }
    if sizes.indexer:
        text["dsa_config"] = {
            "index_n_heads": sizes.index_heads,
            "index_head_dim": sizes.index_dim,
            "index_topk": sizes.index_topk,
            "dsa_layers": list(sizes.full_attention),
            "indexer_types": ["full"] * len(sizes.full_attention),
        }
    return text


def _moe_config(sizes: Sizes) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "float",
        "group_size": GROUP,
        "strategy": "group",
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
        "zp_dtype": None,
        "observer": "minmax",
        "observer_kwargs": {},
        "actorder": None,
        "block_structure": None,
    }
    group = {
        "targets": ["Linear"],
        "format": "mxfp4-pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "weights": weights,
    }
    unpacked = ["self_attn", "shared_experts", r"mlp\.(gate|up|gate_up|down)_proj", "lm_head"]
    return {
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": sizes.experts,
        "num_experts_per_token": sizes.top_k,
        "num_shared_experts": sizes.shared,
        "moe_intermediate_size": sizes.expert_width,
        "routed_expert_hidden_size": sizes.latent,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
            "config_groups": {"group_0": group},
            "ignore": [f"re:.*{name}.*" for name in (*unpacked, "vision_tower", "mm_projector")],
        },
    }


def tokenizer_config(ranks: int) -> dict[str, Any]:
    """tokenizer_config.json of a vocabulary with `ranks` tokens below the special ones."""
    added = {
        str(ranks + offset): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": special,
        }
        for offset, (name, special) in SPECIAL_NAMES.items()
    }
    return {
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "extra_special_tokens": {},
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }


def tiktoken_model(ranks: int) -> str:
    """tiktoken.model: all bytes, the chat layout's words, then pairs up to `ranks` lines."""
    tokens = [bytes([value]) for value in range(BYTES)]
    words = (word[:end].encode() for word in WORDS for end in range(2, len(word) + 1))
    every = bytes(range(BYTES))
    letters = itertools.product(LETTERS, repeat=2)
    fillers = itertools.chain(letters, *(itertools.product(every, repeat=n) for n in (2, 3)))
    seen = set(tokens)
    for token in itertools.chain(words, map(bytes, fillers)):
        if len(tokens) >= ranks:
            break
        if token not in seen:
            seen.add(token)
            tokens.append(token)
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    return "".join(lines)
