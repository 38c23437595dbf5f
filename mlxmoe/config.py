"""config.json, read with suspicion: which model it is, and its numbers as values.

`KimiConfig` is K3's or K3.1's text model; anything else is a `ForeignConfig` for
mlx-lm's models. A config only supplies numbers: which tensors there are is for
`experts.index` to say.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlxmoe.dsa_config import DsaConfig
from mlxmoe.errors import CheckpointError
from mlxmoe.kimi_config import KdaConfig, KimiConfig, Quantization, read_kimi
from mlxmoe.untrusted import Fields, read_json

__all__ = [
    "DsaConfig",
    "ForeignConfig",
    "KdaConfig",
    "KimiConfig",
    "ModelConfig",
    "Quantization",
    "parse_config",
    "read_config",
]

CONFIG_BYTES = 4 << 20
KIMI = {
    "KimiK3ForConditionalGeneration": "kimi_k3",
    "KimiK31ForConditionalGeneration": "kimi_k31",
    "kimi_k3": "kimi_k3",
    "kimi_k31": "kimi_k31",
}
MOST_LAYERS = 10_000
TOP_K_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_top_k",
    "moe_topk",
    "top_k_experts",
)
CONTEXT_KEYS = ("max_position_embeddings", "model_max_length", "max_seq_len", "n_positions")


@dataclass(frozen=True, slots=True)
class ForeignConfig:
    """A model of mlx-lm's: its `model_type` and its config.json as it is (unchecked)."""

    model_type: str
    raw: Mapping[str, object]
    eos_token_ids: tuple[int, ...] = ()

    def number(self, *keys: str) -> int | None:
        """The first of `keys` that is a positive whole number, text_config's before the top's."""
        text = self.raw.get("text_config")
        for key in keys:
            for place in (text, self.raw):
                value = place.get(key) if isinstance(place, dict) else None
                if type(value) is int and 0 < value < 1 << 40:
                    return value
        return None

    def section(self, key: str) -> Mapping[str, object]:
        """The object under `key`, text_config's before the top's; empty when absent."""
        for place in (self.raw.get("text_config"), self.raw):
            value = place.get(key) if isinstance(place, dict) else None
            if isinstance(value, dict):
                return value
        return {}

    @property
    def num_hidden_layers(self) -> int | None:
        """Layers, None when the file does not say."""
        return self.number("num_hidden_layers", "n_layers", "num_layers")

    @property
    def top_k(self) -> int | None:
        """K, routed experts a token and layer; None when the file does not say."""
        return self.number(*TOP_K_KEYS)

    @property
    def context_length(self) -> int | None:
        """Positions the model was made for; None when the file does not say."""
        return self.number(*CONTEXT_KEYS)


ModelConfig = KimiConfig | ForeignConfig


def read_config(folder: Path) -> ModelConfig:
    """The config of the checkpoint in `folder`; CheckpointError when it is not one."""
    path = folder / "config.json"
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder}: no such folder, expected a checkpoint's folder")
    if not os.path.exists(path):
        raise CheckpointError(f"{folder}: has no config.json, expected a checkpoint's folder")
    top = Fields(str(path), "", read_json(path, CONFIG_BYTES))
    path = folder / "generation_config.json"
    if not os.path.lexists(path):
        return parse_config(top)
    return parse_config(top, Fields(str(path), "", read_json(path, CONFIG_BYTES)))


def parse_config(top: Fields, generation: Fields | None = None) -> ModelConfig:
    """As `read_config`, from what config.json and generation_config.json hold."""
    model_type = top.data.get("model_type")
    if not isinstance(model_type, str) or not model_type.isprintable() or not model_type:
        raise top.error("model_type", "the name of a kind of model")
    text = top.find("text_config") or top
    places = [generation, top, text] if generation else [top, text]
    kind = _kimi_kind(top, text)
    if kind is None:
        for fields in (top, text):
            _check_counts(fields)
        return ForeignConfig(model_type, top.data, _eos(places, 1 << 32))
    return read_kimi(kind, top, text, _eos(places, text.whole("vocab_size", 1, 1 << 24)))


def _check_counts(fields: Fields) -> None:
    """mlx-lm builds as many layers as a config says: CheckpointError for absurd numbers."""
    for key, value in fields.data.items():
        if "layer" in key and isinstance(value, int | float) and abs(value) > MOST_LAYERS:
            raise fields.error(key, f"at most {MOST_LAYERS}; take the published config.json")


def _kimi_kind(top: Fields, text: Fields) -> str | None:
    architectures = top.data.get("architectures")
    words = [top.data["model_type"], *(architectures if isinstance(architectures, list) else ())]
    kinds = {KIMI[word] for word in words if isinstance(word, str) and word in KIMI}
    if kinds:
        return max(kinds)
    # K3's text model alone is a kimi_linear too; Kimi-Linear-48B has no residual blocks.
    if top.data["model_type"] == "kimi_linear" and text.has("attn_res_block_size"):
        return "kimi_k31" if text.has("dsa_config") else "kimi_k3"
    return None


def _eos(places: list[Fields], vocab: int) -> tuple[int, ...]:
    """The ids that end an answer: generation_config.json's word before config.json's."""
    for fields in places:
        if isinstance(fields.data.get("eos_token_id"), list):
            return fields.wholes("eos_token_id", 0, vocab - 1)
        if fields.has("eos_token_id"):
            return (fields.whole("eos_token_id", 0, vocab - 1),)
    return ()
