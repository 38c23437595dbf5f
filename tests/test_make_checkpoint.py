"""The random checkpoint is one: published names, shapes, dtypes, files; and it runs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiktoken
from mlx_lm.utils import load_model
from safetensors import safe_open
from tiktoken.load import load_tiktoken_bpe

import make_checkpoint
from checkpoint_tensors import Sizes, Tensor, layer_tensors, top_tensors
from checkpoint_writer import CHUNK, chunks, in_file_order

# K3 as published; the figures below were reported for its files.
K3 = Sizes(
    layers=93, experts=896, top_k=16, hidden=7168, heads=96, head_dim=128, latent=3584,
    expert_width=3072, dense_width=33792, shared=2, kv_lora=512, q_lora=1536, nope=128, rope=64,
    v_dim=128, block=12, vocab=163840, full_attention=(*range(4, 93, 4), 93), indexer=False,
    index_heads=32, index_dim=128, index_topk=2048,
)  # fmt: skip
LIKE_TINY = ["--vocab", "1600", "--full-attention", "4,7,8"]


def tensors_of(folder: Path) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    """Name -> (shard, dtype, shape), as the safetensors library reads them."""
    found = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, "numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                part = opened.get_slice(name)
                found[name] = (shard.name, part.get_dtype(), tuple(part.get_shape()))
    return found


def text_only(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) without the vision tower."""
    return {
        name: (dtype, shape)
        for name, (_, dtype, shape) in tensors_of(folder).items()
        if name.startswith("language_model.")
    }


def missing(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str = "") -> list[str]:
    """Keys of `ours` that `theirs` lacks or has with another value."""
    found = []
    for key, value in ours.items():
        there = theirs.get(key)
        if isinstance(value, dict) and isinstance(there, dict):
            found += missing(value, there, f"{path}{key}.")
        elif there != value:
            found.append(f"{path}{key}: {value!r} is not {there!r}")
    return found


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random K3 of the goldens' sizes."""
    folder = tmp_path_factory.mktemp("k3")
    assert make_checkpoint.main([str(folder), *LIKE_TINY]) == 0
    return folder


@pytest.fixture(scope="module")
def k31(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random K3.1 of the goldens' sizes."""
    folder = tmp_path_factory.mktemp("k31")
    assert make_checkpoint.main([str(folder), *LIKE_TINY, "--indexer"]) == 0
    return folder


def test_tensors_are_the_published_ones(k3: Path, k31: Path, goldens: Path) -> None:
    """At the goldens' sizes the names, dtypes and shapes are theirs."""
    assert text_only(goldens / "tiny-k3") == text_only(k3)
    assert text_only(goldens / "tiny-k31") == text_only(k31)


def test_config_says_what_the_published_one_says(k3: Path, k31: Path, goldens: Path) -> None:
    """Every key written has the golden config's value."""
    for ours, theirs in ((k3, "tiny-k3"), (k31, "tiny-k31")):
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            golden = json.loads((goldens / theirs / name).read_text())
            assert missing(json.loads((ours / name).read_text()), golden) == []
    assert missing({"a": {"b": 1}}, {"a": {"b": 2}}) == ["a.b: 1 is not 2"]


def test_index_names_the_shard_of_each_tensor(k31: Path) -> None:
    """The index maps every tensor to the file that holds it: one a layer, then the top."""
    index = json.loads((k31 / "model.safetensors.index.json").read_text())
    found = tensors_of(k31)

    assert {name: shard for name, (shard, _, _) in found.items()} == index["weight_map"]
    for name, (shard, _, _) in found.items():
        words = name.split(".")
        number = int(words[3]) + 1 if words[2] == "layers" else 9
        assert f"model-{number:05d}-of-000009.safetensors" == shard


def test_sizes_are_those_of_the_real_files() -> None:
    """At K3's sizes the bytes and counts are the ones reported for its shards."""

    def trunk(layer: int) -> int:
        tensors = layer_tensors(K3, layer)
        return sum(tensor.nbytes for tensor in tensors if ".experts." not in tensor.name)

    whole = list(layer_tensors(K3, 1))
    record = [tensor for tensor in whole if ".experts.7." in tensor.name]

    assert (2_341_213_184, 1_267_744_256, 844_335_616) == (trunk(0), trunk(1), trunk(3))
    assert len(whole) == 5404
    assert sum(tensor.nbytes for tensor in whole) == 16_990_911_504 - 8 - 818_696
    assert sum(tensor.nbytes for tensor in record) == 17_547_264
    assert sum(tensor.nbytes for tensor in top_tensors(K3)) == 2 * 2_348_810_240 + 3 * 2 * 7168


def test_an_expert_is_one_run_of_bytes() -> None:
    """The six tensors of an expert are neighbours in the file."""
    names = [tensor.name for tensor in in_file_order(layer_tensors(K3, 1))]
    places = [place for place, name in enumerate(names) if ".experts.10." in name]

    assert len(places) == 6
    assert list(range(places[0], places[0] + 6)) == places


def test_same_seed_same_bytes(k31: Path, tmp_path: Path) -> None:
    """The same arguments write the same files; another seed writes other weights."""
    again, other = tmp_path / "again", tmp_path / "other"
    make_checkpoint.main([str(again), *LIKE_TINY, "--indexer"])
    make_checkpoint.main([str(other), *LIKE_TINY, "--indexer", "--seed", "1"])
    names = sorted(path.name for path in k31.iterdir())
    first = "model-00001-of-000009.safetensors"

    assert names == sorted(path.name for path in again.iterdir())
    assert all((k31 / name).read_bytes() == (again / name).read_bytes() for name in names)
    assert (k31 / first).read_bytes() != (other / first).read_bytes()


def test_fp32_values_need_fp32_and_a_log_is_padded(k3: Path) -> None:
    """Gates and norms that are fp32 in the file hold more than bf16; A_log ends in zeros."""
    prefix = "language_model.model.layers.1"
    with safe_open(k3 / "model-00002-of-000009.safetensors", "numpy") as shard:
        a_log = shard.get_tensor(f"{prefix}.self_attn.A_log")
        bias = shard.get_tensor(f"{prefix}.block_sparse_moe.gate.e_score_correction_bias")

    assert a_log.shape == (32,)
    assert np.all(a_log[:4] != 0)
    assert np.all(a_log[4:] == 0)
    assert np.all(bias.view(np.uint32) & 0xFFFF != 0)


def test_experts_differ_and_scales_are_sane(k3: Path) -> None:
    """No two experts share their bytes; no scale is NaN or far from its fan-in."""
    with safe_open(k3 / "model-00003-of-000009.safetensors", "numpy") as shard:
        name = "language_model.model.layers.2.block_sparse_moe.experts.{}.w2.weight_{}"
        packed = [shard.get_tensor(name.format(e, "packed")) for e in range(16)]
        scales = [shard.get_tensor(name.format(e, "scale")) for e in range(16)]

    assert len({array.tobytes() for array in packed}) == 16
    assert {121, 122, 123} == {int(value) for array in scales for value in array.flat}


def test_bf16_rounds_to_the_nearest() -> None:
    """A bf16 tensor is its float32 twin within half a step, over more than one chunk."""
    shape = (2, CHUNK // 2 + 8)
    wide = np.concatenate(list(chunks(Tensor("x", "F32", shape, std=1.0), 0)))
    narrow = np.concatenate(list(chunks(Tensor("x", "BF16", shape, std=1.0), 0)))
    back = (narrow.astype(np.uint32) << 16).view(np.float32)

    assert wide.shape == (CHUNK + 16,)
    assert np.all(np.abs(back - wide) <= np.abs(wide) * 2.0**-8)
    assert abs(float(wide.std()) - 1) < 0.01


def test_vocabulary_is_whole_and_its_words_are_one_token(k3: Path, tmp_path: Path) -> None:
    """Ranks count up without a gap, every byte is there, the layout's words cost one token."""
    ranks = load_tiktoken_bpe(str(k3 / "tiktoken.model"))
    encoding = tiktoken.Encoding("random", pat_str=r"\S+|\s+", mergeable_ranks=ranks,
                                 special_tokens={})  # fmt: skip
    make_checkpoint.main([str(tmp_path / "large"), "--vocab", "70000", "--layers", "1"])
    large = load_tiktoken_bpe(str(tmp_path / "large/tiktoken.model"))

    assert list(range(1600 - 256)) == sorted(ranks.values())
    assert all(bytes([value]) in ranks for value in range(256))
    assert [len(encoding.encode(word)) for word in ("message", "assistant", "argument")] == [1] * 3
    assert len(large) == 70000 - 256


def test_mlx_lm_runs_it(k3: Path) -> None:
    """mlx-lm's own kimi_k3 loads it and its logits are finite, spread and depend on the prompt."""
    model, config = load_model(k3)
    ids = mx.array(np.random.default_rng(0).integers(0, 1344, (1, 24)))
    logits = np.array(model(ids, None).astype(mx.float32))[0]

    assert config["model_type"] == "kimi_k3"
    assert np.all(np.isfinite(logits))
    assert 1 < logits.std() < 4
    assert len(set(logits.argmax(-1).tolist())) > 12


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--top-k", "17"], "--top-k 17 is more than --experts 16"),
        (["--latent", "40"], "--latent is 40, it must be a multiple of 32"),
        (["--full-attention", "0,4"], "--full-attention must be like 4,8"),
        (["--vocab", "300"], "--vocab is 300, it must be at least 512"),
    ],
)
def test_impossible_sizes_are_refused(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A size that can't be is misuse (2), with what was found and expected; nothing is written."""
    with pytest.raises(SystemExit) as stopped:
        make_checkpoint.main([str(tmp_path / "x"), *arguments])

    assert stopped.value.code == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_filled_folder_is_replaced_only_by_force(tmp_path: Path) -> None:
    """Without --force a folder that holds something is left alone; with it, no old shard stays."""
    make_checkpoint.main([str(tmp_path), "--layers", "3"])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(SystemExit):
        make_checkpoint.main([str(tmp_path), "--layers", "1"])

    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert make_checkpoint.main([str(tmp_path), "--layers", "1", "--force"]) == 0
    assert {"model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"} == {
        path.name for path in tmp_path.glob("model-*-of-*")
    }


def test_a_full_disk_is_said_before_writing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More than the disk has room for fails (1) with both figures, before any file is made."""
    width = str(1 << 24)
    arguments = ["--layers", "1", "--dense-width", width, "--hidden", str(1 << 20)]

    assert make_checkpoint.main([str(tmp_path / "x"), *arguments]) == 1
    assert "GB free, this needs" in capsys.readouterr().err
    assert list((tmp_path / "x").iterdir()) == []
