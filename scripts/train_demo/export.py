"""Write a trained network as a checkpoint in Kimi K3.1's published layout.

    python -m train_demo.export RUN_FOLDER OUT_FOLDER

One shard a layer and one for the rest, an index, `config.json`, the tokenizer's two files. The
trunk is bfloat16 but for what K3 keeps in float32; the experts are packed MXFP4.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import checkpoint_files
from checkpoint_tensors import Sizes
from train_demo.layers import E2M1_EDGES, GROUP, mxfp4_scale
from train_demo.network import TEXT_CONFIG

PREFIX = "language_model."
CONTEXT = 4096
KEPT_FLOAT32 = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")
TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json")
BIAS = 127


def main() -> None:
    """Read the options and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    network = torch.load(given.run / "checkpoint.pt", weights_only=False)[0]
    given.out.mkdir(parents=True, exist_ok=True)
    for old in given.out.glob("model*"):
        old.unlink()
    for name in TOKENIZER_FILES:
        shutil.copyfile(given.run / name, given.out / name)
    for name, text in config_files().items():
        (given.out / name).write_text(text + "\n")
    write_shards(published(network), given.out)


def config_files() -> dict[str, str]:
    """File name -> text of `config.json` and `generation_config.json`."""
    c = TEXT_CONFIG
    sizes = Sizes(
        layers=c["num_hidden_layers"],
        experts=c["num_experts"],
        top_k=c["num_experts_per_token"],
        hidden=c["hidden_size"],
        heads=c["num_attention_heads"],
        head_dim=c["linear_attn_config"]["head_dim"],
        latent=c["routed_expert_hidden_size"],
        expert_width=c["moe_intermediate_size"],
        dense_width=c["intermediate_size"],
        shared=c["num_shared_experts"],
        kv_lora=c["kv_lora_rank"],
        q_lora=c["q_lora_rank"],
        nope=c["qk_nope_head_dim"],
        rope=c["qk_rope_head_dim"],
        v_dim=c["v_head_dim"],
        block=c["attn_res_block_size"],
        vocab=c["vocab_size"],
        full_attention=tuple(c["linear_attn_config"]["full_attn_layers"]),
        indexer=True,
        index_heads=c["dsa_config"]["index_n_heads"],
        index_dim=c["dsa_config"]["index_head_dim"],
        index_topk=c["dsa_config"]["index_topk"],
    )
    config = checkpoint_files.config(sizes)
    config["text_config"] |= {**TEXT_CONFIG, "max_position_embeddings": CONTEXT}
    generation = {"max_length": CONTEXT, "eos_token_id": config["eos_token_id"], "do_sample": False}
    return {
        "config.json": json.dumps(config, indent=1),
        "generation_config.json": json.dumps(generation),
    }


def published(network: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters under their published names, in their published types."""
    return {name: value for key, each in network.items() for name, value in _one(key, each)}


def _one(key: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    name = PREFIX + key if key.startswith("lm_head") else f"{PREFIX}model.{key}"
    name = name.replace("_res.norm.", "_res_norm.").replace("_res.proj.", "_res_proj.")
    if key.endswith(".w13"):
        for expert, both in enumerate(value):
            gate, up = both.chunk(2)
            yield from packed(f"{name[:-3]}experts.{expert}.w1", gate)
            yield from packed(f"{name[:-3]}experts.{expert}.w3", up)
    elif key.endswith(".w2"):
        for expert, down in enumerate(value):
            yield from packed(f"{name[:-2]}experts.{expert}.w2", down)
    elif key.endswith("A_log"):
        # Longer than its heads, as in K3; only the first count.
        padded = torch.zeros(TEXT_CONFIG["linear_attn_config"]["head_dim"])
        padded[: len(value)] = value
        yield name, padded
    else:
        kept = key.endswith(KEPT_FLOAT32)
        yield name, (value if kept else value.bfloat16()).contiguous()


def packed(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A matrix [O, I] as two nibbles a byte, the first one low, and E8M0 scales [O, I/32]."""
    groups = weight.unflatten(-1, (-1, GROUP))
    scale = mxfp4_scale(groups)
    scaled = (groups / scale).clamp(-6, 6)
    codes = torch.bucketize(scaled.abs(), E2M1_EDGES) + 8 * (scaled < 0)
    low, high = codes.flatten(-2).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    yield f"{name}.weight_packed", low | (high << 4)
    yield f"{name}.weight_scale", (torch.log2(scale).squeeze(-1) + BIAS).round().to(torch.uint8)


def write_shards(tensors: dict[str, Tensor], out: Path) -> None:
    """Shard n holds layer n-1, the last one what belongs to no layer."""
    layers = TEXT_CONFIG["num_hidden_layers"]
    shards: list[dict[str, Tensor]] = [{} for _ in range(layers + 1)]
    for name, value in tensors.items():
        _, found, rest = name.partition(".layers.")
        shards[int(rest.split(".")[0]) if found else layers][name] = value
    places: dict[str, Any] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):06}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    total = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=0) + "\n")


if __name__ == "__main__":
    main()
