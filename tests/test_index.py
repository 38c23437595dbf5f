"""What a checkpoint folder holds: records and trunk as they are, all else refused by name."""

import json
import os
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from checkpoints import Tensors, k3_config, k3_shards, vision_shards, write_folder, write_shard
from mlxmoe.config import KimiConfig, read_config
from mlxmoe.errors import CheckpointError, ReadError
from mlxmoe.experts.index import check_unchanged, read_manifest
from mlxmoe.experts.kimi_check import settle_indexer
from mlxmoe.manifest import Manifest


def read(folder: Path) -> Manifest:
    """The manifest of a folder."""
    return read_manifest(folder, read_config(folder))


def refusal(folder: Path) -> str:
    """The one printable line with which a folder is refused."""
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    message = str(caught.value)
    assert message.isprintable()
    return message


@pytest.mark.parametrize("name", ["tiny-k3", "tiny-k31"])
def test_records_are_the_experts_bytes(goldens: Path, name: str) -> None:
    """Every part of every expert lies where the safetensors library reads it."""
    manifest = read(goldens / name)
    parts = {"gate": "w1", "up": "w3", "down": "w2"}
    kinds = {"weight": "weight_packed", "scales": "weight_scale"}

    shards = [safe_open(shard.path, "np") for shard in manifest.files]
    assert [layer.layer for layer in manifest.experts] == list(range(1, 8))
    for layer in manifest.experts:
        assert layer.num_experts == 16
        assert layer.prefix == f"language_model.model.layers.{layer.layer}.block_sparse_moe"
        for p, part in enumerate(layer.parts):
            for expert in range(16):
                file, at = int(layer.files[expert, p]), int(layer.offsets[expert, p])
                found = manifest.files[file].path.read_bytes()[at : at + part.nbytes]
                own = f"experts.{expert}.{parts[part.projection]}.{kinds[part.kind]}"
                expected = shards[file].get_tensor(f"{layer.prefix}.{own}")
                assert expected.shape == part.shape
                assert expected.tobytes() == found


def test_the_trunk_is_everything_else(goldens: Path) -> None:
    """Trunk, vision and experts together are the index's tensors; sizes add up to the files'."""
    for name in ("tiny-k3", "tiny-k31"):
        manifest = read(goldens / name)
        index = json.loads((goldens / name / "model.safetensors.index.json").read_text())
        names = {entry.name for entry in (*manifest.trunk, *manifest.vision)}
        experts = {name for name in index["weight_map"] if ".experts." in name}
        vision_bytes = sum(entry.nbytes for entry in manifest.vision)
        total = manifest.trunk_bytes + vision_bytes + manifest.expert_bytes

        assert names | experts == index["weight_map"].keys()
        assert not names & experts
        assert all("vision_tower" in e.name or "mm_proj" in e.name for e in manifest.vision)
        assert total == index["metadata"]["total_size"]


def test_the_indexer_is_settled_by_tensors(goldens: Path) -> None:
    """K3.1's numbers come from its tensors, K3 has no indexer."""
    for name, expected in (("tiny-k3", None), ("tiny-k31", (4, 32, 24))):
        config = read_config(goldens / name)
        assert isinstance(config, KimiConfig)
        dsa = settle_indexer(config, read(goldens / name)).dsa
        assert expected == (dsa and (dsa.n_heads, dsa.head_dim, dsa.topk))


def test_the_whole_k3_reads_in_seconds(tmp_path: Path) -> None:
    """The published K3, its headers as published, its data holes: 497,220 tensors, all sizes."""
    config = k3_config()
    shards = [*k3_shards(config["text_config"]), *vision_shards()]
    assert sum(len(shard) for shard in shards) == 497_220
    write_folder(tmp_path, config, shards)
    del shards
    begin = time.monotonic()
    manifest = read(tmp_path)

    assert time.monotonic() - begin < 60
    assert len(manifest.files) == 96
    assert manifest.record_bytes == 17_547_264
    assert manifest.expert_bytes == 1_446_456_066_048
    vision = sum(entry.nbytes for entry in manifest.vision)
    assert vision == 802_428_928 + 92_289_024
    assert manifest.trunk_bytes + vision == 114_404_258_816
    assert [len(layer.extents(895)) for layer in manifest.experts] == [1] * 92
    shutil.rmtree(tmp_path)


def foreign(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """A single-file checkpoint of another model."""
    folder.mkdir(exist_ok=True)
    raw = {"model_type": "some_moe", "num_hidden_layers": 2, "num_experts_per_tok": 2} | config
    (folder / "config.json").write_text(json.dumps(raw))
    write_shard(folder / "model.safetensors", tensors, pad=False)
    return folder


def stacked(block: str = "switch_mlp") -> Tensors:
    """mlx-lm's stacked experts of one layer, with a router and a shared expert."""
    tensors: Tensors = {"model.embed_tokens.weight": ("BF16", [8, 4])}
    for name, rows, columns in (("gate_proj", 6, 4), ("up_proj", 6, 4), ("down_proj", 4, 6)):
        path = f"model.layers.1.mlp.{block}.{name}"
        tensors[f"{path}.weight"] = ("U32", [5, rows, columns])
        tensors[f"{path}.scales"] = ("BF16", [5, rows, 2])
        tensors[f"{path}.biases"] = ("BF16", [5, rows, 2])
    tensors["model.layers.1.mlp.gate.weight"] = ("BF16", [5, 4])
    tensors["model.layers.1.mlp.shared_expert.gate_proj.weight"] = ("BF16", [4, 4])
    return tensors


@pytest.mark.parametrize("block", ["switch_mlp", "experts"])
def test_stacked_experts_are_rows(tmp_path: Path, block: str) -> None:
    """Expert e of a stacked tensor is its e-th row; the rest of the block is trunk."""
    manifest = read(foreign(tmp_path, stacked(block), num_experts=5))
    (layer,) = manifest.experts
    first, second = layer.parts[:2]

    assert (layer.prefix, layer.num_experts) == ("model.layers.1.mlp", 5)
    assert len(layer.parts) == 9
    assert (first.projection, first.kind, first.dtype) == ("gate", "weight", "U32")
    assert (first.shape, first.nbytes, second.shape, second.nbytes) == ((6, 4), 96, (6, 2), 24)
    assert np.diff(layer.offsets, axis=0).tolist() == [[96, 24, 24, 96, 24, 24, 96, 16, 16]] * 4
    assert layer.record_bytes == 3 * 96 + 4 * 24 + 2 * 16
    assert len(manifest.trunk) == 3
    assert len(layer.extents(2)) == 9


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_an_expert_a_tensor(tmp_path: Path, names: tuple[str, str, str]) -> None:
    """Hugging Face names give gate, up and down, in any order in the file."""
    tensors: Tensors = {}
    for expert in (2, 0, 1):
        for name, shape in zip(names, ([6, 4], [6, 4], [4, 6]), strict=True):
            tensors[f"model.layers.0.mlp.experts.{expert}.{name}.weight"] = ("BF16", shape)
    (layer,) = read(foreign(tmp_path, tensors, num_hidden_layers=1)).experts

    assert [part.projection for part in layer.parts] == ["gate", "up", "down"]
    assert [part.shape for part in layer.parts] == [(6, 4), (6, 4), (4, 6)]
    assert (layer.offsets[:, 0] - layer.offsets[2, 0]).tolist() == [144, 288, -0]
    assert layer.offsets[2, 0] < layer.offsets[0, 0] < layer.offsets[1, 0]


def test_draft_layers_and_vision_are_set_apart(tmp_path: Path) -> None:
    """Multi-token prediction is dropped, the image side is listed apart; even their experts."""
    tensors: Tensors = stacked() | {
        "model.layers.2.mlp.experts.0.gate_proj.weight": ("BF16", [4, 4]),
        "mtp.layers.0.mlp.experts.gate_up_proj": ("BF16", [4, 4]),
        "model.visual.blocks.0.attn.qkv.weight": ("BF16", [4, 4]),
        "vision_tower.encoder.weight": ("BF16", [4, 4]),
    }
    manifest = read(foreign(tmp_path, tensors))

    assert [layer.layer for layer in manifest.experts] == [1]
    assert len(manifest.trunk) == 3
    assert len(manifest.vision) == 2


def test_a_model_without_experts(tmp_path: Path) -> None:
    """A dense model has a trunk and no record."""
    manifest = read(foreign(tmp_path, {"model.norm.weight": ("F32", [4])}))

    assert manifest.experts == ()
    assert (manifest.record_bytes, manifest.trunk_bytes) == (0, 16)


UP = "model.layers.1.mlp.switch_mlp.up_proj"
ONE = "model.layers.0.mlp.experts.0"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model.layers.0.mlp.experts.gate_up_proj": ("BF16", [5, 4, 4])}, "gate_up_proj"),
        ({f"{UP}.bias": ("BF16", [5, 6])}, f"{UP}.bias (BF16): this layout"),
        ({"model.layers.0.mlp.switch_mlp.fc1.weight": ("BF16", [5, 4, 4])}, "fc1.weight"),
        ({f"{ONE}.up_proj.qweight": ("U32", [4, 4])}, "up_proj.qweight"),
        ({f"{ONE}.up_proj.weight_packed": ("U32", [4, 4])}, "weight_packed (U32)"),
        ({f"{ONE}.up_proj.weight_scale": ("BF16", [4, 4])}, "weight_scale (BF16)"),
        ({"model.mlp.experts.0.up_proj.weight": ("BF16", [4, 4])}, "this layout"),
        ({f"{ONE}.up_proj.weight": ("BF16", [4, 4])}, "have no gate projection"),
        ({"model.layers.1.mlp.experts.07.up_proj.weight": ("BF16", [4, 4])}, "07.up_proj"),
        ({"model.layers.1.mlp.experts.0.up_proj.weight": ("BF16", [4, 4])}, "there twice"),
        ({"model.layers.1.moe.switch_mlp.up_proj.weight": ("BF16", [5, 4, 4])}, "two sets"),
        ({f"{UP}.weight": ("U32", [5, 24])}, f"{UP}.weight (U32): this layout"),
        ({f"{UP}.weight": ("U32", [0, 6, 4])}, "this layout"),
        ({f"{UP}.weight": ("U8", [1 << 17, 1, 1])}, "this layout"),
        ({f"{UP}.scales": ("BF16", [4, 6, 2])}, "expert 4 has no up scales"),
        ({f"{UP}.weight": ("U32", [9, 6, 4])}, "expert 5 has no gate weight"),
    ],
)
def test_other_layouts_of_experts_are_refused(tmp_path: Path, change: Tensors, word: str) -> None:
    """Tensors that look like experts and are not of a known layout are named."""
    assert word in refusal(foreign(tmp_path, stacked() | change))


def test_expert_counts_are_held_against_the_config(tmp_path: Path) -> None:
    """A config that states another number of experts, or takes more than there are."""
    assert "has 5 experts, expected 8" in refusal(foreign(tmp_path, stacked(), num_experts=8))
    assert "takes 6 a token" in refusal(foreign(tmp_path, stacked(), num_experts_per_tok=6))


def test_more_layers_than_the_files_hold_are_refused(tmp_path: Path) -> None:
    """mlx-lm would build them all, in memory, before it missed their weights."""
    told = refusal(foreign(tmp_path, stacked(), num_hidden_layers=9000))
    assert "layers, expected 9000 by config.json" in told


def test_sister_experts_are_alike(tmp_path: Path) -> None:
    """An expert of another shape, or a missing one, is named."""
    tensors: Tensors = {
        f"model.layers.0.mlp.experts.{e}.{name}_proj.weight": ("BF16", [4, 4])
        for e in range(3)
        for name in ("gate", "up", "down")
    }
    odd = "model.layers.0.mlp.experts.1.up_proj.weight"
    message = refusal(foreign(tmp_path, tensors | {odd: ("BF16", [4, 5])}))
    assert f"{odd} is BF16 [4, 5], expected BF16 [4, 4]" in message
    del tensors[odd]
    assert "expert 1 has no up weight" in refusal(foreign(tmp_path, tensors))


def test_a_file_changed_under_our_feet(tmp_path: Path) -> None:
    """A shard written, cut or lost after its header was read is a read error, not noise."""
    folder = foreign(tmp_path, stacked())
    manifest = read(folder)
    check_unchanged(manifest)
    path = folder / "model.safetensors"

    os.utime(path, ns=(1, 1))
    with pytest.raises(ReadError, match="changed since it was opened"):
        check_unchanged(manifest)
    path.unlink()
    with pytest.raises(ReadError, match="can't be read now"):
        check_unchanged(manifest)


def test_shards_may_be_links_out_of_the_folder(tmp_path: Path) -> None:
    """Hugging Face's cache links shards to blobs elsewhere: that is fine."""
    folder = foreign(tmp_path / "snapshot", stacked())
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")

    assert len(read(folder).experts) == 1


def test_a_header_longer_than_any_real_one(tmp_path: Path) -> None:
    """A stated length of 512 MB is refused before anything of it is read."""
    folder = foreign(tmp_path, stacked())
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 1 << 29))
        file.truncate(1 << 30)
    assert "header length 536,870,912, expected 2 to 100,000,000" in refusal(folder)
