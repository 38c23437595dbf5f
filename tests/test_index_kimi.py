"""A Kimi checkpoint has exactly the published tensors, or is refused by the one that is off."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoints import Tensors, k3_shards, write_folder
from mlxmoe.config import KimiConfig, read_config
from mlxmoe.errors import CheckpointError
from mlxmoe.experts.index import read_manifest
from mlxmoe.experts.kimi_check import check_kimi, settle_indexer
from mlxmoe.manifest import ExpertPart, Manifest

FULL = (3, 6, 7)
INDEXER: Tensors = {
    "wq_b.weight": ("BF16", [128, 48]),
    "wk.weight": ("BF16", [32, 128]),
    "weights_proj.weight": ("BF16", [4, 128]),
    "k_norm.weight": ("BF16", [32]),
}


@pytest.fixture
def raw(goldens: Path) -> dict[str, Any]:
    """tiny-k3's config.json."""
    config: dict[str, Any] = json.loads((goldens / "tiny-k3" / "config.json").read_text())
    return config


def read(folder: Path) -> tuple[KimiConfig, Manifest]:
    """The settled config and the manifest of a folder."""
    config = read_config(folder)
    assert isinstance(config, KimiConfig)
    manifest = read_manifest(folder, config)
    return settle_indexer(config, manifest), manifest


def refusal(folder: Path) -> str:
    """The one printable line with which a folder is refused."""
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    assert str(caught.value).isprintable()
    return str(caught.value)


def with_indexer(raw: dict[str, Any], indexer: Tensors, layers: tuple[int, ...] = FULL) -> Tensors:
    """All tensors of a K3 and indexers in some layers, for one shard."""
    tensors = {name: t for shard in k3_shards(raw["text_config"]) for name, t in shard.items()}
    for layer in layers:
        prefix = f"language_model.model.layers.{layer}.self_attn.indexer."
        tensors |= {prefix + name: tensor for name, tensor in indexer.items()}
    return tensors


def test_every_trunk_tensor_is_needed_as_it_is(goldens: Path) -> None:
    """Each tensor that is lost, of another shape or another dtype is named."""
    config, manifest = read(goldens / "tiny-k31")
    trunk = manifest.trunk
    for i, entry in enumerate(trunk):
        bent = [
            replace(entry, shape=(*entry.shape, 1)),
            replace(entry, shape=(entry.shape[0] - 1, *entry.shape[1:])),
            replace(entry, dtype="F8_E4M3"),
            replace(entry, dtype="U8"),
        ]
        changes = [trunk[:i] + trunk[i + 1 :], *((*trunk[:i], b, *trunk[i + 1 :]) for b in bent)]
        if entry.name.endswith("A_log"):
            changes.pop(2)
        for change in changes:
            with pytest.raises(CheckpointError) as caught:
                check_kimi(replace(manifest, trunk=change), config)
            message = str(caught.value)
            assert entry.name.removeprefix("language_model.") in message or "indexer" in message


def test_a_log_may_be_padded(goldens: Path) -> None:
    """A_log has one value a head, or more of which the rest is padding; never fewer."""
    config, manifest = read(goldens / "tiny-k3")
    for rows, fits in ((4, True), (128, True), (3, False)):
        trunk = tuple(
            replace(entry, shape=(rows,)) if entry.name.endswith("A_log") else entry
            for entry in manifest.trunk
        )
        if fits:
            check_kimi(replace(manifest, trunk=trunk), config)
        else:
            with pytest.raises(CheckpointError, match=r"A_log is F32 \[3\]"):
                check_kimi(replace(manifest, trunk=trunk), config)


@pytest.mark.parametrize(
    ("name", "dtype", "word"),
    [
        ("language_model.model.layers.0.self_attn.extra.weight", "BF16", "is not a tensor of"),
        ("language_model.model.layers.8.input_layernorm.weight", "BF16", "is not a tensor of"),
        ("language_model.model.layers.1.self_attn.q_proj.weight_packed", "U8", "is packed"),
        ("language_model.lm_head.scales", "BF16", "is packed"),
        ("model.norm.weight", "BF16", "model.norm.weight is not a tensor"),
        ("language_model.model.layers.0.block_sparse_moe.experts.0.w1.weight", "BF16", "no up"),
    ],
)
def test_no_other_tensor_may_be_there(
    tmp_path: Path, raw: dict[str, Any], name: str, dtype: str, word: str
) -> None:
    """A tensor that the model has no use for, or a packed one outside the experts."""
    shards = k3_shards(raw["text_config"])
    shards[0][name] = (dtype, [4, 4])
    assert word in refusal(write_folder(tmp_path, raw, shards))


def test_experts_are_held_against_the_config(goldens: Path) -> None:
    """Count, shapes and dtypes of the experts, layer by layer."""
    config, manifest = read(goldens / "tiny-k3")
    layer = manifest.experts[2]
    part = layer.parts[0]

    def refused(*parts: ExpertPart, **change: Any) -> str:
        bent = replace(layer, parts=(*parts, *layer.parts[len(parts) :]), **change)
        with pytest.raises(CheckpointError) as caught:
            check_kimi(replace(manifest, experts=(*manifest.experts[:2], bent)), config)
        return str(caught.value)

    assert "is U8 [96, 33], expected U8 [96, 32]" in refused(replace(part, shape=(96, 33)))
    assert "is U32 [96, 32], expected U8" in refused(replace(part, dtype="U32"))
    assert "has 15 experts, expected 16" in refused(offsets=layer.offsets[:15])
    assert "no place for experts" in refused(prefix="model.layers.3.mlp")
    assert "has experts, expected none" in refused(layer=0)
    with pytest.raises(CheckpointError, match="layer 3 has no experts, expected 16"):
        check_kimi(replace(manifest, experts=manifest.experts[:2]), config)
    with pytest.raises(CheckpointError, match="no quantization_config"):
        check_kimi(manifest, replace(config, quantization=None))


def test_unpacked_experts_are_taken(tmp_path: Path, raw: dict[str, Any]) -> None:
    """A K3 whose experts are bfloat16, as its tensors say, whatever the config says."""
    shards = k3_shards(raw["text_config"])
    for number, shard in enumerate(shards):
        plain: Tensors = {}
        for name, (dtype, shape) in shard.items():
            if name.endswith("weight_packed"):
                plain[name.removesuffix("_packed")] = ("BF16", [shape[0], 2 * shape[1]])
            elif not name.endswith("weight_scale"):
                plain[name] = (dtype, shape)
        shards[number] = plain
    _, manifest = read(write_folder(tmp_path, raw, shards))

    assert [part.kind for part in manifest.experts[0].parts] == ["weight"] * 3
    assert manifest.record_bytes == 3 * 96 * 64 * 2


def test_names_without_the_wrapper_are_taken(tmp_path: Path, raw: dict[str, Any]) -> None:
    """The text model alone, its names without "language_model."."""
    flat = {
        name.removeprefix("language_model."): tensor
        for shard in k3_shards(raw["text_config"])
        for name, tensor in shard.items()
    }
    text = raw["text_config"] | {"model_type": "kimi_linear"}
    _, manifest = read(write_folder(tmp_path, text, [flat]))

    assert manifest.experts[0].prefix == "model.layers.1.block_sparse_moe"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, (4, 32, 2048)),
        ({"k_norm.bias": ("F32", [32]), "k_norm.weight": ("F32", [32])}, (4, 32, 2048)),
        ({"wq_b.weight": ("BF16", [128, 128])}, (4, 32, 2048)),
        (
            {
                "wq_b.weight": ("F16", [512, 48]),
                "weights_proj.weight": ("BF16", [8, 128]),
                "wk.weight": ("BF16", [64, 128]),
                "k_norm.weight": ("BF16", [64]),
            },
            (8, 64, 2048),
        ),
    ],
)
def test_indexers_without_a_word_in_the_config(
    tmp_path: Path, raw: dict[str, Any], change: Tensors, expected: tuple[int, ...]
) -> None:
    """Indexer tensors alone make a K3 one with DSA; their shapes give its sizes."""
    dsa = read(write_folder(tmp_path, raw, [with_indexer(raw, INDEXER | change)]))[0].dsa

    assert dsa is not None
    assert (dsa.n_heads, dsa.head_dim, dsa.topk) == expected


@pytest.mark.parametrize(
    ("change", "layers", "word"),
    [
        ({}, (3, 6), "layers [3, 6] have an indexer, expected all full-attention layers"),
        ({}, (2, 3, 6, 7), "layers [2, 3, 6, 7] have an indexer"),
        ({"wq_b.weight": ("BF16", [128, 64])}, FULL, "expected BF16 or F16 or F32 [128, 48]"),
        ({"wq_b.weight": ("BF16", [120, 48])}, FULL, "wq_b.weight is BF16 [120, 48]"),
        ({"wk.weight": ("BF16", [32])}, FULL, "wk.weight is missing or no matrix"),
        ({"wk.weight": ("BF16", [0, 128])}, FULL, "wk.weight is missing or no matrix"),
        ({"k_norm.bias": ("BF16", [31])}, FULL, "k_norm.bias is BF16 [31]"),
        ({"k_norm.weight": ("U8", [32])}, FULL, "k_norm.weight is U8"),
        ({"extra.weight": ("BF16", [4])}, FULL, "indexer.extra.weight is not a tensor"),
    ],
)
def test_bent_indexers_are_refused(
    tmp_path: Path, raw: dict[str, Any], change: Tensors, layers: tuple[int, ...], word: str
) -> None:
    """Indexers in some layers only, or with shapes that contradict each other."""
    tensors = with_indexer(raw, INDEXER | change, layers)
    assert word in refusal(write_folder(tmp_path, raw, [tensors]))


@pytest.mark.parametrize(
    ("dsa", "word"),
    [
        ({"n_heads": 8}, "indexer's n_heads is 8, its tensors say 4"),
        ({"head_dim": 64}, "indexer's head_dim is 64, its tensors say 32"),
    ],
)
def test_the_config_must_not_contradict_the_indexer(
    tmp_path: Path, raw: dict[str, Any], dsa: dict[str, int], word: str
) -> None:
    """Where the config speaks of the indexer's sizes, the tensors must agree."""
    raw["text_config"]["dsa_config"] = dsa
    assert word in refusal(write_folder(tmp_path, raw, [with_indexer(raw, INDEXER)]))


def test_a_k31_without_indexers_is_refused(tmp_path: Path, raw: dict[str, Any]) -> None:
    """Never dense in silence: a dsa_config, or K3.1's name, without indexer tensors."""
    shards = k3_shards(raw["text_config"])
    raw["text_config"]["dsa_config"] = {}
    assert "speaks of an indexer" in refusal(write_folder(tmp_path, raw, shards))
    del raw["text_config"]["dsa_config"]
    raw["architectures"] = ["KimiK31ForConditionalGeneration"]
    assert "speaks of an indexer" in refusal(write_folder(tmp_path, raw, shards))
