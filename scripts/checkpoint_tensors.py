"""Every tensor of a random Kimi K3 checkpoint: its published name, shape, dtype and spread.

Pure values: `checkpoint_writer` turns them into bytes. Names, shapes and dtypes are those
of the published K3 shards; the spreads are ours, so that activations stay near 1.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

LAYERS = "language_model.model.layers"
GROUP = 32
# root mean square of the eight magnitudes of E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6
E2M1_RMS = 2.926
NORM_SPREAD = 0.15


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the model is; `full_attention` counts layers from 1, like the config."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    heads: int
    head_dim: int
    latent: int
    expert_width: int
    dense_width: int
    shared: int
    kv_lora: int
    q_lora: int
    nope: int
    rope: int
    v_dim: int
    block: int
    vocab: int
    full_attention: tuple[int, ...]
    indexer: bool
    index_heads: int
    index_dim: int
    index_topk: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor to be. "normal": mean + std * N(0, 1), zero from element `used` on;
    "codes": any byte; "scales": E8M0 bytes around `mean`."""

    name: str
    dtype: Literal["F32", "BF16", "U8"]
    shape: tuple[int, ...]
    fill: Literal["normal", "codes", "scales"] = "normal"
    mean: float = 0.0
    std: float = 0.0
    used: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * {"F32": 4, "BF16": 2, "U8": 1}[self.dtype]


def linear(name: str, rows: int, columns: int, gain: float = 1.0) -> Tensor:
    """A bf16 matrix [rows, columns] that keeps the size of its input, times `gain`."""
    return Tensor(f"{name}.weight", "BF16", (rows, columns), std=gain * columns**-0.5)


def norm(name: str, width: int, dtype: Literal["F32", "BF16"] = "BF16") -> Tensor:
    """The weight [width] of an RMSNorm, around 1."""
    return Tensor(f"{name}.weight", dtype, (width,), mean=1.0, std=NORM_SPREAD)


def layer_tensors(sizes: Sizes, layer: int) -> Iterator[Tensor]:
    """All tensors of one layer, counted from 0, as they are named in its shard."""
    name = f"{LAYERS}.{layer}"
    for part in ("input_layernorm", "post_attention_layernorm"):
        yield norm(f"{name}.{part}", sizes.hidden)
    for part in ("self_attention_res", "mlp_res"):
        yield norm(f"{name}.{part}_norm", sizes.hidden)
        yield linear(f"{name}.{part}_proj", 1, sizes.hidden, 0.6)
    if layer + 1 in sizes.full_attention:
        yield from _mla(sizes, f"{name}.self_attn")
    else:
        yield from _kda(sizes, f"{name}.self_attn")
    if layer == 0:
        yield from _mlp(f"{name}.mlp", sizes.hidden, sizes.dense_width)
    else:
        yield from _moe(sizes, f"{name}.block_sparse_moe")


def top_tensors(sizes: Sizes) -> Iterator[Tensor]:
    """The tensors outside the layers: embedding, head, last norm, last residual mix."""
    model = "language_model.model"
    yield Tensor(f"{model}.embed_tokens.weight", "BF16", (sizes.vocab, sizes.hidden), std=1.0)
    yield linear("language_model.lm_head", sizes.vocab, sizes.hidden, 2.0)
    yield norm(f"{model}.norm", sizes.hidden)
    yield norm(f"{model}.output_attn_res_norm", sizes.hidden)
    yield linear(f"{model}.output_attn_res_proj", 1, sizes.hidden, 0.6)


def _kda(sizes: Sizes, name: str) -> Iterator[Tensor]:
    hidden, heads, dim = sizes.hidden, sizes.heads, sizes.head_dim
    width = heads * dim
    for part in "qkvg":
        yield linear(f"{name}.{part}_proj", width, hidden)
    for part in "qkv":
        weight = f"{name}.{part}_conv1d.weight"
        yield Tensor(weight, "F32", (width, 1, 4), mean=0.2, std=0.5)
    yield linear(f"{name}.o_proj", hidden, width)
    yield linear(f"{name}.f_a_proj", dim, hidden)
    yield linear(f"{name}.f_b_proj", width, dim)
    yield linear(f"{name}.b_proj", heads, hidden, 1.3)
    # The published A_log is longer than its heads and zero past them.
    padded = (max(heads, dim),)
    yield Tensor(f"{name}.A_log", "F32", padded, mean=0.3, std=0.3, used=heads)
    yield Tensor(f"{name}.dt_bias", "F32", (width,), mean=-2.0, std=2.6)
    yield norm(f"{name}.o_norm", dim, "F32")


def _mla(sizes: Sizes, name: str) -> Iterator[Tensor]:
    hidden, heads = sizes.hidden, sizes.heads
    yield linear(f"{name}.q_a_proj", sizes.q_lora, hidden)
    yield norm(f"{name}.q_a_layernorm", sizes.q_lora)
    yield linear(f"{name}.q_b_proj", heads * (sizes.nope + sizes.rope), sizes.q_lora)
    yield linear(f"{name}.kv_a_proj_with_mqa", sizes.kv_lora + sizes.rope, hidden)
    yield norm(f"{name}.kv_a_layernorm", sizes.kv_lora)
    yield linear(f"{name}.kv_b_proj", heads * (sizes.nope + sizes.v_dim), sizes.kv_lora)
    yield linear(f"{name}.g_proj", heads * sizes.v_dim, hidden)
    yield linear(f"{name}.o_proj", hidden, heads * sizes.v_dim)
    if sizes.indexer:
        yield linear(f"{name}.indexer.wq_b", sizes.index_heads * sizes.index_dim, sizes.q_lora)
        yield linear(f"{name}.indexer.wk", sizes.index_dim, hidden)
        yield linear(f"{name}.indexer.weights_proj", sizes.index_heads, hidden)
        yield norm(f"{name}.indexer.k_norm", sizes.index_dim)
        bias = f"{name}.indexer.k_norm.bias"
        yield Tensor(bias, "BF16", (sizes.index_dim,), std=NORM_SPREAD)


def _mlp(name: str, hidden: int, width: int) -> Iterator[Tensor]:
    yield linear(f"{name}.gate_proj", width, hidden)
    yield linear(f"{name}.up_proj", width, hidden)
    yield linear(f"{name}.down_proj", hidden, width)


def _moe(sizes: Sizes, name: str) -> Iterator[Tensor]:
    hidden, latent, width = sizes.hidden, sizes.latent, sizes.expert_width
    yield linear(f"{name}.gate", sizes.experts, hidden, 1.5)
    bias = f"{name}.gate.e_score_correction_bias"
    yield Tensor(bias, "F32", (sizes.experts,), std=0.1)
    yield linear(f"{name}.routed_expert_down_proj", latent, hidden)
    yield linear(f"{name}.routed_expert_up_proj", hidden, latent)
    yield norm(f"{name}.routed_expert_norm", latent)
    yield from _mlp(f"{name}.shared_experts", hidden, sizes.shared * width)
    for expert in range(sizes.experts):
        yield from _mxfp4(f"{name}.experts.{expert}.w1", width, latent)
        yield from _mxfp4(f"{name}.experts.{expert}.w2", latent, width)
        yield from _mxfp4(f"{name}.experts.{expert}.w3", width, latent)


def _mxfp4(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight_packed", "U8", (rows, columns // 2), "codes")
    exponent = round(math.log2(columns**-0.5 / E2M1_RMS))
    scales = (rows, columns // GROUP)
    yield Tensor(f"{name}.weight_scale", "U8", scales, "scales", mean=127.0 + exponent)
