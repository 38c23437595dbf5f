"""Checkpoints of other models that lie: one clear error each, before mlx-lm is harmed."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from foreign_checkpoints import QWEN, make_checkpoint
from mlxmoe.checkpoint import open_checkpoint
from mlxmoe.errors import CheckpointError
from networks import load_arrays, streamed


def set_config(folder: Path, key: str, value: object) -> None:
    """Change one key of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


def add_shard(folder: Path) -> None:
    """A shard that no index names, with other embeddings in it."""
    shard = folder / "model-00002-of-00002.safetensors"
    mx.save_safetensors(str(shard), {"model.embed_tokens.weight": mx.zeros((256, 64))})


def narrow_experts(folder: Path) -> None:
    """Experts of a type that nothing can multiply."""
    path = folder / "model.safetensors"
    arrays = {
        name: array.astype(mx.int8) if "switch_mlp" in name else array
        for name, array in load_arrays(path).items()
    }
    mx.eval(arrays)
    mx.save_safetensors(str(path), arrays)


LIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "extra shard": (add_shard, "model-00002-of-00002.safetensors: is not in the index"),
    "narrow experts": (narrow_experts, "is I8 of"),
    "no heads": (lambda folder: set_config(folder, "num_attention_heads", 0), "can't build"),
    "huge width": (lambda folder: set_config(folder, "hidden_size", 1 << 40), "can't build"),
    "a pipe": (lambda folder: os.mkfifo(folder / "tokenizer.json"), "is no regular file"),
    "trillions of layers": (
        lambda folder: set_config(folder, "num_hidden_layers", 1 << 40),
        "at most 10000",
    ),
}


@pytest.mark.parametrize("lie", list(LIES))
def test_a_lie_is_named(tmp_path: Path, lie: str) -> None:
    """The error is one line that names the folder or file and what is wrong with it."""
    spoil, told = LIES[lie]
    make_checkpoint(tmp_path / "model", QWEN, None)
    spoil(tmp_path / "model")

    with pytest.raises(CheckpointError) as raised:
        streamed(open_checkpoint(tmp_path / "model"), 8).close()

    assert told in str(raised.value)
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)
