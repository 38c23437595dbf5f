"""Networks to compare with: the same checkpoint with every expert in memory, plain.

Reads the shards with `mx.load` and stacks the experts, so nothing of the index, the
store, the tables or the slots is shared with what is tested against it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxmoe.checkpoint import Checkpoint, open_checkpoint
from mlxmoe.config import KimiConfig
from mlxmoe.events import Progress
from mlxmoe.loader import Loaded, indexer_config, load
from mlxmoe.models.kimi_k3 import Model
from mlxmoe.models.state import Network

PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def quiet(progress: Progress) -> None:
    """Progress that nobody watches."""


def load_arrays(file: Path) -> dict[str, mx.array]:
    """All tensors of a safetensors file."""
    arrays = mx.load(str(file))
    assert isinstance(arrays, dict)
    return arrays


def load_main(goldens: Path, name: str) -> dict[str, mx.array]:
    """A checkpoint's main golden tensors."""
    return load_arrays(goldens / name / "goldens/main.safetensors")


def plain_network(folder: Path, dtype: mx.Dtype = mx.float32, dense: bool = False) -> Model:
    """The checkpoint's network without streaming; `dense` leaves the indexer out."""
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    assert isinstance(config, KimiConfig)
    arrays: dict[str, mx.array] = {}
    for shard in sorted(folder.glob("model-*.safetensors")):
        arrays.update(load_arrays(shard))
    dsa = None if dense else indexer_config(config, checkpoint.manifest.trunk)
    model = Model(config, dsa)
    weights = {}
    for layer in config.moe_layers:
        experts = model.layers[layer].block_sparse_moe.experts
        prefix = f"language_model.model.layers.{layer}.block_sparse_moe.experts."
        for short, name in PROJECTIONS.items():
            packed, scales = (
                mx.stack(
                    [arrays.pop(f"{prefix}{e}.{short}.{kind}") for e in range(config.num_experts)]
                )
                for kind in ("weight_packed", "weight_scale")
            )
            linear = getattr(experts, name).to_quantized(group_size=32, bits=4, mode="mxfp4")
            linear.biases = None
            setattr(experts, name, linear)
            weights[f"{prefix}{name}.weight"] = packed.view(mx.uint32)
            weights[f"{prefix}{name}.scales"] = scales
    for name, array in arrays.items():
        if not name.startswith("language_model.") or (dense and ".indexer." in name):
            continue
        if name.endswith(".A_log"):
            array = array[: config.kda.num_heads]
        keep = array.dtype == mx.float32 or name.endswith(".gate.weight")
        weights[name] = array.astype(mx.float32 if keep else dtype)
    model.load_weights(list(weights.items()), strict=True)
    return model


def streamed(
    checkpoint: Checkpoint, slots: int, dtype: mx.Dtype = mx.float32, threads: int = 4
) -> Loaded:
    """The checkpoint loaded as the product loads it."""
    return load(checkpoint.manifest, checkpoint.config, slots, quiet, dtype, threads)


def run_spans(
    network: Network[Any], ids: mx.array, spans: Sequence[int], cuts: Sequence[int] = ()
) -> npt.NDArray[np.float32]:
    """Logits of `ids` fed in spans of these lengths, from an empty state: [T, V]."""
    state, outs, start = network.make_state(), [], 0
    for span in spans:
        hidden = network.hidden(ids[start : start + span], state, cuts)
        outs.append(network.logits(hidden).astype(mx.float32))
        mx.eval(outs[-1], *state.arrays())
        start += span
    return np.array(mx.concatenate(outs))


def spans_of(total: int, length: int) -> list[int]:
    """`total` tokens in spans of `length`, the last one shorter."""
    return [min(length, total - start) for start in range(0, total, length)]
