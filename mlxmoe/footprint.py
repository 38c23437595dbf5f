"""Bytes a model needs in memory: trunk as loaded, state of one sequence, scratch.

Pure functions of the manifest, the config and a few numbers. `width` is the bytes of an
element of the trunk and of the caches: 2 (bfloat16, Metal) or 4 (float32, Linux CPU).
`plan` prints what these say and `bench` holds it against the measured peak, so every
constant below is a figure to correct there, not a law.
"""

from dataclasses import dataclass

from mlxmoe.config import ForeignConfig, KimiConfig, ModelConfig
from mlxmoe.manifest import DTYPE_BYTES, Manifest, TensorEntry

KILO = 1024  # tokens in "1k tokens"
SNAPSHOTS = 3  # saved points of a sequence kept beside its live state
FRESH_SNAPSHOTS = 2  # more of them while a prompt is read, before the oldest go
CHUNK_TOKENS = 512  # tokens that pass a layer together, of a span
BLOCK_BYTES = 256 << 20  # one float32 temporary of an attention block, at most
BLOCKS = 3  # such temporaries alive at a time (measured: 2.4 with 96 heads, 512 tokens)
KDA_VALUES = 32  # float32 values a token and channel in a chunk of KDA (measured: 32.1)
MLP_VALUES = 4  # the same for the inner width of an MLP (measured: 4.0)
EXPERT_ROWS = 4096  # (token, expert) rows computed at a time in a sweep
PAIR_BYTES = 256 << 20  # float32 outputs of a span's picks that are held before their sum
RUNTIME_BYTES = 256 << 20  # interpreter, libraries, mlx's buffer cache (measured: 220 MB)
TOKEN_BYTES = 512  # a tokenizer's memory for one entry of the vocabulary (measured: 440)
_FLOAT = 4
FLOAT32_NAMES = (
    ".gate.weight",
    ".e_score_correction_bias",
    "_conv1d.weight",
    ".A_log",
    ".dt_bias",
    ".o_norm.weight",
)


@dataclass(frozen=True, slots=True)
class State:
    """What one sequence keeps: `fixed` bytes in its live state and in each snapshot, and
    `per_token` bytes more a position. `doubling` caches hold a power of two of positions."""

    fixed: int
    per_token: int
    doubling: bool

    def at(self, tokens: int) -> int:
        """Bytes at a length of `tokens`, snapshots included."""
        rows = 1 << (tokens - 1).bit_length() if self.doubling else tokens
        return self.fixed * (1 + SNAPSHOTS + FRESH_SNAPSHOTS) + self.per_token * rows


def kept_float32(entry: TensorEntry) -> bool:
    """Whether a Kimi trunk tensor is float32 in memory: routers, and what KDA computes in
    float32. All others take the stream's width, however a file stores them."""
    return entry.name.endswith(FLOAT32_NAMES)


def trunk_bytes(manifest: Manifest, config: ModelConfig, width: int) -> int:
    """The trunk in memory. Floats become `width` wide, but for what a Kimi model keeps in
    float32; packed integers stay as stored."""
    return sum(loaded_bytes(entry, config, width) for entry in manifest.trunk)


def loaded_bytes(entry: TensorEntry, config: ModelConfig, width: int) -> int:
    """Bytes of one trunk tensor in memory."""
    if isinstance(config, KimiConfig):
        elements = entry.nbytes // DTYPE_BYTES[entry.dtype]
        return elements * (_FLOAT if kept_float32(entry) else width)
    return entry.nbytes // 2 * width if entry.dtype in ("BF16", "F16") else entry.nbytes


def load_bytes(manifest: Manifest, config: ModelConfig, width: int) -> int:
    """The most that loading needs beside what stays: a tensor as stored, while it is cast."""
    return max(
        (
            entry.nbytes
            for entry in manifest.trunk
            if loaded_bytes(entry, config, width) != entry.nbytes
        ),
        default=0,
    )


def sequence_state(config: ModelConfig, width: int) -> State:
    """Caches of one sequence.

    KDA layer: float32 state [H, Dk, Dv] and the last taps-1 inputs of three convolutions.
    Full attention: latent and shared key dims a position, K3.1 also one index key.
    """
    if isinstance(config, ForeignConfig):
        return _foreign_state(config, width)
    kda = config.kda
    inner = kda.num_heads * kda.head_dim
    recurrent = inner * kda.head_dim * _FLOAT
    taps = 3 * inner * (kda.short_conv_kernel_size - 1) * width
    values = config.kv_lora_rank + config.qk_rope_head_dim
    values += config.dsa.head_dim if config.dsa else 0
    return State(
        fixed=len(config.kda_layers) * (recurrent + taps),
        per_token=len(config.full_attention_layers) * values * width,
        doubling=True,
    )


def scratch_bytes(config: ModelConfig, span: int, context: int, width: int) -> int:
    """The most that a span of `span` tokens needs beside trunk, state and slots.

    For the Kimi model, per token of the span: the residual blocks, the running sum, the
    MoE's inputs, shared outputs and outputs [hidden]; the experts' input and output and a
    float32 sum [latent]; K picks with weights. Once: the largest of what a chunk holds
    inside KDA, MLA or an MLP, the rows of experts computed together, four rows of logits,
    and the process itself.
    """
    if isinstance(config, ForeignConfig):
        return RUNTIME_BYTES + _foreign_scratch(config, span, context)
    latent, inner = config.routed_expert_hidden_size, config.moe_intermediate_size
    blocks = -(-config.num_hidden_layers // config.attn_res_block_size)
    per_token = config.hidden_size * (blocks + 4) * width
    per_token += latent * (2 * width + _FLOAT) + config.top_k * 2 * _FLOAT
    rows = min(span * config.top_k, max(EXPERT_ROWS, PAIR_BYTES // (latent * _FLOAT)))
    experts = rows * ((3 * inner + 3 * latent) * width + latent * _FLOAT)
    logits = config.vocab_size * (4 * _FLOAT + TOKEN_BYTES)
    chunk = _kimi_chunk(config, min(span, CHUNK_TOKENS), context)
    return RUNTIME_BYTES + span * per_token + max(chunk, experts) + logits


def _kimi_chunk(config: KimiConfig, tokens: int, context: int) -> int:
    """The largest working set of `tokens` tokens inside one block of a layer, in float32."""
    kda = KDA_VALUES * config.kda.num_heads * config.kda.head_dim
    heads = config.num_attention_heads
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    mla = heads * (config.qk_nope_head_dim + 2 * latent + 2 * config.v_head_dim)
    shared = config.num_shared_experts * config.moe_intermediate_size
    mlp = MLP_VALUES * max(config.intermediate_size, shared)
    scores = BLOCKS * min(BLOCK_BYTES, heads * tokens * context * _FLOAT)
    if config.dsa:
        picks = tokens * min(config.dsa.topk, context) * (latent + heads) * _FLOAT
        index = config.dsa.n_heads * tokens * context * _FLOAT
        scores = max(scores, BLOCKS * min(BLOCK_BYTES, max(picks, index)))
        scores += config.dsa.head_dim * context * _FLOAT
    return max(tokens * kda * _FLOAT, tokens * mla * _FLOAT + scores, tokens * mlp * _FLOAT)


def _foreign_state(config: ForeignConfig, width: int) -> State:
    """From the keys that mlx-lm's models share; 0 for what the config does not say."""
    layers = config.num_hidden_layers or 0
    linear = config.section("linear_attn_config")
    listed = linear.get("kda_layers")
    kda_layers = len(listed) if isinstance(listed, list) else 0
    heads, dim = linear.get("num_heads"), linear.get("head_dim")
    fixed = 0
    if kda_layers and isinstance(heads, int) and isinstance(dim, int):
        fixed = kda_layers * heads * dim * (dim * _FLOAT + 9 * width)
    if rank := config.number("kv_lora_rank"):
        values = rank + (config.number("qk_rope_head_dim") or 0)
        values += config.number("index_head_dim") or 0
    else:
        values = 2 * _kv_heads(config) * _head_dim(config)
    return State(fixed, max(layers - kda_layers, 0) * values * width, doubling=False)


def _foreign_scratch(config: ForeignConfig, span: int, context: int) -> int:
    """mlx-lm takes a whole span through a layer, and to logits, at once; in float32 here."""
    hidden = config.number("hidden_size") or 4096
    heads = config.number("num_attention_heads") or 1
    inner = config.number("moe_intermediate_size", "intermediate_size") or 4 * hidden
    experts = (config.top_k or 1) * (2 * hidden + 3 * inner)
    scores = BLOCKS * min(BLOCK_BYTES, heads * span * context * _FLOAT)
    logits = config.number("vocab_size") or 1 << 18
    per_token = 8 * hidden + 6 * heads * _head_dim(config) + experts + logits
    return span * per_token * _FLOAT + scores


def _kv_heads(config: ForeignConfig) -> int:
    return config.number("num_key_value_heads", "num_attention_heads") or 1


def _head_dim(config: ForeignConfig) -> int:
    stated = config.number("head_dim")
    heads = config.number("num_attention_heads") or 1
    return stated or (config.number("hidden_size") or 4096) // heads
