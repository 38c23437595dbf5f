"""Holds a Kimi checkpoint against what its config says: every tensor, no other.

Also settles the indexer: a config only supplies numbers, the tensors decide.
"""

from dataclasses import replace

from mlxmoe.config import DsaConfig, KimiConfig
from mlxmoe.errors import CheckpointError
from mlxmoe.experts.published import (
    FLOATS,
    INDEXER,
    LANGUAGE,
    Shape,
    expert_shapes,
    indexer_shapes,
    trunk_shapes,
)
from mlxmoe.manifest import ExpertLayer, ExpertPart, Manifest, TensorEntry

PACKED = (".weight_packed", ".weight_scale", ".scales", ".biases", ".qweight")


def check_kimi(manifest: Manifest, config: KimiConfig) -> None:
    """CheckpointError naming the first tensor that is missing, extra, or of a wrong shape
    or dtype."""
    found = _by_name(manifest)
    wanted = trunk_shapes(config)
    dsa = settle_indexer(config, manifest).dsa
    if dsa is not None:
        wanted |= _indexers(config, dsa, found)
    for name, entry in found.items():
        if name not in wanted:
            raise _extra(manifest, entry)
    for name, shape in wanted.items():
        if name not in found:
            raise CheckpointError(
                f"{manifest.folder}: tensor {name} {list(shape)} is missing, "
                f"config.json asks for it ({len(wanted.keys() - found.keys())} missing in all)"
            )
        _check_entry(manifest, found[name], shape)
    _check_experts(manifest, config)


def settle_indexer(config: KimiConfig, manifest: Manifest) -> KimiConfig:
    """`config` with `dsa` as the indexers' tensors have it: None without them.

    CheckpointError when the config speaks of an indexer and there is none, when only some
    full-attention layers have one, or when their shapes contradict the config.
    """
    found = _by_name(manifest)
    layers = [i for i in range(config.num_hidden_layers) if _name(i, "wk.weight") in found]
    if not layers:
        if config.dsa is not None:
            raise CheckpointError(
                f"{manifest.folder}: config.json speaks of an indexer (dsa_config) and there is "
                f"no tensor {_name(config.full_attention_layers[0], 'wk.weight')}"
            )
        return config
    if tuple(layers) != config.full_attention_layers:
        raise CheckpointError(
            f"{manifest.folder}: layers {layers} have an indexer, expected all full-attention "
            f"layers {list(config.full_attention_layers)} and no other (counted from 0)"
        )
    dsa = config.dsa or DsaConfig(32, 128, 2048, config.rms_norm_eps)
    heads = _rows(manifest, found, layers[0], "weights_proj.weight")
    width = _rows(manifest, found, layers[0], "wk.weight")
    for name, said, size in (("n_heads", dsa.n_heads, heads), ("head_dim", dsa.head_dim, width)):
        if name in dsa.stated and said != size:
            raise CheckpointError(
                f"{manifest.folder}: config.json says the indexer's {name} is {said}, "
                f"its tensors say {size}"
            )
    return replace(config, dsa=replace(dsa, n_heads=heads, head_dim=width))


def _name(layer: int, tail: str) -> str:
    return f"model.layers.{layer}.{INDEXER}{tail}"


def _rows(manifest: Manifest, found: dict[str, TensorEntry], layer: int, tail: str) -> int:
    entry = found.get(_name(layer, tail))
    if entry is None or len(entry.shape) != 2 or not entry.shape[0]:
        raise CheckpointError(
            f"{manifest.folder}: tensor {_name(layer, tail)} is missing or no matrix, "
            "its layer has an indexer"
        )
    return entry.shape[0]


def _indexers(
    config: KimiConfig, dsa: DsaConfig, found: dict[str, TensorEntry]
) -> dict[str, Shape]:
    """The indexers' tensors. `wq_b` reads the q-LoRA residual or the hidden state,
    and k_norm's bias is optional, alike in all layers."""
    first = config.full_attention_layers[0]
    query = found.get(_name(first, "wq_b.weight"))
    width = config.q_lora_rank
    if query is not None and query.shape[1:] == (config.hidden_size,):
        width = config.hidden_size
    rows = indexer_shapes(config, dsa, width)
    if _name(first, "k_norm.bias") in found:
        rows[f"{INDEXER}k_norm.bias"] = (dsa.head_dim,)
    return {
        f"model.layers.{layer}.{name}": shape
        for layer in config.full_attention_layers
        for name, shape in rows.items()
    }


def _by_name(manifest: Manifest) -> dict[str, TensorEntry]:
    """The trunk by names without "language_model.", which either all have or none."""
    prefixed = [entry.name.startswith(LANGUAGE) for entry in manifest.trunk]
    if any(prefixed) and not all(prefixed):
        entry = manifest.trunk[prefixed.index(False)]
        raise _extra(manifest, entry)
    return {entry.name.removeprefix(LANGUAGE): entry for entry in manifest.trunk}


def _extra(manifest: Manifest, entry: TensorEntry) -> CheckpointError:
    path = manifest.files[entry.file].path
    if entry.name.endswith(PACKED):
        return CheckpointError(f"{path}: {entry.name} is packed; only routed experts may be")
    return CheckpointError(f"{path}: {entry.name} is not a tensor of this model by its config.json")


def _check_entry(manifest: Manifest, entry: TensorEntry, shape: Shape) -> None:
    fits = entry.shape == shape
    if entry.name.endswith(".A_log"):
        fits = len(entry.shape) == 1 and entry.shape[0] >= shape[0]
    if not fits or entry.dtype not in FLOATS:
        raise CheckpointError(
            f"{manifest.files[entry.file].path}: {entry.name} is {entry.dtype} "
            f"{list(entry.shape)}, expected {' or '.join(FLOATS)} {list(shape)}"
        )


def _check_experts(manifest: Manifest, config: KimiConfig) -> None:
    layers = {layer.layer: layer for layer in manifest.experts}
    for number in sorted({*config.moe_layers, *layers}):
        layer = layers.get(number)
        if layer is None:
            raise CheckpointError(
                f"{manifest.folder}: layer {number} has no experts, expected {config.num_experts}"
            )
        if number not in config.moe_layers:
            raise CheckpointError(
                f"{manifest.folder}: {layer.prefix} has experts, expected none by config.json"
            )
        _check_layer(manifest, config, layer)


def _check_layer(manifest: Manifest, config: KimiConfig, layer: ExpertLayer) -> None:
    place = f"{manifest.folder}: {layer.prefix}"
    if layer.prefix.removeprefix(LANGUAGE) != f"model.layers.{layer.layer}.block_sparse_moe":
        raise CheckpointError(f"{place} is no place for experts in this model")
    if layer.num_experts != config.num_experts:
        raise CheckpointError(
            f"{place} has {layer.num_experts} experts, expected {config.num_experts}"
        )
    packed = any(part.kind == "scales" for part in layer.parts)
    if packed and config.quantization is None:
        raise CheckpointError(f"{place}: packed, yet config.json has no quantization_config")
    wanted = expert_shapes(config, packed)
    dtypes = ("U8",) if packed else FLOATS
    found: dict[tuple[str, str], ExpertPart] = {
        (part.projection, part.kind): part for part in layer.parts
    }
    for key in sorted({*wanted, *found}):
        part = found.get(key)
        if part is None or part.shape != wanted.get(key) or part.dtype not in dtypes:
            is_there = f"{part.dtype} {list(part.shape)}" if part else "missing"
            expected = f"{dtypes[0]} {list(wanted[key])}" if key in wanted else "none"
            raise CheckpointError(
                f"{place}: the experts' {' '.join(key)} is {is_there}, expected {expected}"
            )
