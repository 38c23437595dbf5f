"""Checkpoints with the same weights as a golden one, stored another way."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from networks import load_arrays

Change = Callable[[str, mx.array], tuple[str, mx.array]]


def rewrite(source: Path, folder: Path, change: Change) -> Path:
    """A copy of `source` whose text tensors went through `change`, in one shard."""
    folder.mkdir()
    arrays: dict[str, mx.array] = {}
    for shard in sorted(source.glob("model-*.safetensors")):
        for name, array in load_arrays(shard).items():
            if name.startswith("language_model."):
                new_name, new_array = change(name, array)
                arrays[new_name] = new_array
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    for name in ("config.json", "tokenizer_config.json", "tiktoken.model"):
        shutil.copy(source / name, folder / name)
    return folder


def unpack_experts(source: Path, folder: Path) -> Path:
    """Every MXFP4 expert as plain bfloat16, which holds its values exactly."""
    scales: dict[str, mx.array] = {}
    for shard in sorted(source.glob("model-*.safetensors")):
        scales |= {n: a for n, a in load_arrays(shard).items() if n.endswith("weight_scale")}

    def change(name: str, array: mx.array) -> tuple[str, mx.array]:
        if not name.endswith(".weight_packed"):
            return name, array
        plain = name.removesuffix("_packed")
        scale = scales[f"{plain}_scale"]
        weight = mx.dequantize(
            array.view(mx.uint32), scale, group_size=32, bits=4, mode="mxfp4", dtype=mx.bfloat16
        )
        return plain, weight

    rewrite(source, folder, change)
    arrays = {
        name: array
        for name, array in load_arrays(folder / "model.safetensors").items()
        if not name.endswith("weight_scale")
    }
    mx.eval(arrays)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    return folder


def without_wrapper(source: Path, folder: Path) -> Path:
    """The text model alone: flat config, names without "language_model."."""
    rewrite(source, folder, lambda name, array: (name.removeprefix("language_model."), array))
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config["text_config"]))
    return folder
