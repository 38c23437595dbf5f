"""Kimi K3's and K3.1's text model in numbers, and the reading of them from config.json.

Fields are named as in the file. Layers are 0-indexed here although the file counts
from 1. What the published modeling code can do and no published config asks for is
refused by name, never guessed. Nothing here knows tensors.
"""

from dataclasses import dataclass

from mlxmoe.dsa_config import DsaConfig, read_dsa
from mlxmoe.untrusted import Fields

MAX_WIDTH = 1 << 20
MAX_LAYERS = 1000
MAX_HEADS = 4096
MXFP4_GROUP = 32


@dataclass(frozen=True, slots=True)
class KdaConfig:
    """Kimi delta attention: H heads with Dk = Dv = `head_dim`, a causal convolution of
    `short_conv_kernel_size` taps before q, k and v, log decay in (`gate_lower_bound`, 0)."""

    num_heads: int
    head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the routed experts are packed: MXFP4 (OCP), one E8M0 scale for 32 inputs."""

    bits: int = 4
    group_size: int = 32
    mode: str = "mxfp4"


@dataclass(frozen=True, slots=True)
class KimiConfig:
    """Kimi K3's text model; with `dsa`, K3.1's.

    `full_attention_layers` and `kda_layers` part the layers 0..num_hidden_layers-1.
    `dsa` holds the indexer's numbers when the config speaks of one; whether a layer
    has an indexer is for its tensors to say. `mla_norm_eps` and `l2norm_eps` are fixed
    in the published modeling code (the latter is added to the SUM of squares).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    attn_res_block_size: int
    activation_situ_beta: float
    activation_situ_linear_beta: float
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kda: KdaConfig
    full_attention_layers: tuple[int, ...]
    kda_layers: tuple[int, ...]
    first_k_dense_replace: int
    moe_layer_freq: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    moe_renormalize: bool
    routed_scaling_factor: float
    num_nextn_predict_layers: int
    quantization: Quantization | None
    dsa: DsaConfig | None
    bos_token_id: int | None
    pad_token_id: int | None
    media_placeholder_token_id: int | None
    eos_token_ids: tuple[int, ...]
    mla_norm_eps: float = 1e-6
    l2norm_eps: float = 1e-6

    def is_kda(self, layer: int) -> bool:
        """Whether `layer` (0-indexed) is Kimi delta attention, not full attention."""
        return layer in self.kda_layers

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` (0-indexed) has routed experts, not a dense MLP."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers with routed experts, 0-indexed."""
        return tuple(i for i in range(self.num_hidden_layers) if self.is_moe(i))

    @property
    def top_k(self) -> int:
        """K, routed experts a token and layer."""
        return self.num_experts_per_token

    @property
    def context_length(self) -> int:
        """Positions the model was made for."""
        return self.max_position_embeddings


def read_kimi(model_type: str, top: Fields, text: Fields, eos: tuple[int, ...]) -> KimiConfig:
    """The text model in `text` (an object of `top`, or `top` itself)."""
    _refuse_unsupported(top, text)
    layers = text.whole("num_hidden_layers", 1, MAX_LAYERS)
    kda, full = _layer_kinds(text, layers)
    eps = text.real("rms_norm_eps", 0.0, 0.1)
    vocab = text.whole("vocab_size", 1, 1 << 24)
    experts = text.whole("num_experts", 1, 1 << 16)
    if not eos:
        raise top.error("eos_token_id", "the token that ends an answer")
    return KimiConfig(
        model_type=model_type,
        vocab_size=vocab,
        num_hidden_layers=layers,
        rms_norm_eps=eps,
        activation_situ_beta=text.real("activation_situ_beta", 0.0, 1e4),
        activation_situ_linear_beta=text.real("activation_situ_linear_beta", 0.0, 1e4),
        kda=_kda(text.object("linear_attn_config")),
        full_attention_layers=full,
        kda_layers=kda,
        first_k_dense_replace=text.whole("first_k_dense_replace", 0, layers - 1),
        moe_layer_freq=text.whole("moe_layer_freq", 1, layers, default=1),
        num_experts=experts,
        num_experts_per_token=text.whole("num_experts_per_token", 1, min(experts, 1024)),
        num_shared_experts=text.whole("num_shared_experts", 1, 1024),
        moe_intermediate_size=_group_width(text, "moe_intermediate_size"),
        routed_expert_hidden_size=_group_width(text, "routed_expert_hidden_size"),
        moe_renormalize=text.flag("moe_renormalize"),
        routed_scaling_factor=text.real("routed_scaling_factor", 0.0, 1e4),
        num_nextn_predict_layers=text.whole("num_nextn_predict_layers", 0, 64, default=0),
        quantization=_quantization(top, text),
        dsa=read_dsa(top, text, tuple(i + 1 for i in full), eps, model_type == "kimi_k31"),
        bos_token_id=_token(top, text, "bos_token_id", vocab),
        pad_token_id=_token(top, text, "pad_token_id", vocab),
        media_placeholder_token_id=_token(top, text, "media_placeholder_token_id", vocab),
        eos_token_ids=eos,
        **{key: text.whole(key, 1, high) for key, high in _PLAIN.items()},
    )


_PLAIN = {
    "hidden_size": MAX_WIDTH,
    "intermediate_size": MAX_WIDTH,
    "max_position_embeddings": 1 << 31,
    "attn_res_block_size": MAX_LAYERS,
    "num_attention_heads": MAX_HEADS,
    "q_lora_rank": MAX_WIDTH,
    "kv_lora_rank": MAX_WIDTH,
    "qk_nope_head_dim": MAX_HEADS,
    "qk_rope_head_dim": MAX_HEADS,
    "v_head_dim": MAX_HEADS,
}


def _refuse_unsupported(top: Fields, text: Fields) -> None:
    text.expect("hidden_act", "situ")
    text.expect("mla_use_nope", True)
    text.expect("mla_use_output_gate", True)
    text.expect("latent_moe_use_norm", True)
    text.expect("moe_router_activation_func", "sigmoid")
    text.expect("topk_method", "noaux_tc", absent_is_fine=True)
    text.expect("num_expert_group", 1, absent_is_fine=True)
    text.expect("topk_group", 1, absent_is_fine=True)
    text.expect("tie_word_embeddings", False, absent_is_fine=True)
    top.expect("tie_word_embeddings", False, absent_is_fine=True)
    heads = text.whole("num_attention_heads", 1, MAX_HEADS)
    text.expect("num_key_value_heads", heads, absent_is_fine=True)


def _kda(linear: Fields) -> KdaConfig:
    linear.expect("use_full_rank_gate", True)
    bound = linear.real("gate_lower_bound", -1e9, 1e9)
    if not -10.0 <= bound < 0.0:
        raise linear.error("gate_lower_bound", "a number from -10 up to, not including, 0")
    return KdaConfig(
        num_heads=linear.whole("num_heads", 1, MAX_HEADS),
        head_dim=linear.whole("head_dim", 1, MAX_HEADS),
        short_conv_kernel_size=linear.whole("short_conv_kernel_size", 2, 16),
        gate_lower_bound=bound,
    )


def _layer_kinds(text: Fields, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(KDA layers, full-attention layers), 0-indexed; together every layer once."""
    linear = text.object("linear_attn_config")
    kda = linear.wholes("kda_layers", 1, layers)
    full = linear.wholes("full_attn_layers", 1, layers)
    if len(kda) + len(full) != layers or set(kda) & set(full):
        odd = next(i for i in range(1, layers + 1) if (i in kda) == (i in full))
        where = "both lists" if odd in kda else "neither list"
        raise linear.error(
            "kda_layers", f"with full_attn_layers each of {layers} layers once; {odd} is in {where}"
        )
    return tuple(i - 1 for i in kda), tuple(i - 1 for i in full)


def _group_width(text: Fields, key: str) -> int:
    width = text.whole(key, 1, MAX_WIDTH)
    if width % MXFP4_GROUP:
        raise text.error(key, f"a multiple of {MXFP4_GROUP}, MXFP4's group")
    return width


def _token(top: Fields, text: Fields, key: str, vocab: int) -> int | None:
    place = next((fields for fields in (top, text) if fields.has(key)), None)
    return place.whole(key, 0, vocab - 1) if place else None


def _quantization(top: Fields, text: Fields) -> Quantization | None:
    """MXFP4 as compressed-tensors or mlx-lm write it; None for experts in bfloat16."""
    for place in (text, top):
        if own := place.find("quantization_config"):
            _check_compressed(own)
            return Quantization()
    for place in (text, top):
        if own := place.find("quantization"):
            own.expect("mode", "mxfp4")
            own.expect("bits", 4)
            own.expect("group_size", MXFP4_GROUP)
            return Quantization()
    return None


def _check_compressed(own: Fields) -> None:
    own.expect("quant_method", "compressed-tensors")
    own.expect("format", "mxfp4-pack-quantized")
    groups = own.object("config_groups")
    if not groups.data:
        raise own.error("config_groups", "at least one group")
    for name in groups.data:
        weights = groups.object(name).object("weights")
        weights.expect("num_bits", 4)
        weights.expect("type", "float")
        weights.expect("group_size", MXFP4_GROUP)
        weights.expect("strategy", "group", absent_is_fine=True)
        weights.expect("symmetric", True, absent_is_fine=True)
